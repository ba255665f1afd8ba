import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.patterns import ends_with, find, find_all, in_one_row


def naive_find(ids, pattern):
    n = len(pattern)
    return [i for i in range(len(ids) - n + 1) if n and list(ids[i:i + n]) == list(pattern)]


few = st.lists(st.integers(0, 3), max_size=40)


@given(few, st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5))
def test_patterns_are_found_where_they_are(ids, patterns):
    flat = np.array(ids, np.int32)
    found = find_all(flat, [tuple(p) for p in patterns])
    assert [f.tolist() for f in found] == [naive_find(ids, p) for p in patterns]
    assert all(f.dtype == np.int64 for f in found)
    for pattern in patterns:
        assert find(flat, tuple(pattern)).tolist() == naive_find(ids, pattern)
        ends = np.arange(len(ids) + 1)
        expected = [list(ids[max(e - len(pattern), 0):e]) == pattern for e in ends]
        assert not len(ids) or ends_with(flat, ends, pattern).tolist() == expected


def test_patterns_of_long_batches_whatever_the_sample_says_is_rare():
    ids = np.random.default_rng(0).integers(0, 7, 20_000).astype(np.int32)
    ids[::16] = 6  # the sample sees nothing else
    patterns = [(0, 1, 2), (6, 6), (3,), (5, 4, 5, 4), (9, 1)]
    assert [f.tolist() for f in find_all(ids, patterns)] == [naive_find(ids.tolist(), p) for p in patterns]


def test_what_crosses_rows_is_no_pattern():
    starts = np.array([0, 3, 4, 8])
    assert in_one_row(np.array([0, 1, 2, 3, 4, 6, 7]), 2, starts).tolist() == [0, 1, 4, 6]
    assert in_one_row(np.array([2, 3]), 1, starts).tolist() == [2, 3]
