"""A key where a parameter belongs is refused before anything is on disk, and is not said again; names and paths that
look a little like one are taken. YAML on a command line that is none ends in one line."""

import json

import made_runs
import pytest

from eagle3nb.cli import main
from eagle3nb.errors import UserError
from eagle3nb.record import leaks, runs, stage
from eagle3nb.record.keys import refuse_keys
from eagle3nb.record.params import load

PLAIN = "plain0value9876543210"
HELD = {  # put together here, so that nobody's scanner takes this file for a leak
    "key_variable": "sk-or-v1-" + "0123456789abcdef" * 2, "endpoint": "https://me:" + "hunter2@host.example/v1",
    "model": "gsk_" + "aB3" * 10, "extra": {"headers": ["Bearer " + "aB3" * 9]}, "data_root": f"/data/{PLAIN}",
    "prompts": ["https://host.example/v1?api_key=" + "abcdef0123"]}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_API_KEY", PLAIN)
    return made_runs.project(tmp_path)


@pytest.mark.parametrize("name", HELD)
def test_a_key_in_a_parameter_is_refused_before_anything_is_written(root, name, capsys):
    value = HELD[name] if isinstance(HELD[name], str) else json.dumps(HELD[name])
    assert main(["run", "demo", "--stages", "synthesis", "-p", name, value]) == 2
    told = capsys.readouterr()
    assert f"command line: parameter {name} holds " in told.err and not told.out
    assert not any(part in told.err for part in ("0123456789", "hunter2", "aB3", PLAIN))
    assert not any((root / "outputs").iterdir())


def test_in_lab_no_record_holds_it(root):
    given = load("demo", ("synthesis",))["synthesis"].full | {"key_variable": HELD["key_variable"]}
    with pytest.raises(UserError, match="key_variable holds a key"):
        stage.start("synthesis", given)
    assert not any((root / "outputs").iterdir())


@pytest.mark.parametrize("text", [
    "sk-understanding-baseline-2026", "OPENAI_API_KEY", "https://openrouter.ai/api/v1", "moonshotai/kimi-k2.5",
    "/data/hf_models_of_2026/a", "http://127.0.0.1:30000", "data/A@b.jsonl", "task-0123456789abcdef01"])
def test_what_is_no_key_is_taken(root, text, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SSH_KEY_PATH", "/data/hf_models_of_2026")
    refuse_keys({"model": text, "list": [text], "dict": {text: 1}})


def test_a_bundle_is_looked_through_for_the_key_that_its_run_used(root, monkeypatch):
    monkeypatch.setenv("PLACE_TO_ASK", "another0value1234567")
    folder = made_runs.make(root)
    twin = json.loads((folder / "1_audit.json").read_text())
    found = {}
    for variable in ("", "PLACE_TO_ASK"):
        made_runs.change(folder, "audit", parameters=twin["parameters"] | {"key_variable": variable})
        seeker = leaks.Seeker.of(runs.run_named("demo"))
        found[variable] = [leak.what for leak in seeker.leaks("x.html", b"<p>another0value1234567</p>")]
    assert found == {"": [], "PLACE_TO_ASK": ["the value of PLACE_TO_ASK"]}


@pytest.mark.parametrize("name, value", [("prices", "{prompt: 0.6"), ("prompts", "[a"), ("extra", "{a: 1, a: 2}")])
def test_broken_yaml_on_the_command_line_is_told(root, name, value, capsys):
    assert main(["run", "demo", "--stages", "synthesis", "--dry-run", "-p", name, value]) == 2
    assert f"command line: parameter {name} must be " in capsys.readouterr().err


def test_a_date_in_an_object_stays_text(root):
    given = load("demo", ("synthesis",), [("extra", "{when: 2020-01-01}")])["synthesis"].given
    assert given["extra"] == {"when": "2020-01-01"}
