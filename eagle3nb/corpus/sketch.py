"""Near-duplicate rows, found in sketches of 384 bytes a row.

One-permutation MinHash (Li, Owen and Zhang, "One Permutation Hashing", NeurIPS 2012), candidates by banding.
"""

import numpy as np

from eagle3nb.corpus.ngrams import BASE, hash_blocks, mixed, whole_ngrams

GRAM = 3  # tokens of an n-gram
ROWS = 1 << 12  # rows sketched at a time: bounds the table of minima at 6 MB
PARTS = (128, 32, 32)  # bins of the whole row, of what is supervised, of what is asked
SLICES = (slice(0, 128), slice(128, 160), slice(160, 192))  # where the parts lie in a sketch
ALIKE = (0.7, 0.4, 0.5)  # the least Jaccard similarity of each part between near duplicates
ASKED = 32  # unsupervised tokens right before an answer: there stands what a long shared prompt asks this time
EMPTY = np.uint16(0xFFFF)  # a bin without an n-gram
NOTHING = np.uint64(0xFFFFFFFFFFFFFFFF)
BAND = 4  # bins a band: of the whole's 32 bands two rows of similarity 0.7 share one with probability 0.9998
PAIRS = 1 << 14  # pairs compared at a time


def sketches(ids: np.ndarray, mask: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """uint16[R, 192]: each row's sketch: 128 bins over its 3-grams, 32 over those whose last token is supervised, 32
    over those that end in the 32 unsupervised tokens before an answer. A row of less than 3 tokens is EMPTY."""
    rows = len(starts) - 1
    found = np.full((rows, sum(PARTS)), EMPTY)
    for first in range(0, rows, ROWS):
        some = starts[first:first + ROWS + 1]
        here = slice(int(some[0]), int(some[-1]))
        found[first:first + ROWS] = _sketches(ids[here], mask[here], some - some[0])
    return found


def _sketches(ids, mask, starts) -> np.ndarray:
    rows, whole = len(starts) - 1, whole_ngrams(starts, GRAM)
    row = np.repeat(np.arange(rows), np.diff(starts))
    row[~whole] = rows  # what crosses a row's end goes to a row that nobody reads
    answers, asked = (_ending_at(last) for last in (mask != 0, _asked(mask, starts)))
    minima = [np.full((rows + 1) * bins, NOTHING) for bins in PARTS]
    for begin, hashes in hash_blocks(ids, GRAM):
        here = slice(begin, begin + len(hashes))
        cells = (hashes >> np.uint64(57)).view(np.int64)  # the bin: with it on top, whole hashes can be compared
        cells += row[here] << 7
        np.minimum.at(minima[0], cells, hashes)  # 1.3 ns an element where the types match; to sort packed keys took 8
        for part, chosen in ((minima[1], answers[here]), (minima[2], asked[here])):
            np.minimum.at(part, cells[chosen] >> 2, hashes[chosen])  # (row, bin) of 128 → of 32 by its upper bits
    table = np.concatenate([part.reshape(rows + 1, -1)[:rows] for part in minima], axis=1)
    # the low bits: the high ones chose the bin, and in a bin of many the smallest has zeros behind them
    return np.where(table == NOTHING, EMPTY, np.minimum(table.astype(np.uint16), EMPTY - np.uint16(1)))


def _ending_at(last: np.ndarray) -> np.ndarray:
    """bool[N]: is the 3-gram's last token one of `last`?"""
    ending = np.zeros(len(last), bool)
    ending[:len(last) - GRAM + 1] = last[GRAM - 1:]
    return ending


def _asked(mask, starts) -> np.ndarray:
    """bool[N]: unsupervised, and at most ASKED tokens before an answer of the same row."""
    answers = np.flatnonzero(mask[1:] > mask[:-1]) + 1
    begins = starts[np.searchsorted(starts, answers, side="right") - 1]
    before = answers[:, None] - np.arange(1, ASKED + 1)
    asked = np.zeros(len(mask), bool)
    asked[before[before >= begins[:, None]]] = True
    return asked & (mask == 0)


def near_duplicates(sketches: np.ndarray, priority: np.ndarray) -> np.ndarray:
    """int64[R]: for each row the row of its cluster that has the lowest `priority` (equal ones: the first).

    Two rows are near duplicates if their 3-grams have an estimated Jaccard similarity of at least 0.7, those of what is
    supervised 0.4, and those of what is asked right before it 0.5; where both rows have nothing of a part, it counts as
    alike. So the same prompt with another answer is none, nor the same answer to another question under a long system
    prompt. Clusters are what such pairs connect, so their ends may differ by more. Candidates share a band of any part;
    there each row meets the band's first and the one before it only, which misses hardly a pair (under a prompt of
    3,000 tokens that all rows share, the other parts' bands find them) and costs O(R). Memory: a copy of the sketches.

    The rows are put in order of priority first: with distinct priorities the clusters do not depend on the rows' order,
    only (through which candidates meet) on the priorities and on what other rows there are. Equal sketches always
    share a cluster.
    """
    order = np.argsort(priority, kind="stable")
    ranked = sketches[order]
    labels = _equal_rows(ranked)
    distinct = np.flatnonzero((labels == np.arange(len(labels))) & (ranked[:, :PARTS[0]] != EMPTY).any(axis=1))
    for band in range(0, ranked.shape[1], BAND):
        key = np.ascontiguousarray(ranked[distinct, band:band + BAND]).view(np.uint64)[:, 0]
        one, other = (distinct[some] for some in _candidates(key))
        apart = labels[one] != labels[other]
        one, other = one[apart], other[apart]
        alike = _alike(ranked, one, other)
        _join(labels, one[alike], other[alike])
    clusters = np.empty(len(order), np.int64)
    clusters[order] = order[labels]
    return clusters


def _equal_rows(ranked) -> np.ndarray:
    """int64[R]: the first row with this sketch; a row without n-grams equals no other."""
    words = np.ascontiguousarray(ranked).view(np.uint64)
    key = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        key = mixed(key * np.uint64(BASE) + words[:, column])
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    first = first[place]
    equal = np.concatenate([(ranked[at:at + PAIRS] == ranked[first[at:at + PAIRS]]).all(axis=1)
                            & (ranked[at:at + PAIRS, :PARTS[0]] != EMPTY).any(axis=1)
                            for at in range(0, len(ranked), PAIRS)] or [np.zeros(0, bool)])
    return np.where(equal, first, np.arange(len(ranked)))


def _candidates(key) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of rows with the same key: each with the first of them, and with the one before it."""
    order = np.argsort(key, kind="stable")
    key = key[order]
    opens = np.ones(len(key), bool)
    opens[1:] = key[1:] != key[:-1]
    first = np.flatnonzero(opens)[np.cumsum(opens) - 1]
    inside = np.flatnonzero(~opens)
    return np.tile(order[inside], 2), np.concatenate([order[inside - 1], order[first[inside]]])


def _alike(ranked, one, other) -> np.ndarray:
    """bool[P]: is each pair of rows a pair of near duplicates by its sketches?"""
    alike = np.ones(len(one), bool)
    for at in range(0, len(one), PAIRS):
        a, b = ranked[one[at:at + PAIRS]], ranked[other[at:at + PAIRS]]
        for part, least in zip(SLICES, ALIKE, strict=True):
            alike[at:at + PAIRS] &= jaccard(a[:, part], b[:, part]) >= least
    return alike


def jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64[P]: estimated Jaccard similarity of pairs of sketches, matches / bins that one of both fills; 1 where
    neither fills any. Its standard error with m such bins is √(J (1 − J) / m): 0.04 at 0.7 and 128 bins."""
    filled = ((a != EMPTY) | (b != EMPTY)).sum(axis=1)
    matches = ((a == b) & (a != EMPTY)).sum(axis=1)
    return np.where(filled == 0, 1.0, matches / np.maximum(filled, 1))


def _join(labels, one, other) -> None:
    """Union of the clusters of each pair, in place; a cluster's label is its lowest row."""
    while len(one):
        a, b = labels[one], labels[other]
        apart = a != b
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        np.minimum.at(labels, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(lower := labels[labels], labels):
            labels[:] = lower
