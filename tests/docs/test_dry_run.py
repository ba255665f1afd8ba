"""`eagle3nb run --dry-run`: what it says, what it refuses, and that it writes nothing."""

import hashlib
import json
import re

import pytest
import world as worlds

from eagle3nb.cli import main
from eagle3nb.lock import only_one
from eagle3nb.record import dry_run as module
from eagle3nb.record.declared import STAGES

RUN = ["run", "demo", "--dry-run"]


@pytest.fixture(scope="module")
def project(base, tmp_path_factory):
    """The project of the pages' world, as the working folder."""
    made = worlds.World(base, tmp_path_factory.mktemp("dry") / "w")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.project)
        patch.delenv("EAGLE3NB_SGLANG_PYTHON", raising=False)
        yield made.project


def tree(folder) -> str:
    """Of every file's name, content and time below it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() + str(p.stat().st_mtime_ns).encode()
                                   for p in files) + str(sorted(folder.rglob("*"))).encode()).hexdigest()


def said(capfd, *words) -> tuple[int, str, str]:
    code = main([*RUN, *words])
    out, err = capfd.readouterr()
    return code, out, err


def test_it_tells_the_plan_and_writes_nothing(project, capfd):
    before = tree(project)
    code, out, err = said(capfd, "--run", "second", "-p", "seed", "2")
    assert (code, err) == (0, "") and tree(project) == before
    assert "Run second of profile params/demo: records in outputs/second, work in outputs/second/work" in out
    told = [line.split()[1] for line in out.splitlines() if re.match(r"\d ", line)]
    assert told == ["audit", "merge", "extraction", "training", "evaluation"]  # synthesis only where it is named
    assert out.count("would run: not run yet") == 5
    assert "seed = 2 (notebook: 1; command line)" in out and "run = 'second' (notebook: 'demo'; command line)" in out
    assert "minutes = 3.0 (notebook: 0.0; training.yml)" in out and "target = " not in out
    assert out.endswith("Nothing was started and nothing was written.\n")


def test_what_is_unchanged_would_be_kept(project, capfd, monkeypatch):
    monkeypatch.setattr(module, "why_run", lambda stage, *_: "parameter seed changed" if stage == "merge" else "")
    code, out, _ = said(capfd)
    assert code == 0 and "1 audit       unchanged, would be kept\n" in out
    assert "2 merge       would run: parameter seed changed\n" in out
    assert "3 extraction  unchanged, would be kept, if merge writes what is there already\n" in out
    assert said(capfd, "--force")[1].count("would run: forced") == 5


def test_the_reason_is_the_runners(project, capfd):
    (project / "outputs/halted").mkdir()
    (project / "outputs/halted/1_audit.json").write_text(json.dumps({
        "stage": "audit", "status": "failed", "error": "disk full", "parameters": {}, "provenance": {}, "inputs": [],
        "outputs": [], "result": {}, "cost": {}}))
    code, out, _ = said(capfd, "--run", "halted", "--stages", "audit")
    assert code == 0 and "would run: failed before: disk full" in out


REFUSED = {  # what is given → the stages that it concerns, and what is said
    ("-p", "data_root", "data/nowhere"): ("audit, merge", "data_root data/nowhere does not exist"),
    ("-p", "exclude", "[A7]"): ("audit, merge", "exclude: 'A7' matches no dataset"),
    ("-p", "max_seq_len", "2"): ("audit, merge", "max_seq_len is 2"),
    ("-p", "target", "models/none"): ("audit, merge, extraction, training, evaluation", "holds no config.json"),
    ("-p", "target", "params/kimi-k2.5/target"): ("extraction, evaluation", "holds no *.safetensors"),
    ("-p", "engine", "vllm"): ("extraction, evaluation", "engine 'vllm' is unknown"),
    ("-p", "engine", "sglang"): ("extraction, evaluation", "engine sglang needs SGLang"),
    ("-p", "tensor_parallel", "2"): ("extraction, evaluation", "tensor_parallel and engine_args are for engine sglang"),
    ("-p", "allow", "[disk]"): ("audit", "there is no rule 'disk'; did you mean 'disk_short'?"),
    ("-p", "benchmarks", "[data/none.jsonl]"): ("audit", "no set of prompts and no file"),
    ("-p", "masks", "mine"): ("audit, merge", "masks is 'mine'"),
    ("-p", "truncation", "left"): ("merge", "truncation is 'left'"),
    ("-p", "caps", "{B9: 3}"): ("merge", "caps: 'B9' matches no dataset"),
    ("-p", "dedup", "some"): ("merge", "dedup is 'some'"),
    ("-p", "reclaim", "[data/demo]"): ("merge", "reclaim: data/demo"),
    ("-p", "epochs", "0"): ("training", "epochs must be 1 or more"),
    ("-p", "initialise", "models/none"): ("training", "initialise must be one of"),
    ("-p", "nodes", "2"): ("training", "rendezvous is ''"),
    ("-p", "steps", "9"): ("evaluation", "steps"),
    ("-p", "export_dtype", "int8"): ("evaluation", "export_dtype is 'int8'"),
    ("-p", "prompts", "[data/none.jsonl]"): ("evaluation", "no set of prompts and no file"),
    ("-p", "prompts", "[gsm8k]"): ("evaluation", "gsm8k not installed: pip install"),
    ("-p", "drafters", "[outputs/none]"): ("evaluation", "drafters: outputs/none holds no config.json"),
    ("--stages", "extraction"): ("extraction", "work/corpus/merge.json does not exist; run merge first"),
    ("--stages", "audit,training"): ("training", "manifest.json does not exist; run extraction first"),
    ("--stages", "synthesis", "-p", "prompts", "[data/none.jsonl]"): ("synthesis", "no folder of recipes, no file"),
    ("--stages", "synthesis", "-p", "endpoint", "https://api.example.org", "-p", "key_variable", "NO_SUCH_KEY"): (
        "synthesis", "the environment variable NO_SUCH_KEY is not set"),
    ("--stages", "synthesis", "-p", "endpoint", "http://127.0.0.1:1", "-p", "api", "rest"): ("synthesis", "api 'rest'"),
    ("--stages", "synthesis", "-p", "endpoint", "http://127.0.0.1:1", "-p", "api", "sglang", "-p", "extra", "{a: 1}"): (
        "synthesis", "extra is for api openai"),
    ("--stages", "synthesis", "-p", "regenerate", "[B9]"): ("synthesis", "matches no dataset"),
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words))
def test_what_a_stage_would_refuse_is_said_beforehand(words, project, capfd):
    concerned, text = REFUSED[words]
    before = tree(project / "outputs")
    code, out, err = said(capfd, "--run", "third", *words)
    lines = [line for line in err.splitlines() if text in line]
    assert code == 2 and lines and tree(project / "outputs") == before, err
    assert lines[0].startswith(f"eagle3nb: {concerned}: "), lines[0]


@pytest.mark.parametrize("words, text", [
    (["-p", "sead", "2"], "did you mean seed?"), (["-p", "seed", "two"], "seed must be int"),
    (["--stages", "marge"], "did you mean merge?"), (["--run", "a/b"], "parameter run must be a name")])
def test_wrong_use_is_told_as_by_run(words, text, project, capfd):
    code, out, err = said(capfd, *words)
    assert code == 2 and text in err and "would run" not in out


def test_a_run_that_is_under_way_is_told(project, capfd):
    with only_one(project / "outputs/busy/work/.runner/lock"):
        code, _, err = said(capfd, "--run", "busy")
    assert code == 2 and "run busy is under way" in err
    assert said(capfd, "--run", "busy")[0] == 0


def test_a_plan_without_data_is_no_fault(project, capfd):
    assert main(["run", "kimi-k2.5", "--stages", "audit", "--dry-run", "-p", "data_root", "data/to-come"]) == 0
    assert "planned_tokens = 87800000 (notebook: 0; audit.yml)" in capfd.readouterr().out
    assert main(["run", "kimi-k2.5", "--stages", "audit,merge", "--dry-run", "-p", "data_root", "data/to-come"]) == 2
    assert "merge: data_root data/to-come does not exist" in capfd.readouterr().err


def test_datasets_that_synthesis_makes_are_not_missed(project, capfd):
    words = ["--stages", "synthesis,audit,merge", "-p", "data_root", "data/new"]
    code, out, err = said(capfd, "--run", "fourth", *words)
    assert code == 0, err
    assert out.index("0 synthesis") < out.index("1 audit")


def test_every_stage_has_its_checks():
    """A stage that is added must be thought of here."""
    assert set(STAGES) == {"synthesis", "audit", "merge", "extraction", "training", "evaluation"}
    assert set(module.NEEDS) < set(STAGES)
