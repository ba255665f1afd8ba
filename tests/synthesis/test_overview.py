"""What the notebook shows is what the files hold and what the server was asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthesis.asking import PROMPTS, asked, dataset
from synthesis.faulty_server import FaultyServer
from synthesis.speaking import END, FORGETS, TOOLS, Says, tokenizer_of

from eagle3nb.synthesis import overview
from eagle3nb.synthesis.answers import make, seed_of
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.endpoint import Answer
from eagle3nb.synthesis.talks import language_of


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)


def says(text="Well, {}", **more):
    return Says(lambda ask: {"role": "assistant", "content": text.format(ask.messages[-1]["content"])}, **more)


def made(says, of=None, template=TOOLS, out="out", part=0):
    language = language_of(tokenizer_of(template), (END,))
    return make(of or dataset(), says.answerer, language, Path(out), 1 + part, {}, part), language


def test_the_plan_is_an_upper_bound_of_what_is_asked():
    """Every answer here is as long as it may be, so that the bound on prompts and answers together is nearly met."""
    part, language = made(says("An answer that fills nearly all of it."))  # 39 tokens with its end, of 40
    of, server = dataset(), says()
    rows = overview.plan([of], 1, server.answerer, language, Path("elsewhere"), 1, {"prompt": 1.0, "completion": 2.0})
    assert [row["prompts"] for row in rows] == [len(PROMPTS)] and rows[0]["answers"] == 8 and rows[0]["known"] == 0
    records = list(overview.rows_of(part, Path("out")))
    spent = sum(sum(n for n, (a, b) in enumerate(zip([0, *mask], mask, strict=False)) if b > a) + sum(mask)
                for mask in (record["loss_mask"] for record in records))  # each answer's prompt, and the answers
    assert 0.9 * rows[0]["tokens at most"] < spent <= rows[0]["tokens at most"]
    read = rows[0]["tokens at most"] - 8 * 40
    assert rows[0]["cost at most"] == pytest.approx((read + 2 * 8 * 40) / 1e6)
    assert overview.plan([of], 1, server.answerer, language, Path("out"), 1, {})[0]["known"] == 8


def test_datasets_are_summed_over_their_parts():
    parts = [made(says(), part=0)[0], made(says("So: {}"), part=1)[0]]
    measured = overview.lengths(parts, Path("out"))
    row, = overview.by_dataset(parts, measured, max_seq_len=70)
    records = [record for part in parts for record in overview.rows_of(part, Path("out"))]
    assert (row["dataset"], row["prompts"], row["records"], row["state"]) == ("X1_test", 10, 10, "made")
    assert row["tokens"] == sum(len(record["input_ids"]) for record in records)
    assert row["over 70 tokens"] == sum(len(record["input_ids"]) > 70 for record in records) > 0
    lengths = overview.answer_lengths(parts, measured)["X1_test"]
    assert sum(lengths) == row["supervised"] and len(lengths) == 16
    titles = [title for title, _, _ in overview.examples(parts, Path("out"), 1)]
    assert len(titles) == 3 and all(title.startswith("X1_test, ") for title in titles)
    assert overview.accounts(parts) == [{"dataset": "X1_test", "given": 16, "succeeded": 16, "failed": 0, "skipped": 0}]
    sizes = f"10 records, {row['tokens']:,} tokens in X1_test"
    assert overview.verdict(parts, says(on_policy=False).answerer) == f"{sizes}, on-policy"  # of an earlier start
    other = made(says(on_policy=False), part=1, out="other")[0]
    assert overview.verdict([other], says().answerer).endswith(" in X1_test, off-policy: other/model answered")
    assert not overview.result([other], says().answerer, Budget(), [])["on_policy"]
    anew = made(says(), of=replace(dataset(), name="X1_test_on_policy"), out="other")[0]
    assert overview.verdict([other, anew], says().answerer).endswith(
        " in 2 datasets, off-policy: other/model answered all but X1_test_on_policy")
    told = overview.result(parts, says().answerer, Budget(spent=Spent(16, 9, 9)), [row])
    assert json.loads(json.dumps(told))["incomplete"] is False and told["records"] == 10
    assert told["spent"]["requests"] == 16


def test_what_was_not_kept_is_told_by_its_reason():
    odd = {("a", 0): Answer((), "refused", "refusal"), ("c", 0): {"role": "assistant", "content": "x"},
           ("e", 0): Answer((), "failed", "http 500")}

    def say(ask):
        said = odd.get(ask.key[:2]) or {"role": "assistant", "content": "So it is.", "reasoning_content": "I think"}
        return replace(said, key=ask.key) if isinstance(said, Answer) else said

    of = replace(dataset(), left_out={"no messages": 2})
    empties = FORGETS.replace("loop.index0 == ns.last", "false").replace("assistant\n<think>", "assistant\n")
    part, _ = made(Says(say), of, empties)
    rows = {(row["what"], row["why"]): row["times"] for row in overview.reasons([part])}
    assert rows == {("an answer was not kept", "refused"): 1, ("an answer was not kept", "empty"): 3,
                    ("an answer was kept", "the mask checked by the template's markers alone"): 5,
                    ("a talk ended before its last turn", "refused"): 1, ("a row was left out", "no messages"): 2,
                    ("a talk ended before its last turn", "given up"): 1,
                    ("a talk ended before its last turn", "failed: http 500"): 1}
    assert part.state == "incomplete" and overview.verdict([part], says().answerer).startswith(
        "amber: incomplete (1 failed: http 500): the next start goes on; 5 records")


def test_this_start_is_told_apart_from_those_before():
    with FaultyServer(say=lambda body: f"You said {body['messages'][-1]['content']}") as up:
        asked(up.url, "out", budget=Budget(requests=3))
        budget = Budget(spent=Spent(3, 30, 15, 0.5))
        part = asked(up.url, "out", budget=budget)
        assert seed_of(1, ("a", 0, 0)) in {seen.seed for seen in up.seen}
    row = overview.this_start([part], budget)
    assert row["answers"] == 5 and row["generated tokens"] == part.now.completion_tokens > 0
    assert row["cost of all starts"] == 0.5 and row["requests of all starts"] == budget.spent.requests == 8
