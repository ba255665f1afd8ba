"""A dataset by a server, whatever happens on the way: no answer is paid for twice, and in the end the rows are those of
an undisturbed start."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from synthesis import asking
from synthesis.asking import PROMPTS, asked, dataset
from synthesis.faulty_server import FOLDER, FaultyServer
from synthesis.patience import Patience
from synthesis.speaking import END, Says, call, naive
from waiting import until

from eagle3nb.corpus.overview import off_policy
from eagle3nb.corpus.records import Source, tokens
from eagle3nb.errors import UserError
from eagle3nb.synthesis import answers, overview
from eagle3nb.synthesis.answerer import connect
from eagle3nb.synthesis.answers import alone, file_of, journal_of, make, seed_of, spent
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.journal import known_in
from eagle3nb.synthesis.talks import language_of

ASKS = [(key, turn, 0) for key, texts in PROMPTS.items() for turn in range(len(texts))]
SEEDS = {seed_of(1, key): key for key in ASKS}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)


def said(body) -> str:
    return f"You said {body['messages'][-1]['content']}"


def server(script=None, **more) -> FaultyServer:
    return FaultyServer(script, **({"say": said} | more))


def packed(out) -> bytes:
    return file_of(Path(out), "X1_test", 0).read_bytes()


def rows(out) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(packed(out)).splitlines()]


@pytest.fixture
def whole():
    with server() as up:
        part = asked(up.url, "whole")
    assert part.state == "made" and sorted(SEEDS) == sorted(seen.seed for seen in up.seen)
    return packed("whole")


def test_rows_say_who_answered_and_whether_that_is_the_target(whole):
    text = ("<|im_start|>user\nBb?<|im_end|>\n<|im_start|>assistant\n", 0), ("You said Bb?<|im_end|>", 1)
    more = ("\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n", 0), ("You said And then?<|im_end|>", 1)
    row = rows("whole")[1]
    assert (row["input_ids"], row["loss_mask"]) == naive([*text, *more, ("\n", 0)])
    assert (row["id"], row["finish"], row["model"], row["on_policy"]) == ("b", "stop", "served-model", False)
    ids, mask, plain, _ = tokens(json.dumps(row).encode(), 300)
    assert plain and ids.tolist() == row["input_ids"] and mask.tolist() == row["loss_mask"], "the corpus reads them"
    report = json.loads(Path("whole/X1_test.json").read_text())
    assert report["asks"] == {"given": 8, "succeeded": 8, "failed": 0, "skipped": 0} and report["complete"]
    assert report["on_policy"] is False and report["model"] == "served-model" and report["spent"]["requests"] == 8
    assert off_policy(Source("X1_test", Path("whole/X1_test").resolve(), ())) == "served-model", "as the audit tells"
    with server() as up:
        assert asked(up.url, "whole").state == "kept" and not up.seen
        assert asked(up.url, "whole", on_policy=True).state == "made" and not up.seen, "other rows, of known answers"
    assert rows("whole")[0]["on_policy"] is True
    assert off_policy(Source("X1_test", Path("whole/X1_test").resolve(), ())) == ""


def test_a_server_of_ids_gives_records_of_these_very_ids():
    def ids(body):
        assert body["sampling_params"]["stop_token_ids"] == [END]
        return naive([(f"I read {len(body['input_ids'])}<|im_end|>", 1)])[0]

    with server(ids=ids) as up:
        part = asked(up.url, "out", api="sglang", on_policy=True)
    first, start = rows("out")[0], len(naive([("<|im_start|>user\nAa?<|im_end|>\n<|im_start|>assistant\n", 0)])[0])
    assert part.report["answers"] == {"stop": 8} and first["on_policy"] is True
    assert first["input_ids"][start:-1] == naive([(f"I read {start}<|im_end|>", 1)])[0]


@pytest.mark.parametrize("at", [0, 3, 6])
def test_killed_at_any_ask_it_goes_on_and_asks_for_no_answer_twice(whole, at):
    """Of the ask that was under way nobody knows what became of it: that one is asked again."""
    seed, held = seed_of(1, ASKS[at]), []
    with server({seed: ["slow"]}, on_slow=held.append) as up:
        with subprocess.Popen([sys.executable, asking.__file__, up.url, "torn"], stdout=subprocess.DEVNULL) as child:
            try:
                until(lambda: held or child.poll() is not None)
            finally:
                child.kill()
        assert child.returncode == -9 and not Path("torn/X1_test/part-000.jsonl.gz").exists()
        part = asked(up.url, "torn")
        assert sorted(seen.seed for seen in up.seen) == sorted([*SEEDS, seed])
    assert packed("torn") == whole and part.state == "made"
    assert part.report["asks"] == {"given": 8, "succeeded": 8, "failed": 0, "skipped": 0}


def test_a_spent_budget_leaves_what_came_and_a_larger_one_goes_on(whole):
    bounds, states, taken = (3, 3, 6, 0), [], []
    with server() as up:
        for bound in bounds:
            before = spent([dataset()], 1, Path("out"))
            budget = Budget(requests=bound, spent=before)
            part = asked(up.url, "out", budget=budget)
            states.append(part.state)
            taken.append(len(up.seen))
            assert budget.spent == spent([dataset()], 1, Path("out")) and budget.spent.requests == taken[-1]
            report = part.report
            assert report["asks"]["given"] == sum(report["asks"][n] for n in ("succeeded", "failed", "skipped"))
            assert report["records"] == len(rows("out"))
            if bound:
                assert report["lost"] == {"skipped: budget requests": report["asks"]["skipped"]}
                words = overview.verdict([part], Says(None, on_policy=False).answerer)
                assert words.startswith("amber: incomplete (") and "skipped: budget requests): the next start" in words
    assert states == ["incomplete", "incomplete", "incomplete", "made"] and taken == [3, 3, 6, 8]
    assert packed("out") == whole and part.report["complete"]


def test_an_incomplete_part_takes_no_whole_ones_place(whole):
    with server() as up:
        part = asked(up.url, "whole", of=dataset(temperature=0.6), budget=Budget(requests=2))
        assert part.state == "older kept" and part.incomplete and packed("whole") == whole
        assert "an earlier whole file was kept" in overview.verdict([part], Says(None).answerer)
        assert asked(up.url, "whole", of=dataset(temperature=0.6)).state == "made" and len(up.seen) == 8


def test_what_changed_is_asked_for_alone_and_what_was_paid_for_stays(whole):
    journal = journal_of(Path("whole"), "X1_test", 0, False)
    with server() as up:
        more = dataset({"new": ["Nn?"]} | PROMPTS | {"b": ["Bb?", "And now?"]})
        part = asked(up.url, "whole", of=more)
        assert [SEEDS.get(seen.seed, "new") for seen in up.seen] == ["new", ("b", 1, 0)]
        assert part.state == "made" and [row["id"] for row in rows("whole")] == ["new", *PROMPTS]
        asked(up.url, "whole", of=dataset(top_p=0.8))
        assert len(up.seen) == 2 + 8 and len(known_in(journal)) == 8 + 2 + 8
        assert asked(up.url, "whole").state == "made" and len(up.seen) == 10 and packed("whole") == whole
    assert spent([dataset()], 1, Path("whole")).requests == 18


DEEDS = ["http 500", "drop", "not json", "half", "http 429", "no choices", "refusal", "filter", "empty", "too long",
         "http 400", "length", "good"]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_server_does_every_ask_is_accounted_for(seed):
    """Random faults, start after start: what failed in passing is asked again, what came never."""
    draw, out, states = random.Random(seed), "out", []
    script = {key: draw.choices(DEEDS, k=draw.randint(0, 3)) for key in SEEDS}
    with server(script) as up:
        for _ in range(20):
            part = asked(up.url, out, retries=1, clock=Patience().clock)
            states.append(part.state)
            given = part.report["asks"]
            assert given["given"] == given["succeeded"] + given["failed"] + given["skipped"]
            assert part.now.given == part.now.succeeded + part.now.failed + part.now.skipped
            if part.state == "made":
                break
        came = ("good", "refusal", "filter", "empty", "too long", "length")
        answered = [seen.seed for seen in up.seen if seen.deed in came]
        assert len(set(answered)) == len(answered)
        before = len(up.seen)
        assert asked(up.url, out).state == "kept" and len(up.seen) == before
    assert set(states[:-1]) <= {"incomplete"} and states[-1] == "made"
    assert spent([dataset()], 1, Path(out)).requests == len(up.seen)
    kept = part.report["answers"]
    assert kept.get("stop", 0) + kept.get("length", 0) == sum(
        sum(b > a for a, b in zip([0, *row["loss_mask"]], row["loss_mask"], strict=False)) for row in rows(out))


def test_further_fields_go_into_the_request_and_into_what_an_answer_depends_on(tmp_path):
    language = language_of(asking.tokenizer_of(asking.TOOLS), (END,))
    with server() as up:
        for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            who = connect(tmp_path / "t", endpoint=up.url + "/v1", key_variable="", extra=extra)
            assert make(dataset({"a": ["Aa?"]}), who, language, tmp_path / "out", 1, {}).state == "made"
        assert ["chat_template_kwargs" in seen.body for seen in up.seen] == [False, True]
        with pytest.raises(UserError, match="extra is for api openai"):
            connect(tmp_path / "t", endpoint=up.url, api="sglang", key_variable="", extra=extra)


def test_a_server_that_refuses_the_key_ends_it_in_one_line_and_loses_nothing(whole):
    with server({seed_of(1, ASKS[3]): ["http 401"]}) as up:
        with pytest.raises(UserError, match="http 401"):
            asked(up.url, "out")
        assert asked(up.url, "out").state == "made" and len(up.seen) == 9
    assert packed("out") == whole


def test_a_part_is_made_by_one_run_at_a_time(whole):
    with server() as up, alone(file_of(Path("out"), "X1_test", 0)):
        with pytest.raises(UserError, match="X1_test/part-000.jsonl.gz is being made by another run"):
            asked(up.url, "out")
        assert not up.seen


def test_a_damaged_journal_is_told_and_not_thrown_away(whole):
    journal = journal_of(Path("whole"), "X1_test", 0, False)
    good = journal.read_bytes()
    lines = good.split(b"\n")
    for bad, told in ((b"\n".join([*lines[:2], lines[2][:-9], *lines[3:]]), "line 3 is damaged"),
                      (b"\n".join([b"other", *lines[1:]]), "no journal of this version")):
        journal.write_bytes(bad)
        file_of(Path("whole"), "X1_test", 0).unlink(missing_ok=True)
        with server() as up, pytest.raises(UserError, match=told):
            asked(up.url, "whole")
        assert journal.read_bytes() == bad and not up.seen
    journal.write_bytes(good[:-5])  # a kill cut the last line off: that answer alone is asked for again
    with server() as up:
        assert asked(up.url, "whole").state == "made" and len(up.seen) == 1
    assert packed("whole") == whole


def test_tools_go_to_the_server_and_their_results_to_its_calls():
    tool = {"type": "function", "function": {"name": "look"}}
    told = [{"role": role, "content": text} for role, text in (("user", "Sky?"), ("tool", "blue"), ("tool", "grey"))]
    prompts = asking.prompt_of("t", "X1_test", told, [tool])
    calls = [call("look", 7, at="noon"), call("look", 8, at="six")]
    made = [{"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "assistant", "content": "Blue, then grey.", "reasoning_content": "results"}]
    of = answers.Dataset("X1_test", "", None, 40, 0.5, 0.9, asked=(prompts,))
    with server(say=lambda body: made[len(body["messages"]) // 3]) as up:
        part = asked(up.url, "out", of=of)
    assert [seen.body["tools"] for seen in up.seen] == [[tool], [tool]]
    assert [m.get("tool_call_id") for m in up.seen[1].body["messages"]] == [None, None, "call_7", "call_8"]
    assert up.seen[1].body["messages"][1]["tool_calls"] == made[0]["tool_calls"]
    assert part.report["answers"] == {"stop": 1, "tool_calls": 1}
    assert rows("out")[0]["tools"] == [tool] and rows("out")[0]["messages"][-1] == made[1]


@pytest.mark.parametrize("target, given, on_policy", [
    ("served-model", None, True), ("Served-Model", None, True), ("other", None, False), ("other", True, True),
    ("served-model", False, False)])
@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_the_target_is_known_by_the_name_that_the_server_was_given_it_under(tmp_path, target, given, on_policy, api):
    with server() as up:
        who = connect(tmp_path / target, endpoint=up.url + "/v1", api=api, on_policy=given, key_variable="")
    assert (who.on_policy, who.model) == (on_policy, FOLDER.rsplit("/", 1)[-1])
    assert (who.exact, who.here) == (api == "sglang", False)
    shown = overview.who_answers(who, "transformers", api, Budget(tokens=5, spent=Spent(1, 1, 1)))
    assert {row["what"]: row["answer"] for row in shown}["budget: tokens"] == "5 in all, 2 spent before"


def test_what_cannot_be_connected_is_refused(tmp_path):
    for options, told in (({"engine": "vllm"}, "engine 'vllm' is unknown"),
                          ({"endpoint": "http://127.0.0.1:9", "api": "grpc"}, "api 'grpc' is unknown")):
        with pytest.raises(UserError, match=told):
            connect(tmp_path, **options)
    with server() as up, pytest.raises(UserError, match="serves served-model, not gpt"):
        connect(tmp_path, endpoint=up.url, api="sglang", model="gpt", key_variable="")


def test_a_prompt_that_outgrows_the_target_is_not_asked(tmp_path):
    says = Says(lambda ask: naive([("So it is<|im_end|>", 1)])[0], exact=True, model="")
    who = answers.Answerer(says, "", True, True, room=100)
    language = language_of(asking.tokenizer_of(asking.TOOLS), (END,))
    of = dataset({"long": ["x" * 80], "short": ["Hm?"]})
    part = make(of, who, language, tmp_path / "out", 1, {"config": "c", "weights": "w"})
    assert [ask.key[0] for ask in says.asked] == ["short"]
    assert part.report["ended_early"] == {"longer than the context": 1} and part.state == "made"
