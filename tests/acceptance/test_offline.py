"""Rows of acceptance from hits made by hand, and the bootstrap against cases whose distribution is known."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from eagle3nb.acceptance import offline
from eagle3nb.acceptance.benchmarks import Answer
from eagle3nb.drafter import ttt
from eagle3nb.errors import UserError


def chain(id, source, lengths, *, prompt=3, tokens=7, K=4, looping=False):
    """Chains over an answer of `tokens` tokens where slot prompt − 1 + i has lengths[i] leading hits."""
    answer = Answer(id, source, tuple(range(prompt)), tuple(range(tokens)), tuple(range(K + 1)), True, looping)
    hits = np.zeros((K, len(answer.sequence)), dtype=bool)
    for i, n in enumerate(lengths):
        hits[:n, prompt - 1 + i] = True
    return offline.Chains(answer, hits)


# Answer of 7 tokens: the prefill gives the first, 6 are left to verifies.
ONE = chain("one", "chat", [2, 0, 0, 1, 0, 0])            # stands at 0 (2 right), 3 (1), 5 (0)
TWO = chain("two", "code", [4, 0, 0, 0, 0, 3], looping=True)  # 0 (4 right), 5 (3 right, all past the end)


def test_rows_of_two_answers():
    table = offline.counts([ONE, TWO], [1, 4])
    assert table["text"].nunique() == 1  # both: the same prompt, the same answer
    other = replace(ONE.answer, ids=ONE.answer.ids[:-1])
    assert offline.tally(other, 4, ONE.walk(4))["text"] != table["text"][0]
    rows = {(r["steps"], r["source"]): r for r in offline.acceptance(table, bootstrap=200, seed=1)}
    assert list(rows) == [(1, "all"), (1, "chat"), (1, "code"), (4, "all"), (4, "chat"), (4, "code")]
    total = rows[4, "all"]
    assert (total["verifies"], total["accepted"], total["delivered"], total["tokens"]) == (5, 10, 12, 14)
    assert total["tau"] == 3.0 and total["delivered_per_verify"] == 12 / 5 and total["prompts"] == 2
    assert rows[4, "chat"]["tau"] == 2.0 and rows[4, "code"]["tau"] == 1 + 7 / 2
    # One step: ONE stands at 0 (1), 2 (0), 3 (1), 5 (0); TWO at 0 (1), 2, 3, 4 (0), 5 (1).
    assert (rows[1, "all"]["verifies"], rows[1, "all"]["accepted"]) == (9, 4)
    assert rows[4, "chat"]["low"] is None and rows[4, "chat"]["high"] is None  # one prompt: nothing to resample
    assert total["low"] == pytest.approx(2.0) and total["high"] == pytest.approx(4.5)


def test_loops_are_reported_apart():
    rows = offline.degenerate(offline.counts([ONE, TWO], [4]), bootstrap=100, seed=1)
    assert [(r["answers"], r["tau"], r["prompts"]) for r in rows] == [("not looping", 2.0, 1), ("looping", 4.5, 1)]
    (_, none) = offline.degenerate(offline.counts([ONE], [4]), bootstrap=100, seed=1)
    assert none["tau"] is None and none["low"] is None and none["verifies"] == 0


def test_an_answer_of_one_token_has_no_verify():
    single = chain("s", "chat", [3], tokens=1)
    with pytest.raises(UserError, match="raise max_new_tokens"):
        offline.acceptance(offline.counts([single], [4]), bootstrap=50, seed=1)
    other = chain("o", "code", [3], tokens=1)
    _, _, empty = offline.acceptance(offline.counts([ONE, other], [4]), bootstrap=50, seed=1)
    assert empty["source"] == "code" and empty["tau"] is None and empty["verifies"] == empty["delivered"] == 0
    both = offline.acceptance(offline.counts([single, ONE], [4]), bootstrap=50, seed=1)[0]
    assert both["tau"] == 2.0 and both["low"] is None  # of two prompts, one was verified
    three = offline.acceptance(offline.counts([single, ONE, ONE], [4]), bootstrap=50, seed=1)[0]
    assert three["low"] == three["high"] == 2.0  # resamples of `single` alone have no τ and are left out


def test_positions():
    rows = offline.by_position([ONE, TWO], 4)
    assert [(r["position"], r["reached"], r["accepted"]) for r in rows] == [(1, 5, 4), (2, 4, 3), (3, 3, 2), (4, 2, 1)]
    assert [r["conditional"] for r in rows] == [4 / 5, 3 / 4, 2 / 3, 1 / 2]
    assert [r["joint"] for r in rows] == [4 / 5, 3 / 5, 2 / 5, 1 / 5]
    assert sum(r["accepted"] for r in rows) == 10


def test_other_tools_formulas():
    figures = {r["figure"]: r["value"] for r in offline.formulas([ONE], np.ones(50, dtype=bool), 2)}
    assert figures["1 + accepted / verifies"] == 2.0
    assert figures["delivered / verifies"] == 2.0 and figures["completion tokens / verifies"] == 7 / 3
    # Counted inside the answer: 6 slots at step 0 (hits at two), 5 at step 1 (hit at one, its earlier step a hit too).
    assert figures["Σ Π marginals"] == pytest.approx(2 / 6 + 2 / 6 * 1 / 5)
    assert figures["1 + Σ Π marginals"] == pytest.approx(1 + 2 / 6 + 2 / 6 * 1 / 5)
    assert figures["1 + Σ joint prefix"] == pytest.approx(1 + 2 / 6 + 1 / 5)


def test_formulas_count_what_a_server_can_reach():
    draftable = np.ones(50, dtype=bool)
    draftable[1] = False  # the answer's second token: no chain can draft past it, so slot 0's step 1 is not reached
    figures = {r["figure"]: r["value"] for r in offline.formulas([ONE], draftable, 2)}
    assert figures["1 + Σ joint prefix"] == pytest.approx(1 + 2 / 6 + 0 / 4)


def test_bootstrap_against_the_normal_approximation():
    # One verify a prompt: τ − 1 is the mean of 400 draws with known spread, so its interval is mean ± 1.96 σ / √400.
    accepted = np.repeat([0, 1, 2, 3], 100)
    low, high = offline.interval(accepted, np.ones(400), bootstrap=10_000, seed=3)
    half = 1.96 * accepted.std() / 20
    assert low == pytest.approx(2.5 - half, abs=0.006) and high == pytest.approx(2.5 + half, abs=0.006)


def test_bootstrap_of_two_prompts_is_the_binomial():
    # Resamples of (0, 2) with one verify each: 1 + mean is 1, 2, 3 with probability 1/4, 1/2, 1/4.
    assert offline.interval([0, 2], [1, 1], bootstrap=4000, seed=1) == (1.0, 3.0)
    assert offline.interval([0, 2], [1, 1], bootstrap=4000, seed=1, level=0.4) == (2.0, 2.0)


def test_bootstrap_is_of_a_ratio_of_sums():
    # 9 of 10 and 0 of 1: the mixed resample gives 1 + 9/11, not the mean of ratios 1 + 0.45.
    assert offline.interval([9, 0], [10, 1], bootstrap=4000, seed=1, level=0.4) == pytest.approx((1 + 9 / 11,) * 2)


def test_bootstrap_covers():
    """95 % intervals hold the truth in about 95 % of repeated samples (seeded; of 200: ± 3.1 % at 2 σ, some bias)."""
    rng, held = np.random.default_rng(5), 0
    for seed in range(200):
        verifies = rng.integers(5, 30, size=60)
        accepted = rng.binomial(verifies * 3, 0.4)
        low, high = offline.interval(accepted, verifies, bootstrap=300, seed=seed)
        held += low <= 1 + 3 * 0.4 <= high
    assert 0.89 <= held / 200 <= 0.99


def test_bootstrap_is_seeded():
    rng = np.random.default_rng(0)
    a, v = rng.integers(0, 9, 30), rng.integers(3, 9, 30)
    assert offline.interval(a, v, bootstrap=100, seed=1) == offline.interval(a, v, bootstrap=100, seed=1)
    assert offline.interval(a, v, bootstrap=100, seed=1) != offline.interval(a, v, bootstrap=100, seed=2)


def test_batches_by_length():
    groups = offline.length_batches([5, 90, 6, 5, 40, 300], batch_tokens=100)
    assert sorted(i for group in groups for i in group) == list(range(6))
    lengths = [5, 90, 6, 5, 40, 300]
    assert all(len(g) == 1 or max(lengths[i] for i in g) * len(g) <= 100 for g in groups)
    assert groups[0] == [0, 3, 2] and offline.length_batches([], 100) == []


@pytest.mark.parametrize("batch_tokens", [1, 90, 100_000])
def test_one_pass_over_many_answers_drafts_what_one_over_each_does(world, batch_tokens):
    """Answers of one and two tokens among them; float32 argmax, whose margins are far above rounding here."""
    given = [*world.answers, *(replace(world.answers[i], ids=world.answers[i].ids[:n]) for i, n in ((3, 1), (4, 2)))]
    found = offline.chains(world.target, world.drafter, given, 7, batch_tokens=batch_tokens)
    for chain, answer in zip(found, given, strict=True):
        ((aux, _),) = world.target.capture([answer.sequence.tolist()])
        alone = ttt.chain(world.drafter, answer.sequence, aux, 7)
        slots = np.arange(answer.start - 1, answer.end - 2)
        assert chain.answer is answer and chain.drafted.dtype == np.int32
        assert np.array_equal(chain.drafted, alone[:, slots])
        for t in range(len(answer.sequence)):
            for k in range(7):
                right = t in slots and alone[k, t] == answer.sequence[t + 2 + k]
                assert chain.hits[k, t] == right
    assert found[-2].drafted.shape == (7, 0) and found[-1].drafted.shape == (7, 1)
    assert sum(c.walk(7).accepted for c in found) > 100  # not an empty equality


def test_answers_cut_at_their_end_are_refused():
    short = SimpleNamespace(id="short", beyond=(1, 2))
    with pytest.raises(ValueError, match="short"):
        offline.chains(None, None, [short], 3)


def test_console_lines():
    table = offline.counts([ONE, TWO, chain("s", "empty", [], tokens=1)], [1, 4])
    lines = offline.console(offline.acceptance(table, bootstrap=50, seed=1), 4)
    assert len(lines) == 2 + 2 + 1 + 3 and "by source, 4 draft steps" in lines[4]
    assert lines[3].split() == ["4", "3.00", *lines[3].split()[2:5], "5", "10", "12"]
    assert "no verify" in lines[-1] and "one prompt" in lines[-2] and all(len(line) <= 90 for line in lines)


def test_select_and_sentence():
    rows = offline.acceptance(offline.counts([ONE, TWO], [1, 4]), bootstrap=50, seed=1)
    table = offline.select(rows, source="all")
    assert isinstance(table, pd.DataFrame) and table["steps"].tolist() == [1, 4]
    assert offline.select(rows, source="chat")["low"].isna().all()
    assert offline.sentence(rows[1]).startswith("acceptance length 1.50 with 1 drafted")
    (total,) = offline.select(rows, source="all", steps=4).to_dict("records")
    assert offline.sentence(total).startswith("acceptance length 3.00 [")
    assert "4 drafted tokens, 10 accepted in 5 verifies, 2 prompts" in offline.sentence(total)


def test_steps_lie_within_the_walk():
    offline.check_steps(3, 7)
    for steps, steps_max in ((0, 7), (8, 7)):
        with pytest.raises(UserError, match=f"steps is {steps}"):
            offline.check_steps(steps, steps_max)
