"""Counting, against loops that draft token by token and against cases worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leisure import AT_LEISURE

from eagle3nb.drafter.metrics import TeacherPrefix, acceptance_length, chain_hits, formulas, joint_prefix, walk


def table(text: str) -> np.ndarray:
    """Rows of 0 and 1, one a step."""
    return np.array([[c == "1" for c in row] for row in text.split()], dtype=bool)


def test_walk_by_hand():
    """Answer x[2:8], steps 2. Verify at t = 1 accepts 2 (x[3], x[4]; bonus x[5]); t = 4 accepts 0 (bonus x[6]); t = 5
    accepts 2 (x[7], and x[8] past the end)."""
    hits = table("0111010000 0100010000")
    done = walk(hits, 2, 8, 2)
    assert done.slots.tolist() == [1, 4, 5] and done.lengths.tolist() == [2, 0, 2]
    assert (done.verifies, done.accepted, done.delivered) == (3, 4, 5)
    assert done.per_position.tolist() == [2, 2]
    assert acceptance_length(done.verifies, done.accepted) == pytest.approx(1 + 4 / 3)
    one = walk(hits, 2, 8, 1)
    assert one.slots.tolist() == [1, 3, 5] and one.lengths.tolist() == [1, 1, 1]


def test_walk_of_a_single_token_has_no_verify():
    done = walk(table("1111 1111"), 2, 3, 2)
    assert (done.verifies, done.accepted, done.delivered) == (0, 0, 0)
    assert acceptance_length(0, 0) == 1.0


@pytest.mark.parametrize("arguments", [(0, 3, 1), (2, 9, 1), (3, 2, 1), (1, 3, 3), (1, 3, 0)])
def test_walk_refuses(arguments):
    with pytest.raises(ValueError, match="walk|answer"):
        walk(table("0000 0000"), *arguments)


@settings(AT_LEISURE, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 30), st.floats(0.1, 0.95))
def test_walk_is_a_server_that_drafts_token_by_token(seed, steps, answer, share):
    """An independent server: it drafts one token after another until one is wrong, then takes the bonus."""
    rng = np.random.default_rng(seed)
    start = int(rng.integers(1, 6))
    end = start + answer
    T = end + steps + 1
    ids = rng.integers(0, 50, T)
    predictions = np.full((steps, T), -1)
    for k in range(steps):
        for t in range(T - 2 - k):
            predictions[k, t] = ids[t + 2 + k] if rng.random() < share else ids[t + 2 + k] + 1
    accepted = verifies = 0
    out = start + 1                                        # x[start] came from the prefill; `out` tokens are known
    while out < end:
        verifies += 1
        slot, n = out - 2, 0
        while n < steps and predictions[n, slot] == ids[out + n]:
            n += 1
        accepted += n
        out += n + 1
    done = walk(chain_hits(predictions, ids), start, end, steps)
    assert (done.verifies, done.accepted, done.delivered) == (verifies, accepted, answer - 1)
    assert done.lengths.sum() == done.per_position.sum() == accepted


def test_chain_hits_need_the_true_token():
    ids = np.array([4, 5, 6, 7, 8])
    predictions = np.array([[6, 0, 8, 8, 8], [7, 8, 8, 8, 8], [8, 1, 1, 1, 1]], np.int32)
    assert chain_hits(predictions, ids).astype(int).tolist() == [[1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert joint_prefix(chain_hits(predictions, ids)).sum(0).tolist() == [3, 0, 1, 0, 0]


def test_other_tools_formulas_by_hand():
    """Four slots count at step 0, two at step 1: marginals 3/4 and 1/2, joint 3/4 and 1/2 of them."""
    hits, counted = table("1110 0110"), table("1111 0101")
    figures = formulas(hits, counted)
    assert figures["product"] == pytest.approx(3 / 4 + 3 / 4 * 1 / 2)
    assert figures["one_plus_product"] == pytest.approx(1 + figures["product"])
    assert figures["one_plus_joint"] == pytest.approx(1 + 3 / 4 + 1 / 2)
    assert formulas(table("0 0"), table("0 0")) == {"product": 0, "one_plus_product": 1, "one_plus_joint": 1}


def test_teacher_prefix_leaves_out_what_nobody_can_know():
    """Slot 0 hits twice; slot 1 hits, but the text leaves the argmax; 2 misses; 3 ends its turn after one hit."""
    prefix = TeacherPrefix(2)
    prefix.add(table("1111 1110"), table("1101 1100"), table("1011 1111"))
    assert prefix.at_risk.tolist() == [4, 1] and prefix.hits.tolist() == [3, 1]
    assert prefix.length == pytest.approx(1 + 3 / 4 + 3 / 4 * 1)
    prefix.add(table("1 1"), table("1 0"), table("1 1"))
    assert prefix.conditional.tolist() == [4 / 5, 1 / 2]


def test_teacher_prefix_is_the_plain_joint_prefix_where_the_text_is_greedy_and_endless():
    rng = np.random.default_rng(0)
    hits = rng.random((3, 500)) < 0.7
    everything = np.ones_like(hits)
    prefix = TeacherPrefix(3)
    prefix.add(everything, hits, everything)
    assert prefix.length == pytest.approx(formulas(hits, everything)["one_plus_joint"])
