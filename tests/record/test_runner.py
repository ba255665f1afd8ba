"""The runner with real kernels: what succeeds, what fails and how, what is kept, and that nothing is left running.

Each execution costs some seconds (a kernel's start), so a test looks at all there is to see in one.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE, until

from eagle3nb.cli import main
from eagle3nb.files import write_json
from eagle3nb.lock import only_one
from eagle3nb.record import provenance, unchanged
from eagle3nb.record.declared import STAGES, stem
from eagle3nb.record.params import load
from eagle3nb.record.run import Execution
from eagle3nb.record.stage import paths_of

MERGE = ["run", "mini", "--stages", "merge"]


def twin(root: Path, name: str, run: str = "mini") -> dict:
    return json.loads((root / "outputs" / run / f"{name}.json").read_text())


def alive() -> list[str]:
    """Processes of the project that still live: kernels, papermill's children, sleepers. Found by working folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == os.getcwd() and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def finished(mini, tmp_path_factory):
    """Both stages run once, from data that lies outside the project."""
    data = tmp_path_factory.mktemp("elsewhere").resolve() / "of" / "sets"
    shutil.copytree(mini / "data", data)
    (mini / "params/mini/common.yml").write_text(f"seed: 3\ndata_root: {data}\n")
    assert main(["run", "mini"]) == 2  # the other three notebooks are not there
    assert main(["run", "mini", "--stages", "audit,merge"]) == 0
    code = {stage: twin(mini, stem(stage))["provenance"]["code_xxh3"] for stage in ("audit", "merge")}
    with pytest.MonkeyPatch.context() as patch:  # somebody may be editing the package while its tests run
        patch.setattr(unchanged, "code_hash", code.get)
        yield mini


def test_a_finished_run_leaves_notebook_page_twin_and_index(finished, capfd):
    folder = finished / "outputs/mini"
    assert {p.name for p in folder.iterdir()} == {"1_audit.ipynb", "1_audit.html", "1_audit.json", "2_merge.ipynb",
                                                  "2_merge.html", "2_merge.json", "index.html", "work"}
    audit = twin(finished, "1_audit")
    assert set(audit) == {"stage", "status", "parameters", "provenance", "inputs", "outputs", "result", "cost"}
    assert audit["status"] == "ok" and audit["parameters"]["seed"] == 3
    assert audit["result"] == {"verdict": "2 rows", "rows": 2, "bad": None, "console": ["  A2  2 records"]}
    assert audit["inputs"][0]["path"] == "<data_root>/A2/part.txt" and audit["inputs"][0]["bytes"] == 4
    assert audit["cost"]["wall_s"] > 0 and audit["cost"]["peak_rss_bytes"] > 10_000_000
    book = json.loads((folder / "1_audit.ipynb").read_text())
    assert "ok" in book["cells"][0]["source"] and "2 rows" in book["cells"][0]["source"]
    outputs = [o for c in book["cells"] for o in c.get("outputs", [])]
    alts = [o["metadata"]["image/png"]["alt"] for o in outputs if "image/png" in o.get("data", {})]
    assert alts == ["Tokens rise with the row", "Rows: 2"]  # the live one is one output
    assert len([o for o in outputs if o["output_type"] == "stream"]) == 1  # forty rows of progress are one
    assert book["metadata"]["papermill"]["input_path"] == "notebooks/1_audit.ipynb"
    assert not os.access(folder / "1_audit.ipynb", os.W_OK) or not (folder / "1_audit.ipynb").stat().st_mode & 0o222


