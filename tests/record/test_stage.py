"""The opening and closing cell in plain Python, without a kernel."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from eagle3nb import record
from eagle3nb.errors import UserError
from eagle3nb.record import console, figures, tables
from eagle3nb.record.provenance import label, locate, plain, scrubber
from eagle3nb.record.status import last_line

CELL = 'run: str = "r"  # name\nwork_dir: str = ""\nrate: float = 1.0\nseed: int = 4\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = tmp_path / "project"
    (root / "params").mkdir(parents=True)
    (root / "notebooks").mkdir()
    cell = {"cell_type": "code", "id": "p", "metadata": {"tags": ["parameters"]}, "source": CELL}
    (root / "notebooks/3_extraction.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}}))
    monkeypatch.chdir(root / "notebooks")  # where JupyterLab stands
    return root


def values(**changed) -> dict:
    return {"run": "r", "work_dir": "", "rate": 2, "seed": 4, "unrelated": object()} | changed


def test_a_stage_fails_until_it_finishes(project):
    stage = record.start("extraction", values())
    path = project / "outputs/r/3_extraction.json"
    before = json.loads(path.read_text())
    assert (before["status"], before["error"]) == ("failed", "did not finish")
    assert before["parameters"] == {"run": "r", "work_dir": "", "rate": 2.0, "seed": 4}
    assert stage.paths.states == project / "outputs/r/work/states"
    (stage.paths.states).mkdir(parents=True)
    (stage.paths.states / "a.bin").write_bytes(b"12")
    fig, ax = figures.new()
    figures.label(ax, "step", "loss (nats)")
    stage.figure(fig, "a loss")
    stage.table(pd.DataFrame({"n": [1234], "share": [math.nan]}), "Rows")
    with pytest.raises(UserError, match="states/b.bin does not exist"):
        stage.finish("done", {}, outputs=[stage.paths.states / "b.bin"])
    stage.finish("done", {"rate": np.float32(0.5), "worst": math.inf}, outputs=[stage.paths.states])
    after = json.loads(path.read_text())
    assert after["status"] == "ok" and "error" not in after
    assert after["result"] == {"verdict": "done", "rate": 0.5, "worst": None}
    assert [(e["path"], e["bytes"]) for e in after["outputs"]] == [("outputs/r/work/states/a.bin", 2)]
    assert after["provenance"]["folders"]["outputs"] == ["outputs/r/work/states"]


@pytest.mark.parametrize("changed, said", [
    ({"rate": "1e-4"}, "parameter rate must be float, not str '1e-4'; write 1.0e-4"),
    ({"seed": True}, "seed must be int"), ({"run": "a/b"}, "parameter run must be a name"),
    ({"run": ".."}, "parameter run must be a name"), ({"run": ""}, "run")])
def test_ill_typed_values_are_refused(project, changed, said):
    with pytest.raises(UserError, match=said):
        record.start("extraction", values(**changed))


def test_a_parameters_cell_that_was_not_run_is_named(project):
    with pytest.raises(UserError, match="parameter rate is not set; run the notebook's parameters cell"):
        record.start("extraction", {"run": "r", "work_dir": ""})


def test_the_seed_makes_the_run_repeat(project):
    draws = []
    for _ in range(2):
        record.start("extraction", values())
        draws.append(np.random.random())
    assert draws[0] == draws[1]


def test_paths_outside_the_project_are_found_again_by_their_parameter(project, tmp_path):
    parameters = {"data_root": str(tmp_path / "far"), "target": str(tmp_path / "far/model")}
    for path, name in ((tmp_path / "far/A2/x", "<data_root>/A2/x"), (tmp_path / "far/model/w", "<target>/w"),
                       (project / "data/x", "data/x")):
        assert label(path, parameters) == name and locate(name, parameters) == path
    assert locate(label(tmp_path / "near" / "x", parameters), parameters) is None


def test_scrubbing_takes_this_machine_out_of_a_text(project, tmp_path):
    scrub = scrubber({"data_root": str(tmp_path / "far")})
    assert scrub(f'File "{project}/eagle3nb/x.py", in {project}') == 'File "eagle3nb/x.py", in .'
    assert scrub(f"read {tmp_path}/far/A2; {project}-old/x").startswith("read <data_root>/A2; <tmp>/")
    assert scrub("a / b, /usual/path, 1/2") == "a / b, /usual/path, 1/2"


def test_plain_is_json_whatever_comes(project):
    value = {1: np.arange(2), "f": pd.DataFrame({"a": [np.int64(1)], "b": [math.nan]}), "s": {"y", "x"}, "n": np.nan,
             "p": project / "data" / "x", "t": (True, None)}
    assert plain(value) == {"1": [0, 1], "f": [{"a": 1, "b": None}], "s": ["x", "y"], "n": None, "p": "data/x",
                            "t": [True, None]}


def test_numbers_for_people():
    given = (1234567, 0.1234567, 12345.6, True, None, math.nan, "x", np.int64(1000))
    assert [tables.number(v) for v in given] == ["1,234,567", "0.1235", "12,346", "yes", "–", "–", "x", "1,000"]
    assert [tables.size(n) for n in (12, 1500, 5.03e12)] == ["12 B", "1.5 KB", "5.0 TB"]
    assert [tables.span(s) for s in (8.24, 250, 11100)] == ["8.2 s", "4 min 10 s", "3 h 5 min"]


def test_the_progress_line_and_the_last_metrics(tmp_path):
    found = {"what": "training", "done": 12300, "total": 40000, "unit": "tokens", "rate": 684.2, "left_s": 40.4,
             "note": "loss 2"}
    assert console.progress_line(found) == "training 12,300/40,000 tokens, 684.2/s, 40.4 s left, loss 2"
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 1200, "loss": 2.3456, "kind": "x"}\n{"step": 13')
    assert last_line(tmp_path / "m.jsonl") == "step 1,200, loss 2.346" and last_line(tmp_path / "none") == ""


def test_figures_have_marked_axes_and_close_what_pyplot_holds():
    fig, axes = figures.new(columns=2)
    axes[0].plot([1, 2], label="a")
    figures.label(axes[0], "step", "loss (nats)", "It falls")
    assert axes[0].get_xlabel() == "step" and axes[0].get_legend() is not None and len(set(figures.COLOURS)) == 7
