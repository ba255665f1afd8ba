"""What is left for people after a stage: the finished notebook and its page without code. The indexes: index.py.

Everything in them comes from the executed notebook and its JSON twin.
"""

import json
import os
from pathlib import Path

from eagle3nb.files import atomic_write, read_json, shown
from eagle3nb.record import tables
from eagle3nb.record.declared import notebook_of, stem
from eagle3nb.record.page import page, role, shell, verdict_html
from eagle3nb.record.provenance import scrubbed


def finish_notebook(partial: Path, stage: str, twin: dict, again: str, scrub) -> dict:
    """The executed notebook (plain JSON) made a record: verdict on top, true cell states, no path of this machine.

    `partial`: what papermill wrote, if it got that far. `again`: the command that resumes.
    """
    book = read_json(partial if partial.exists() else notebook_of(stage))
    cells = [c for c in book["cells"] if "papermill-error-cell-tag" not in c["metadata"].get("tags", [])]
    for cell in cells:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if role(o) != "verdict"]
    if twin["status"] != "ok":
        mark_unfinished(cells)
    banner = {"cell_type": "markdown", "id": "verdict", "metadata": {"tags": ["eagle3nb-verdict"]},
              "source": verdict_html(twin, again)}
    record = partial.with_name(f"{stem(stage)}.ipynb")
    book["cells"] = [banner, *cells]
    book["metadata"]["papermill"] = book["metadata"].get("papermill", {}) | {
        "input_path": shown(notebook_of(stage)), "output_path": shown(record), "exception": twin["status"] != "ok"}
    return scrubbed(book, scrub)


def mark_unfinished(cells: list[dict]) -> None:
    """papermill calls every cell "completed" once its kernel is dead; the one that failed is the last started."""
    code = [c for c in cells if c["cell_type"] == "code"]
    started = [c for c in code if c["metadata"].get("papermill", {}).get("start_time")]
    for cell in code:
        if cell not in started:
            cell["metadata"]["papermill"] = {"status": "pending"}
    if started:
        started[-1]["metadata"]["papermill"] |= {"status": "failed", "exception": True}


def write_records(folder: Path, book: dict, twin: dict) -> None:
    """<n>_<stage>.html and .ipynb, each whole or not at all, and write-protected: opening one must not change it."""
    source = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    for suffix, text in ((".html", page(book, twin)), (".ipynb", source)):
        write_protected(folder / (stem(twin["stage"]) + suffix), text)


def write_protected(path: Path, text: str) -> None:
    with atomic_write(path) as handle:
        handle.write(text)
    os.chmod(path, 0o444)


def retire_records(folder: Path, twin: dict, again: str) -> None:
    """Before a stage runs once more: what its last execution left must not be taken for this one, however this ends.

    `twin`: the unfinished one. Its page says so until `write_records` has a better one, after a kill -9 for good.
    """
    name, run = stem(twin["stage"]), str(twin["parameters"].get("run", ""))
    sentence = "has not ended yet. If nothing runs any more, it was killed"
    banner = tables.banner("running", f"{name.replace('_', ' ')} · run {run}",
                           sentence + (f"; to resume: {again}" if again else ""))
    (folder / f"{name}.ipynb").unlink(missing_ok=True)
    links = (("index.html", "all stages"), (f"{name}.json", "data (JSON)"))
    body = f"<h1>{twin['stage'].capitalize()}</h1>{banner}"
    write_protected(folder / f"{name}.html", shell(f"{name} · {run}", links, body))
