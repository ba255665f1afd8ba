"""Run All, as JupyterLab runs it: each notebook's own cells in one kernel whose working folder is notebooks/, without
papermill and without the runner, one stage after the other."""

import nbformat
import pytest
import workplace
from htmlpage import check
from nbclient import NotebookClient

from eagle3nb.files import read_json
from eagle3nb.record.page import page

STEMS = ("1_audit", "2_merge", "3_extraction", "4_training", "5_evaluation")


def test_the_notebooks_run_from_top_to_bottom_where_lab_runs_them(tmp_path, tiny_target):
    """One test, since each stage needs the one before it."""
    project = workplace.make(tmp_path / "project", tiny_target)
    before = {path.name: path.read_bytes() for path in (project / "notebooks").iterdir()}
    for stem in STEMS:
        book = nbformat.read(project / "notebooks" / f"{stem}.ipynb", as_version=4)
        client = NotebookClient(book, kernel_name="python3", timeout=600, startup_timeout=600, iopub_timeout=600,
                                resources={"metadata": {"path": str(project / "notebooks")}})
        client.execute()  # raises where a cell does
        twin = read_json(project / "outputs/t" / f"{stem}.json")
        assert twin["status"] == "ok" and twin["provenance"]["command"] == "", stem
        shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
        assert not [output for output in shown if output.output_type == "error"]
        seen = check(page(book, twin))
        assert seen.images and twin["result"]["verdict"] in seen.text, stem
    # Paths start at the project's root, and running leaves nothing beside the notebooks.
    assert {path.name: path.read_bytes() for path in (project / "notebooks").iterdir()} == before


@pytest.mark.parametrize("stem", STEMS)
def test_headings_make_a_table_of_contents(stem):
    """Lab's contents come from the headings: one title with the stage's number, sections below it, none skipped."""
    cells = nbformat.read(workplace.ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    heads = [line for cell in cells if cell.cell_type == "markdown" for line in cell.source.split("\n")
             if line.startswith("#")]
    levels = [len(line) - len(line.lstrip("#")) for line in heads]
    number, stage = stem.split("_")
    assert heads[0] == f"# {number} · {stage.capitalize()}" and levels.count(1) == 1 and levels.count(2) >= 4
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert len(set(heads)) == len(heads)
