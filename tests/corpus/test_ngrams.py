"""Hashes of n-grams against the same sum and finaliser in Python's integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.ngrams import BASE, BLOCK, ngram_hashes, whole_ngrams

WORD = (1 << 64) - 1


def slow_hash(tokens) -> int:
    value = 0
    for token in tokens:
        value = (value * BASE + int(token)) & WORD
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & WORD
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & WORD
    return value ^ value >> 31


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=40), n=st.integers(1, 20))
def test_hashes_equal_the_slow_ones(ids, n):
    wanted = [slow_hash(ids[i:i + n]) if i + n <= len(ids) else 0 for i in range(len(ids))]
    assert ngram_hashes(np.array(ids, np.int32), n).tolist() == wanted


@pytest.mark.parametrize("n", [1, 3, 13])
def test_blocks_leave_no_seam(n):
    ids = np.random.default_rng(n).integers(0, 163_840, 2 * BLOCK + 40).astype(np.int32)
    hashes = ngram_hashes(ids, n)
    for i in (0, BLOCK - n, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, len(ids) - n):
        assert hashes[i] == slow_hash(ids[i:i + n])


def test_hashes_of_a_million_small_ngrams_never_meet():
    ids = np.arange(101)
    grams = np.stack(np.meshgrid(ids, ids, ids), -1).reshape(-1, 3)
    hashes = ngram_hashes(np.ascontiguousarray(grams).reshape(-1).astype(np.int32), 3)[::3]
    assert len(np.unique(hashes)) == len(grams)
    high = np.bincount((hashes >> np.uint64(57)).astype(np.int64))  # what chooses a bin is even to 5 sigma
    assert len(high) == 128 and abs(high - len(grams) / 128).max() < 5 * (len(grams) / 128) ** 0.5


@given(lengths=st.lists(st.integers(1, 20), max_size=12), n=st.integers(1, 15))
def test_whole_ngrams(lengths, n):
    starts = np.cumsum([0, *lengths])
    wanted = [i + n <= length for length in lengths for i in range(length)]
    assert whole_ngrams(starts, n).tolist() == wanted