def test_pages_stand_alone_and_show_no_code(finished):
    page = (finished / "outputs/mini/1_audit.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page) and "<script" not in page and "@import" not in page
    assert len(page) < 500_000 and "record.start" not in page
    assert 'alt="Tokens rise with the row"' in page and "12,345" in page and "A &amp; B" in page
    assert page.count("✔ ok") == 1 and "● set" in page and 'href="index.html"' in page
    index = (finished / "outputs/mini/index.html").read_text()
    for said in ("1 audit", "2 rows", "5 evaluation: not run", 'href="2_merge.html"'):
        assert said in index


def test_no_record_tells_the_machine(finished):
    for path in (finished / "outputs/mini").glob("*.*"):
        text = re.sub(r"[A-Za-z0-9+/]{200,}", "", path.read_text())  # pictures may spell anything
        for secret in (str(finished), str(Path.home()), sys.prefix, "elsewhere", "/tmp/"):
            assert secret not in text or secret == "/", (path.name, secret)  # a user without a home has that
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text), path.name


def test_unchanged_stages_are_kept_and_say_what_they_said(finished, capfd):
    stamp = (finished / "outputs/mini/1_audit.ipynb").stat().st_mtime_ns
    assert main(["run", "mini", "--stages", "audit,merge"]) == 0
    out = capfd.readouterr().out
    assert "1 audit       unchanged, kept: 2 rows\n  A2  2 records\n2 merge       unchanged, kept: merged" in out
    assert out.endswith("Open outputs/mini/index.html\n")
    assert (finished / "outputs/mini/1_audit.ipynb").stat().st_mtime_ns == stamp


def test_every_change_is_a_reason_to_run(finished, monkeypatch):
    folder, data = finished / "outputs/mini", Path(load("mini", ("audit",))["audit"].full["data_root"])

    def why(stage, **changed):
        return unchanged.why_run(stage, load("mini", ("audit", "merge"))[stage].full | changed, paths_of("mini"))

    def altered(path, text):
        """What is said while the file holds `text` (None: while it is away); it is put back after."""
        before = path.read_bytes()
        path.chmod(0o644)
        path.write_text(text) if text is not None else path.unlink()
        said = why("audit") + why("merge")
        path.write_bytes(before)
        return said

    assert why("audit") == why("merge") == ""
    assert why("merge", copies=2) == "parameter copies changed"
    assert altered(folder / "work/corpus/merged.txt", "altered") == "output outputs/mini/work/corpus/merged.txt changed"
    assert altered(folder / "work/corpus/merged.txt", None) == "output outputs/mini/work/corpus/merged.txt is missing"
    assert "output outputs/mini/work/audit/seen.json" in altered(folder / "work/audit/seen.json", "{}")
    assert "input outputs/mini/work/audit/seen.json changed" in altered(folder / "work/audit/seen.json", "{}")
    assert altered(data / "A2/part.txt", "sowr") == "input <data_root>/A2/part.txt changed"
    assert altered(folder / "2_merge.html", None) == "its record is not complete"
    assert altered(folder / "2_merge.json", "{") == "its JSON twin is broken"
    left = json.dumps(twin(finished, "2_merge") | {"result": {"verdict": "amber", "incomplete": True}})
    assert altered(folder / "2_merge.json", left) == "it was left incomplete"
    notebook = (finished / "notebooks/1_audit.ipynb").read_text()
    notebook = notebook.replace("Tokens rise", "Tokens grow")
    assert altered(finished / "notebooks/1_audit.ipynb", notebook) == "the notebook changed"
    (data / "B1").mkdir()
    (data / "B1/part.txt").write_text("new")
    assert why("audit") == "input <data_root>/B1/part.txt is new"
    shutil.rmtree(data / "B1")
    assert why("audit") == why("merge") == ""
    monkeypatch.setattr(unchanged, "code_hash", lambda stage: "other")
    assert why("audit") == "the package's code changed"


