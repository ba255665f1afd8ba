"""What a user with bad luck meets: half a character in an answer, a key where a name belongs, somebody's own rows under
the name of a file of prompts, two names of one folder. Nothing is paid for twice, shown or lost."""

import datetime
import fcntl
import json
import math
from pathlib import Path

import pytest
from synthesis.asking import asked, dataset, tokenizer_of
from synthesis.faulty_server import FaultyServer
from synthesis.speaking import END, TOOLS
from synthesis.test_endpoint import SAMPLING, chat

from eagle3nb.errors import UserError
from eagle3nb.synthesis import faults, journal, overview
from eagle3nb.synthesis.answerer import Answerer, connect
from eagle3nb.synthesis.answers import alone, file_of, journal_of
from eagle3nb.synthesis.budget import Budget
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint
from eagle3nb.synthesis.sources import Dataset, datasets, prompt_of
from eagle3nb.synthesis.talks import language_of

OUT, KEY = Path("out"), "sk-or-v1-0123456789abcdef"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)


def language():
    return language_of(tokenizer_of(TOOLS), (END,))


def of(*messages) -> Dataset:
    return dataset() if not messages else Dataset(
        "X1_test", "a file", None, 40, 0.5, 0.9, asked=(prompt_of("q", "X1_test", list(messages)),))


def plan(wanted: Dataset) -> dict:
    return overview.plan([wanted], 1, Answerer(None, "served-model", False, False), language(), OUT, 1, {})[0]


