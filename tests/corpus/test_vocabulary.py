from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.vocabulary import choose, coverage, supervised_counts
from eagle3nb.errors import UserError


def test_counts_are_of_supervised_tokens_alone(tmp_path, write):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 40, 20).tolist(), "loss_mask": rng.integers(0, 2, 20).tolist()}
            for _ in range(30)]
    write(tmp_path / "in/A/rows.jsonl", rows)
    merge(find_sources(tmp_path / "in"), tmp_path / "out", max_seq_len=50, seed=1, vocab_size=41, markers=None)
    expected = Counter(i for row in rows for i, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit)
    counts = supervised_counts(Corpus.open(tmp_path / "out"))
    assert counts.tolist() == [expected[i] for i in range(41)] and counts.dtype == np.int64


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_chosen_are_the_most_frequent_beside_the_forced(counts, data):
    counts = np.array(counts)
    forced = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    size = data.draw(st.integers(max(1, len(forced)), len(counts)))
    vocab = choose(counts, size, tuple(forced))
    free = sorted(set(range(len(counts))) - forced, key=lambda i: (-counts[i], i))[:size - len(forced)]
    assert vocab.ids.tolist() == sorted(forced | set(free)) and vocab.size == size
    assert np.flatnonzero(vocab.t2d).tolist() == vocab.ids.tolist() == (np.arange(size) + vocab.d2t).tolist()
    assert len(vocab.t2d) == len(counts) and vocab.ids.dtype == vocab.d2t.dtype == np.int64
    share = sum(counts[i] for i in vocab.ids) / max(1, counts.sum())
    assert coverage(counts, vocab) == pytest.approx(share, abs=1e-12)


def test_zero_means_the_whole_vocabulary():
    vocab = choose(np.zeros(7, np.int64), 0, (3,))
    assert vocab.ids.tolist() == list(range(7)) and not vocab.d2t.any()


@pytest.mark.parametrize(("size", "forced", "words"), [
    (9, (), "choose 0"), (1, (1, 2), "choose 2"), (3, (99,), "outside")])
def test_a_size_that_cannot_be(size, forced, words):
    with pytest.raises(UserError, match=words):
        choose(np.zeros(7, np.int64), size, forced)
