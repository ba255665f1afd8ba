"""The speed model against a simulated decode, whose rounds are plain loops; its choice, its sentences and commands."""

import json
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

from eagle3nb.acceptance import offline, speed
from eagle3nb.acceptance.decode import Decode
from eagle3nb.acceptance.speed import Accepted, Costs
from eagle3nb.errors import UserError

JOINT = (0.6, 0.42, 0.3, 0.1)
VERIFY = {1: 0.05, 2: 0.056, 3: 0.058, 4: 0.07, 5: 0.09}
CATCH_UP = {1: 0.002, 2: 0.0025, 3: 0.004, 4: 0.005, 5: 0.006}


def known(batch: int = 1, **changes) -> Costs:
    parts = {"verify": {(batch, width): s for width, s in VERIFY.items()}, "draft_step": {batch: 0.003},
             "catch_up": {(batch, n): s for n, s in CATCH_UP.items()}, "overhead": {batch: 0.004}}
    return Costs(**parts | changes)


def simulated(steps: int, sequences: int, rounds: int = 20_000) -> float:
    """Tokens a second of `sequences` at once: draft by draft, accepted or not, the clock advanced part by part."""
    rng, clock, tokens, fresh = np.random.default_rng(steps), 0.0, 0, [1] * sequences
    for _ in range(rounds // sequences):
        if steps:
            clock += sum(CATCH_UP[n] for n in fresh) / sequences + steps * 0.003
        clock += VERIFY[steps + 1] + 0.004
        for i in range(sequences):
            fresh[i], before = 1, 1.0
            for joint in JOINT[:steps]:
                if rng.random() >= joint / before:  # of those that came here
                    break
                fresh[i], before = fresh[i] + 1, joint
            tokens += fresh[i]
    return tokens / clock


@pytest.mark.parametrize("batch", [1, 4])
def test_the_model_equals_a_simulated_decode(batch):
    """20,000 verifies: the standard error of τ is 0.5 %; 2 % allowed, seeds fixed. Leaving a part out shows."""
    by_steps = speed.prefixes([{"joint": joint} for joint in JOINT])
    rows = speed.predict(by_steps, known(batch))
    assert [row["steps"] for row in rows] == [0, 1, 2, 3, 4]
    alone = simulated(0, batch)
    for row in rows:
        measured = simulated(row["steps"], batch)
        assert row["tokens_per_s"] == pytest.approx(measured, rel=0.02)
        assert row["speedup"] == pytest.approx(measured / alone, rel=0.02)
    for part in ({"catch_up": {}}, {"overhead": {}}, {"draft_step": {batch: 0.0}}):
        less = speed.predict(by_steps, known(batch, **part))[2]
        assert less["tokens_per_s"] > simulated(2, batch) * 1.02


def simulated_together(steps: int, sequences: int, rounds: int = 12_000) -> float:
    """Tokens a second, where a pass's cost is of all the tokens in it, whosever they are; each sequence accepts its own
    number of drafts."""
    rng, clock, tokens = np.random.default_rng(steps + 7), 0.0, 0
    fresh = [1] * sequences
    for _ in range(rounds):
        if steps:
            clock += 0.001 + 0.0004 * sum(fresh)  # one catching-up pass over unlike numbers of tokens
            clock += steps * (0.002 + 0.0003 * sequences)
        clock += 0.04 + 0.003 * sequences * (steps + 1)
        for i in range(sequences):
            fresh[i], before = 1, 1.0
            for joint in JOINT[:steps]:
                if rng.random() * before >= joint:
                    break
                fresh[i], before = fresh[i] + 1, joint
        tokens += sum(fresh)
    return tokens / clock


def test_sequences_at_once_equal_a_simulated_batch():
    """24,000 verifies at least: the standard error of τ is 0.5 %; 2 % allowed, seeds fixed. Batch 1: the test above."""
    batches, widths = (1, 2, 5), range(1, 6)
    costs = Costs(verify={(b, w): 0.04 + 0.003 * b * w for b in batches for w in widths},
                  draft_step={b: 0.002 + 0.0003 * b for b in batches},
                  catch_up={(b, w): 0.001 + 0.0004 * b * w for b in batches for w in widths})
    rows = speed.predict(speed.prefixes([{"joint": joint} for joint in JOINT]), costs)
    assert [(row["batch"], row["steps"]) for row in rows] == [(b, k) for b in batches for k in range(5)]
    for row in rows:
        if row["batch"] > 1:
            measured = simulated_together(row["steps"], row["batch"])
            assert row["tokens_per_s"] == pytest.approx(measured, rel=0.02)
            assert row["speedup"] == pytest.approx(measured / simulated_together(0, row["batch"]), rel=0.02)
    table = speed.best_by_batch(rows)
    for found, batch in zip(table, batches, strict=True):
        mine = {row["steps"]: row for row in rows if row["batch"] == batch}
        rates = {steps: row["tokens_per_s"] for steps, row in mine.items()}
        fastest = max(rates, key=rates.get)
        assert found == {"batch": batch, "steps": fastest, "tokens_per_s": rates[fastest],
                         "speedup": pytest.approx(rates[fastest] / rates[0])}
        advice = speed.recommend(rows, costs, "t", "d", batch)
        assert (advice.batch, advice.steps, advice.speedup) == (batch, fastest, found["speedup"])
        assert ("tokens a sequence" in advice.reason) == (f"{batch} sequences at once" in advice.reason) == (batch > 1)
    assert [row["speedup"] for row in table] == sorted((row["speedup"] for row in table), reverse=True)


def test_delivered_tokens_count_where_they_are_known():
    tau, less = Accepted((0.5,)), Accepted((0.5,), delivered=1.2)
    assert (tau.tau, tau.steps, tau.lengths) == (1.5, 1, [0.5, 0.5])
    first, second = (speed.predict({1: one}, known())[1] for one in (tau, less))
    assert (first["tokens"], second["tokens"]) == (1.5, 1.2) and first["seconds"] == second["seconds"]


def test_what_was_not_measured_gets_no_row():
    by_steps = speed.prefixes([{"joint": joint} for joint in JOINT])
    costs = Costs({(1, 1): 1.0, (1, 4): 1.5, (8, 1): 2.0, (8, 2): 2.5, (16, 4): 3.0}, {1: 0.1})
    rows = speed.predict(by_steps, costs)
    assert [(row["batch"], row["steps"]) for row in rows] == [(1, 0), (1, 3), (8, 0)]  # 8: no drafts measured
    assert "no round with drafts was measured" in speed.recommend(rows, costs, "t", "d", 8).reason
    part = known(catch_up={(1, 1): 0.1, (1, 2): 0.1})
    assert [row["steps"] for row in speed.predict(by_steps, part)] == [0, 1]
    with pytest.raises(UserError, match="nothing was measured with 16 sequences at once"):
        speed.best(rows, 16)


def test_the_best_number_and_its_commands():
    by_steps = speed.prefixes([{"joint": joint} for joint in JOINT])
    rows = speed.predict(by_steps, known())
    found = speed.recommend(rows, known(), "models/a target", "out/drafter")
    rates = {row["steps"]: row["tokens_per_s"] for row in rows}
    assert found.steps == max(rates, key=rates.get) == 2 and found.speedup == rates[2] / rates[0]
    assert "2 drafted tokens a round, one sequence at a time" in found.reason and "yields 2.02 tokens" in found.reason
    words = shlex.split(found.sglang)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "models/a target"]
    assert dict(zip(words[5::2], words[6::2], strict=True)) == {
        "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": "out/drafter",
        "--speculative-num-steps": "2", "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "3"}
    *head, config = shlex.split(found.vllm)
    assert head == ["vllm", "serve", "models/a target", "--speculative-config"]
    assert json.loads(config) == {"method": "eagle3", "model": "out/drafter", "num_speculative_tokens": 2}


def test_of_two_that_are_equal_the_fewer_drafts():
    rows = [{"batch": 1, "steps": steps, "tokens_per_s": rate} for steps, rate in ((0, 1.0), (3, 2.0), (2, 2.0))]
    assert speed.best(rows)["steps"] == 2


def test_where_no_number_beats_none_it_says_so():
    dear = known(verify={(1, width): 0.05 * (0.4 + 0.6 * width) for width in range(1, 6)})
    rows = speed.predict(speed.prefixes([{"joint": joint} for joint in (0.3, 0.1, 0.05)]), dear)
    found = speed.recommend(rows, dear, "t", "d")
    assert (found.steps, found.speedup) == (0, 1.0)
    assert found.reason.startswith("no number of drafted tokens beats none, one sequence at a time: with 1, the "
                                   "nearest, a verify of 2 tokens costs 1.60 single ones here")
    seconds = 0.08 + 0.003 + 0.7 * 0.002 + 0.3 * 0.0025 + 0.004
    assert f"break-even is {seconds / 0.054:.2f} tokens a round" in found.reason and "1.30 tokens" in found.reason
    assert found.sglang == "python -m sglang.launch_server --model-path t" and found.vllm == "vllm serve t"


def test_acceptance_of_each_number_of_steps_is_its_own_walk():
    hits = np.random.default_rng(0).random((4, 60)) < 0.6
    found = [offline.Chains(SimpleNamespace(start=start, end=end), hits) for start, end in ((3, 30), (10, 50))]
    by_steps = speed.accepted(found, 4)
    for steps, one in by_steps.items():
        lengths, delivered = [], 0
        for start, end in ((3, 30), (10, 50)):
            t, delivered = start - 1, delivered + end - 1 - start
            while t + 2 < end:
                n = 0
                while n < steps and hits[n, t]:
                    n += 1
                lengths.append(n)
                t += n + 1
        assert one.tau == pytest.approx(1 + np.mean(lengths)) and one.delivered == delivered / len(lengths) <= one.tau
        assert one.lengths == pytest.approx([lengths.count(n) / len(lengths) for n in range(steps + 1)])
    longest = speed.prefixes(offline.by_position(found, 4))
    assert longest[4].joint == by_steps[4].joint and longest[2].joint == by_steps[4].joint[:2]
    with pytest.raises(UserError, match="raise max_new_tokens"):
        speed.accepted([offline.Chains(SimpleNamespace(start=3, end=4), hits)], 2)
    for joint in ((0.2, 0.3), (None,), (1.2,)):
        with pytest.raises(UserError, match="joint acceptance by position must fall"):
            speed.prefixes([{"joint": j} for j in joint])


def test_predicted_beside_measured():
    rows = speed.predict({1: Accepted((0.5,))}, Costs({(1, 1): 0.1, (1, 2): 0.12}, {1: 0.0}))
    def run(accepted, seconds):
        return Decode((1,) * 7, accepted, (), (), 0.5, seconds)
    first, second = speed.check(rows, {0: [run((0,) * 6, 0.6)], 1: [run((1, 0, 1, 0), 0.5)] * 2, 5: []})
    assert (first["steps"], first["predicted"], first["measured"]) == (0, 10.0, pytest.approx(10.0))
    assert second["measured"] == pytest.approx(12.0) and second["speedup_measured"] == pytest.approx(1.2)
    assert second["predicted"] == pytest.approx(12.5) and second["difference"] == pytest.approx(12.5 / 12 - 1)