def test_code_counts_for_the_stages_that_compute_with_it(tmp_path, monkeypatch):
    package = tmp_path / "eagle3nb"
    for name in ("files.py", "record/run.py", "corpus/merge.py", "drafter/train.py", "acceptance/decode.py",
                 "synthesis/answers.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("before")
    monkeypatch.setattr(provenance.eagle3nb, "__file__", str(package / "__init__.py"))
    for name, touched in (("record/run.py", set()), ("files.py", set(STAGES)),
                          ("acceptance/decode.py", {"synthesis", "audit", "merge", "evaluation"}),
                          ("synthesis/answers.py", {"synthesis"}),
                          ("drafter/train.py", {"audit", "training", "evaluation"}), ("corpus/merge.py", set(STAGES))):
        before = {stage: provenance.code_hash(stage) for stage in STAGES}
        (package / name).write_text("after")
        assert {stage for stage in STAGES if provenance.code_hash(stage) != before[stage]} == touched


def test_a_store_is_checked_by_its_manifest(tmp_path):
    (tmp_path / "manifest.json").write_text(
        '{"shards": [{"file": "shard-0.safetensors", "bytes": 3}], "head": {"file": "head.safetensors", "bytes": 1}}')
    (tmp_path / "head.safetensors").write_text("x")
    assert unchanged.missing_shard(tmp_path / "manifest.json") == "shard-0.safetensors"
    for text, said in (("abc", ""), ("ab", "shard-0.safetensors")):
        (tmp_path / "shard-0.safetensors").write_text(text)
        assert unchanged.missing_shard(tmp_path / "manifest.json") == said


@pytest.mark.parametrize("act, error", [
    ("user", "data/A2 is empty; put rows there"), ("error", "KeyError: 'lost'"),
    ("killed", "the kernel was killed (by SIGKILL)"),
    ("sleep", "the time limit (--timeout) is over")])
def test_a_failure_is_recorded_as_one_and_leaves_nothing_running(finished, capfd, monkeypatch, act, error):
    ready = finished / "outputs/mini/kernel"
    ready.unlink(missing_ok=True)
    if act == "sleep":  # the time is over as soon as the cell sleeps, however slow the machine
        over = property(lambda self: 0.0 if ready.exists() else float("inf"), lambda self, value: None)
        monkeypatch.setattr(Execution, "deadline", over, raising=False)
    assert main([*MERGE, "-p", "act", act]) == 1
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith(f"eagle3nb: 2 merge failed: {error}")
    failed = twin(finished, "2_merge")
    assert failed["status"] == "failed" and failed["error"].startswith(error) and failed["parameters"]["act"] == act
    book = json.loads((finished / "outputs/mini/2_merge.ipynb").read_text())
    banner = book["cells"][0]["source"]
    states = [c["metadata"]["papermill"] for c in book["cells"] if c["cell_type"] == "code"]
    assert "✖ failed" in banner and f"eagle3nb run mini --stages merge -p act {act}" in banner
    assert book["metadata"]["papermill"]["exception"] is True
    if act in ("killed", "sleep"):  # papermill itself would call all of them completed
        assert [s["status"] for s in states][-2:] == ["failed", "pending"]
        assert ready.exists()
    page = (finished / "outputs/mini/2_merge.html").read_text()
    assert "✖ failed" in page and "failed" in (finished / "outputs/mini/index.html").read_text()
    assert "Traceback" not in page or act == "error"
    assert alive() == [] and not list((finished / "outputs/mini").glob("*.partial"))


def test_the_time_limit_holds_before_the_kernel_is_up_too(finished, capfd):
    assert main([*MERGE, "--run", "short", "--timeout", "0.001"]) == 1
    assert "2 merge failed: the time limit (--timeout) is over" in capfd.readouterr().err and alive() == []
    assert "✖ failed" in json.loads((finished / "outputs/short/2_merge.ipynb").read_text())["cells"][0]["source"]
    assert not (finished / "outputs/short/work/corpus").exists()


def test_a_notebook_that_never_finishes_its_stage_has_failed(finished):
    settings = load("mini", ("merge",), run="quiet")["merge"]
    execution = Execution("merge", settings, paths_of("quiet"), "eagle3nb run mini", float("inf"))
    write_json(execution.twin_path, execution.unfinished("did not finish"))
    assert execution.verdict("")["error"] == "the notebook ended without stage.finish"
    assert twin(finished, "2_merge", "quiet")["status"] == "failed"


def start_sleeper(root: Path, *more: str) -> subprocess.Popen:
    """`eagle3nb run` in a process of its own, that has come to a cell that sleeps."""
    ready = root / "outputs/mini/kernel"
    ready.unlink(missing_ok=True)
    runner = subprocess.Popen([sys.executable, "-m", "eagle3nb", *MERGE, "-p", "act", "sleep", *more],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: ready.exists() or runner.poll() is not None)
        assert ready.exists() and len(alive()) >= 5  # runner, papermill, kernel, what the cell started and that started
    except BaseException:
        runner.kill()
        raise
    return runner


def test_sigterm_ends_the_run_and_status_follows_it(finished, capfd):
    runner = start_sleeper(finished)
    assert main(["status", "mini", "--once"]) == 0
    assert re.search(r"1 audit +ok: 2 rows\n2 merge +running for \d", capfd.readouterr().out)
    assert main([*MERGE]) == 2  # the run is locked
    assert "run mini is under way already" in capfd.readouterr().err
    runner.send_signal(signal.SIGTERM)
    _, err = runner.communicate(timeout=PATIENCE)
    assert runner.returncode == 1 and "2 merge failed: ended by SIGTERM" in err and "Traceback" not in err
    assert twin(finished, "2_merge")["error"] == "ended by SIGTERM" and alive() == []
    assert main(["status", "mini"]) == 0  # no run: says where it stands and ends
    assert "2 merge       failed: ended by SIGTERM" in capfd.readouterr().out


def test_a_killed_runner_takes_its_kernel_along_and_the_next_run_mends(finished, capfd):
    runner = start_sleeper(finished)
    runner.kill()
    runner.communicate(timeout=PATIENCE)
    until(lambda: alive() == [])
    assert twin(finished, "2_merge")["status"] == "failed"
    page = finished / "outputs/mini/2_merge.html"  # nobody was left to write it: it was retired at the start
    assert "has not ended yet" in page.read_text() and not page.with_suffix(".ipynb").exists()
    assert main(MERGE) == 0 and "✔ ok" in page.read_text()
    assert "2 merge       runs (failed before: did not finish)" in capfd.readouterr().out
    assert twin(finished, "2_merge")["status"] == "ok"


def test_wrong_use_starts_nothing(finished, capfd):
    for call, said in ((["run", "minni"], "did you mean mini?"), ([*MERGE, "-p", "copis", "2"], "did you mean copies?"),
                       ([*MERGE, "-p", "copies", "two"], "parameter copies must be int, not str 'two'"),
                       ([*MERGE, "--run", "../out"], "must be a name of letters"),
                       (["run", "mini", "--stages", "merg"], "did you mean merge?"),
                       (["status", "nono"], "no run 'nono'")):
        assert main(call) == 2
        err = capfd.readouterr().err
        assert err.startswith("eagle3nb: ") and said in err and err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["run", "mini", "--forse"])
    assert alive() == []


def test_plain_papermill_works_and_refuses_an_ill_typed_value(finished):
    call = [sys.executable, "-m", "papermill", "notebooks/2_merge.ipynb", "out.ipynb", "-k", "python3"]
    done = subprocess.run([*call, "-f", "params/mini/common.yml", "-r", "copies", "2"], capture_output=True, text=True)
    assert done.returncode == 1 and "parameter copies must be int, not str '2'" in done.stderr
    assert twin(finished, "2_merge")["error"].startswith("parameter copies must be int")


def test_two_runs_do_not_share_a_work_dir(finished, capfd):
    """Another run with this work_dir would write into the same drafter."""
    work = finished / "elsewhere"
    with only_one(work / ".runner.lock"):
        assert main([*MERGE, "--run", "other", "-p", "work_dir", str(work)]) == 2
    assert "elsewhere is being written by another run; wait, or give this one its own" in capfd.readouterr().err
