"""Sketches against slow ones; near duplicates against exact Jaccard similarities."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus import sketch
from eagle3nb.corpus.ngrams import ngram_hashes
from eagle3nb.corpus.sketch import ASKED, EMPTY, PARTS, jaccard, near_duplicates, sketches

HEADER, END, SYSTEM = [1, 2, 3], [4, 5], list(range(100, 220))


def flat(rows):
    """(ids, mask, starts) of rows [(ids, mask)]."""
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in rows] or [np.zeros(0, np.int32)])
    mask = np.concatenate([np.asarray(mask, np.uint8) for _, mask in rows] or [np.zeros(0, np.uint8)])
    return ids, mask, np.cumsum([0, *(len(ids) for ids, _ in rows)])


def talk(prompt, answer, system=()):
    """A row: system prompt, question, answer; the answer and its end of turn are supervised."""
    before = [*system, *HEADER, *prompt, *END, *HEADER]
    return [*before, *answer, 4], [0] * len(before) + [1] * (len(answer) + 1)


def words(rng, count):
    return rng.integers(1000, 100_000, count).tolist()


def edited(rng, ids, share):
    """A copy with this share of the tokens replaced by others."""
    return [int(rng.integers(1000, 100_000)) if rng.random() < share else token for token in ids]


def grams_of(row):
    """The three sets of 3-grams that a sketch stands for."""
    ids, mask = row
    asked = [mask[i] == 0 and any(mask[j] and not mask[j - 1] for j in range(i + 1, min(i + ASKED, len(ids) - 1) + 1))
             for i in range(len(ids))]
    kinds = [[True] * len(ids), [value == 1 for value in mask], asked]
    return [{tuple(ids[i:i + 3]) for i in range(len(ids) - 2) if kind[i + 2]} for kind in kinds]


def exact(row, other):
    """The three exact Jaccard similarities; 1 where both sets are empty."""
    return [len(a & b) / len(a | b) if a | b else 1.0 for a, b in zip(grams_of(row), grams_of(other), strict=True)]


def labels_of(rows, priority=None):
    return near_duplicates(sketches(*flat(rows)), np.arange(len(rows)) if priority is None else priority)


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1)), min_size=1, max_size=90), max_size=6))
def test_sketches_equal_slow_ones(rows):
    rows = [([token for token, _ in row], [value for _, value in row]) for row in rows]
    wanted = np.full((len(rows), 192), EMPTY)
    for r, row in enumerate(rows):
        for grams, bins, first in zip(grams_of(row), PARTS, (0, 128, 160), strict=True):
            least = {}
            for gram in grams:
                value = int(ngram_hashes(np.array(gram, np.int32), 3)[0])
                place = value * bins >> 64
                least[place] = min(least.get(place, value), value)
            for place, value in least.items():
                wanted[r, first + place] = min(value & 0xFFFF, 0xFFFE)
    found = sketches(*flat(rows))
    assert found.dtype == np.uint16 and np.array_equal(found, wanted)


def test_a_batch_of_more_rows_than_are_sketched_at_a_time(monkeypatch):
    rng = np.random.default_rng(0)
    batch = flat([talk(words(rng, 5), words(rng, 9)) for _ in range(10)])
    whole = sketches(*batch)
    monkeypatch.setattr(sketch, "ROWS", 3)
    assert np.array_equal(sketches(*batch), whole)
    assert np.array_equal(near_duplicates(whole, np.arange(10)), np.arange(10))


def test_no_row_and_rows_without_a_3_gram():
    assert sketches(*flat([])).shape == (0, 192)
    assert near_duplicates(sketches(*flat([])), np.zeros(0)).shape == (0,)
    short = [([7], [1]), ([7, 7], [1, 1]), ([7, 7], [1, 1])]
    assert (sketches(*flat(short)) == EMPTY).all()
    assert labels_of(short).tolist() == [0, 1, 2]  # equal, yet nothing to tell it by


def test_the_estimate_is_unbiased_within_its_standard_error():
    """Over 200 pairs a share of edits the mean error must lie within 4 standard errors; the spread as documented."""
    rng = np.random.default_rng(1)
    for share in (0.02, 0.05, 0.15):
        pairs = [(row, edited(rng, row, share)) for row in (words(rng, 700) for _ in range(200))]
        rows = [(ids, [0] * len(ids)) for pair in pairs for ids in pair]
        found = sketches(*flat(rows))
        estimates = jaccard(found[::2, :128], found[1::2, :128])
        true = np.array([exact(rows[2 * i], rows[2 * i + 1])[0] for i in range(200)])
        error, deviation = estimates - true, np.sqrt(true * (1 - true) / 128)
        assert abs(error.mean()) < 4 * deviation.mean() / 200 ** 0.5
        assert error.std() < 1.2 * deviation.mean()


@pytest.mark.parametrize("length", [30, 120, 600])
def test_recall_and_precision_against_exact_similarity(length):
    """Copies with 1 to 40 % of their tokens replaced. The estimates err by σ = 0.04 for the whole (128 bins) and up to
    0.09 for the small parts: pairs at 2.5 σ and more above all thresholds must be found (at least 97 %: the three
    conditions and the banding may each miss a few), those as far below one must not (at most 3 %)."""
    rng = np.random.default_rng(length)
    rows, pairs = [], []
    for i in range(300):
        prompt, answer = words(rng, length), words(rng, length)
        share = (0.01, 0.03, 0.06, 0.1, 0.3, 0.4)[i % 6]
        rows += [talk(prompt, answer, SYSTEM), talk(edited(rng, prompt, share), edited(rng, answer, share), SYSTEM)]
        pairs.append(exact(*rows[-2:]))
    labels = labels_of(rows)
    together, similar = labels[::2] == labels[1::2], np.array(pairs)
    margin = np.array([0.1, 0.22, 0.22])
    above = (similar >= np.minimum(np.array([0.7, 0.4, 0.5]) + margin, 1)).all(axis=1)
    below = (similar < np.array([0.7, 0.4, 0.5]) - margin).any(axis=1)
    assert above.sum() > 40 and below.sum() > 40
    assert together[above].mean() >= 0.97
    assert together[below].mean() <= 0.03
    assert (labels // 2 == np.arange(600) // 2).all()  # the shared system prompt connects no two conversations


def test_banding_finds_what_a_comparison_of_all_pairs_finds():
    """Clusters of mutations of mutations, and short rows that share most of their template."""
    rng = np.random.default_rng(3)
    rows = []
    for size in (1, 2, 5, 20):
        for length in (4, 15, 300):
            row = words(rng, 12), words(rng, length)
            for _ in range(size):
                rows.append(talk(*row, SYSTEM[:20]))
                row = row[0], edited(rng, row[1], 0.03)
    for _ in range(150):  # hardly a band of the whole tells these apart
        prompt, answer = words(rng, 8), words(rng, 8)
        rows += [talk(prompt, answer, range(3000)), talk(prompt, [*answer[:4], 9, *answer[5:]], range(3000))]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    found = sketches(*flat(rows))
    one, other = np.array(list(combinations(range(len(rows)), 2))).T
    alike = sketch._alike(found, one, other)
    wanted = np.arange(len(rows))
    sketch._join(wanted, one[alike], other[alike])
    assert len(set(wanted.tolist())) < len(rows) - 100
    assert np.array_equal(near_duplicates(found, np.arange(len(rows))), wanted)


def test_every_exact_duplicate_is_found_and_the_lowest_priority_stays():
    rng = np.random.default_rng(4)
    rows = [talk(words(rng, int(rng.integers(1, 40))), words(rng, int(rng.integers(1, 400)))) for _ in range(300)]
    rows = rows + rows[:200] + rows[:100]
    priority = rng.permutation(len(rows)).astype(np.uint64)
    labels = labels_of(rows, priority)
    for i in range(300):
        copies = [j for j in range(600) if rows[j] == rows[i]]
        assert set(labels[copies]) == {min(copies, key=lambda j: priority[j])}
    assert len(set(labels.tolist())) == 300


def test_clusters_do_not_depend_on_the_rows_order():
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(60):
        prompt, answer = words(rng, 20), words(rng, 100)
        rows += [talk(edited(rng, prompt, 0.04), edited(rng, answer, 0.05)) for _ in range(4)]
    priority = rng.permutation(len(rows)).astype(np.uint64)
    labels = labels_of(rows, priority)
    assert 60 <= len(set(labels.tolist())) < 200
    order = rng.permutation(len(rows))
    assert np.array_equal(order[labels_of([rows[i] for i in order], priority[order])], labels[order])


def test_the_same_prompt_with_another_answer_is_no_duplicate():
    rng = np.random.default_rng(6)
    prompt = words(rng, 400)
    rows = [talk(prompt, words(rng, 40)) for _ in range(20)] + [talk(prompt, [7]), talk(prompt, [8])]
    assert labels_of(rows).tolist() == list(range(22))


def test_the_same_answer_to_another_prompt_is_no_duplicate():
    """Also where a long system prompt makes the rows alike and the questions are short: a classification data set."""
    rng = np.random.default_rng(7)
    system = words(rng, 500)
    rows = [talk(words(rng, 30), [7, 8], system) for _ in range(50)]
    assert labels_of(rows).tolist() == list(range(50))
    assert exact(rows[0], rows[1])[0] > 0.75 and exact(rows[0], rows[1])[1] > 0.6  # two of three would have merged them
    assert labels_of([talk(words(rng, 30), [7, 8]) for _ in range(50)]).tolist() == list(range(50))


def test_rows_without_anything_supervised_are_compared_as_a_whole():
    rng = np.random.default_rng(8)
    ids = words(rng, 300)
    rows = [(ids, [0] * 300), (edited(rng, ids, 0.01), [0] * 300), (ids, [0] * 200 + [1] * 100)]
    assert labels_of(rows).tolist() == [0, 0, 2]


def test_equal_sketches_meet_however_crowded_their_bands_are():
    """Every band of every row is one of two that half of the rows have; each row stands there twice."""
    rng = np.random.default_rng(9)
    found = np.repeat(rng.integers(0, 2, (200, 192 // 4)), 4, axis=1).astype(np.uint16)
    labels = near_duplicates(np.concatenate([found, found]), rng.permutation(400))
    assert np.array_equal(labels[:200], labels[200:]) and len(set(labels.tolist())) > 150


def test_candidates_are_the_first_of_a_group_and_the_one_before():
    one, other = sketch._candidates(np.array([5, 3, 5, 3, 5, 4], np.uint64))
    assert set(zip(one.tolist(), other.tolist(), strict=True)) == {(2, 0), (4, 2), (4, 0), (3, 1)}