@pytest.mark.parametrize("half", [
    {"content": "half \ud83d a face"}, {"content": "well said", "reasoning_content": "\udc00"},
    {"content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "\ud800"}'}}]}])
def test_an_answer_with_half_a_character_is_paid_for_once_and_sampled_again(half):
    """JSON can spell it; no file and no tokenizer takes it."""
    def say(body):
        return {"role": "assistant"} | half if len(server.seen) < 2 else "well answered"

    with FaultyServer(say=say) as server:
        part = asked(server.url, OUT, of=dataset({"a": ["Aa?"]}), retries=0)
        assert part.report["answers"] == {"given up": 0, "half a character": 1, "stop": 1}
        assert len(server.seen) == 2
        file_of(OUT, "X1_test", 0).unlink()
        assert asked(server.url, OUT, of=dataset({"a": ["Aa?"]})).state == "made" and len(server.seen) == 2
    assert part.report["asks"] == {"given": 2, "succeeded": 1, "failed": 1, "skipped": 0}


def test_a_servers_words_can_be_written_down():
    fault = faults.of_status(400, json.dumps({"error": {"message": "no \ud83d"}}), {}, 0.0)
    assert fault.detail.encode() == b"no ?"


def test_a_limit_that_cuts_a_character_leaves_no_mark_of_it():
    with FaultyServer({5: ["length"]}, say=lambda body: "a face: \ufffd\ufffd") as server:
        kind, found = OpenAIEndpoint(server.url + "/v1", "m", ""), []
        kind.answer([chat(5)], SAMPLING, lambda ask, answer: found.append(answer))
    assert (found[0].outcome, found[0].message["content"]) == ("length", "a face: ")


@pytest.mark.parametrize("token", [-1, 2**31, 2**70])
def test_an_id_that_no_tokenizer_has_is_a_fault(token):
    with pytest.raises(faults.Fault, match="malformed"):
        SGLangEndpoint("http://127.0.0.1").read(None, None, {"output_ids": [5, token], "meta_info": {
            "finish_reason": {"type": "stop"}}})


@pytest.mark.parametrize("extra, told", [
    ({"max_tokens": 9}, "extra sets max_tokens"), ({"n": 3, "model": "m"}, "extra sets model, n"),
    ({"stream": True}, "sets stream"), ({"at": datetime.date(2026, 1, 1)}, "no JSON"), ({"x": math.nan}, "no JSON")])
def test_extra_sets_nothing_by_which_records_and_budgets_go(extra, told):
    with pytest.raises(UserError, match=told):
        OpenAIEndpoint("http://127.0.0.1/v1", "m", "", extra=extra)


@pytest.mark.parametrize("url, variable", [
    (f"https://h/v1#{KEY}", ""), (f"https://me:{KEY}@h:99999/v1", ""), ("https://h/v1", KEY)])
def test_a_key_in_the_wrong_place_is_refused_and_not_said_again(url, variable):
    with pytest.raises(UserError, match="key_variable") as error:
        OpenAIEndpoint(url, "m", variable)
    assert KEY not in str(error.value)


def test_rows_of_ones_own_are_not_replaced():
    file = file_of(OUT, "X1_test", 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"my own")
    with FaultyServer() as server, pytest.raises(UserError, match="out/X1_test holds part-000.jsonl.gz, which synth"):
        asked(server.url, OUT)
    assert file.read_bytes() == b"my own" and not server.seen


def test_one_folder_under_two_names_is_made_once():
    (OUT / "X1_test").mkdir(parents=True)
    Path("other").symlink_to("out")
    with (alone(file_of(OUT.absolute(), "X1_test", 0)), pytest.raises(UserError, match="by another run"),
          alone(file_of(Path("other").absolute(), "X1_test", 0))):
        pass
    path = journal_of(OUT, "X1_test", 0, False)  # as another checkout has it, whose locks lie elsewhere
    with open(path, "ab") as handle, FaultyServer() as server:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="answers.journal is being written by another run"):
            asked(server.url, OUT)
        assert not server.seen


def test_on_a_full_disk_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(journal, "disk_free", lambda path: 1000)
    with FaultyServer() as server, pytest.raises(UserError, match="is full; free space"):
        asked(server.url, OUT)
    assert not server.seen


def test_what_is_known_is_of_these_settings():
    with FaultyServer() as server:
        asked(server.url, OUT, budget=Budget(requests=6))
    assert (plan(of())["known"], plan(of())["answers"]) == (6, 8)
    assert plan(dataset(temperature=0.9))["known"] == 0


def test_given_answers_without_text_are_planned_for():
    user, call = {"role": "user", "content": "Hi"}, {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "blue"}
    listed = {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}
    assert [plan(of(user, user, *told))["answers"], plan(of(user, user, listed, user))["answers"]] == [2, 2]


@pytest.mark.parametrize("text", ["[]", "5", '{"complete": true}'])
def test_a_report_that_is_none_counts_for_nothing(text):
    with FaultyServer() as server:
        asked(server.url, OUT)
        (OUT / "X1_test.json").write_text(text)
        assert asked(server.url, OUT).state == "made" and len(server.seen) == 8


@pytest.mark.parametrize("value", ['[["f"]],{"outcome":"stop","spent":{"requests":1}}]',
                                   '"f",{"outcome":"stop","spent":{"requests":"x"}}]'])
def test_a_line_that_no_journal_writes_is_told(value):
    with FaultyServer() as server:
        asked(server.url, OUT)
        file_of(OUT, "X1_test", 0).unlink()
        with open(journal_of(OUT, "X1_test", 0, False), "a") as handle:
            handle.write(f'["a",0,0,{value}\n')
        with pytest.raises(UserError, match="line 10 is damaged"):
            asked(server.url, OUT)


def test_why_nothing_came_is_told():
    with FaultyServer() as server, pytest.raises(UserError, match="'template refuses': 1"):
        asked(server.url, OUT, of=of({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "x"},
                                     {"role": "tool", "content": "y"}))


@pytest.mark.parametrize("cards, told", [([{"id": 5}], "no OpenAI API"), ([{"id": None}], "no OpenAI API")])
def test_models_without_names(cards, told):
    with FaultyServer(models=cards) as server, pytest.raises(UserError, match=told):
        connect(OUT, endpoint=server.url + "/v1", key_variable="")


def test_models_that_tell_odd_things():
    with FaultyServer(models=[{"id": "m", "root": 5, "max_model_len": "4096"}]) as server:
        found = connect(OUT, endpoint=server.url + "/v1", key_variable="").found
    assert (found["root"], found["context"]) == (None, None)


def test_a_file_without_a_name_makes_no_dataset():
    Path("..jsonl").write_text('{"prompt": "Hi"}\n')
    with pytest.raises(UserError, match="names no dataset"):
        datasets(["..jsonl"], data_root="out", max_new_tokens=5, temperature=0.5, top_p=1.0)
