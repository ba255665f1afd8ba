"""Twins that a disk, an editor or another tool damaged: each command says so, none ends in a traceback, and one damaged
file costs the others nothing. Nothing is written over a record, nor where a folder cannot be."""

import json
import math

import made_runs
import pytest

from eagle3nb.cli import main
from eagle3nb.record import bundle, compare, compare_page, index, runs, status, unchanged
from eagle3nb.record.stage import paths_of


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_runs.project(tmp_path)
    made_runs.make(tmp_path, "a")
    made_runs.make(tmp_path, "b", seed=1)
    return tmp_path


def damaged(root, way, value) -> None:
    path = root / "outputs/b/4_training.json"
    twin = inner = json.loads(path.read_text())
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    path.write_text(json.dumps(twin))


CASES = [(("cost", "total_s"), math.inf), (("cost", "total_s"), math.nan), (("cost", "peak_rss_bytes"), 10**400),
         (("provenance",), 5), (("status",), None), (("result",), "x"), (("outputs",), 5), (("inputs",), [{"path": 1}]),
         (("parameters", "target"), "\ud800"), (("result", "best"), {"acceptance": math.nan})]


@pytest.mark.parametrize("way, value", CASES)
def test_a_damaged_twin_is_told_everywhere(root, way, value, capsys):
    damaged(root, way, value)
    run = runs.run_named("b")
    assert set(run.damaged) == {"training"} and "✖ failed" in index.runs_page(runs.all_runs(), []).encode().decode()
    assert "4_training.json" in index.run_page(run) and run.damaged["training"] in index.run_page(run)
    assert run.damaged["training"] in status.picture(run.folder, run.folder, False)
    assert unchanged.why_run("training", made_runs.parameters("training", "b"), paths_of("b")) == (
        "its JSON twin is broken")
    assert main(["bundle", "b"]) == 2 and run.damaged["training"] in capsys.readouterr().err
    assert run.damaged["training"] in compare_page.html(compare.compare(["a", "b"]))


def test_a_twin_of_no_object_or_no_depth(root):
    for text in ("[]", "5", "[" * 100_000):
        (root / "outputs/b/4_training.json").write_text(text)
        assert set(runs.run_named("b").damaged) == {"training"}
        assert unchanged.why_run("training", {}, paths_of("b")) == "its JSON twin is broken"


def test_what_a_record_lacks_is_a_reason_to_run_or_not_shown(root):
    for ending in ("ipynb", "html"):
        assert (root / f"outputs/b/4_training.{ending}").exists()
    reason = unchanged.why_run("training", made_runs.parameters("training", "b"), paths_of("b"))
    assert reason == "a parameter changed"  # made_runs tell no hash
    damaged(root, ("result", "coverage"), "")
    damaged(root, ("result", "tokens_per_s"), "fast")
    rows = {row["what"]: row["b"] for row in compare.costs(compare.compare(["a", "b"]))}
    assert rows["text it covers"] == rows["training, tokens a second"] == "–"


@pytest.mark.parametrize("out, told", [
    ("own.txt", "give the name of an .html file"), ("outputs", "give the name of an .html file"),
    ("outputs/a/1_audit.html", "a record may stand there"), ("outputs/index.html", "a record may stand there"),
    ("own.txt/page.html", "cannot write own.txt/page.html")])
def test_a_comparison_is_written_over_nothing_else(root, out, told, capsys):
    (root / "own.txt").write_text("my own")
    page = (root / "outputs/a/1_audit.html").read_bytes()
    assert main(["compare", "a", "b", "--out", out]) == 2 and told in capsys.readouterr().err
    assert (root / "own.txt").read_text() == "my own" and (root / "outputs/a/1_audit.html").read_bytes() == page


def test_a_bundle_under_a_file_is_refused_in_one_line(root, capsys):
    (root / "own.txt").write_text("my own")
    assert main(["bundle", "a", "--out", "own.txt/a.zip"]) == 2
    assert "cannot write own.txt/a.zip" in capsys.readouterr().err
    assert bundle.bundle("a", "new/folder/a.zip") == 0
