"""Answers that go round in circles: synthetic ones, a slow reference, and text that only looks like them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.loops import GRAM, INNER, LEAST, MOSTLY, loops
from eagle3nb.synthesis.talks import looping

DEMO = Path(__file__).parents[2] / "data" / "demo"
END = 4


def flat(rows):
    """(ids, mask, starts) of rows [(ids, mask)]."""
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in rows] or [np.zeros(0, np.int32)])
    mask = np.concatenate([np.asarray(mask, np.uint8) for _, mask in rows] or [np.zeros(0, np.uint8)])
    return ids, mask, np.cumsum([0, *(len(ids) for ids, _ in rows)])


def answer(ids, prompt=(1, 2, 3)):
    """A row: prompt, answer, end of turn."""
    return [*prompt, *ids, END], [0] * len(prompt) + [1] * (len(ids) + 1)


def found(*rows):
    """{row: at} of the loops."""
    rows, at, _ = loops(*flat(rows))
    return dict(zip(rows.tolist(), at.tolist(), strict=True))


def fresh(rng, count):
    return rng.integers(100, 100_000, count).tolist()


def slow(ids, mask):
    """Position of the row's first circle, or None: the docstring's three rules, a run at a time, in plain loops."""
    begins, at = [], 0
    while at < len(ids):
        end = at
        while end < len(ids) and mask[end]:
            end += 1
        if end - at >= LEAST:
            begins += [at + begin for begin in slow_run(list(ids[at:end]))]
        at = max(end, at + 1)
    return min(begins, default=None)


def slow_run(ids):
    gap, seen = {}, {}
    for i in range(len(ids) - GRAM + 1):
        gram = tuple(ids[i:i + GRAM])
        if gram in seen:
            gap[i] = i - seen[gram]
        seen[gram] = i
    begins, last = [], len(ids) - GRAM
    for i in gap:  # one distance, up to the end
        j = i
        while gap.get(j + 1) == gap[i]:
            j += 1
        first = gap.get(i - 1) != gap[i]
        if first and j >= last - 1 and j + GRAM - i + gap[i] >= max(2 * gap[i], LEAST):
            begins.append(i - gap[i])
    for i in gap:  # a stretch of repeats
        if i - 1 not in gap:
            span = next(k for k in range(len(ids)) if i + k not in gap)
            near = [i + k for k in range(span) if 3 * gap[i + k] <= span]
            if len(near) + GRAM >= INNER and 4 * len(near) >= 3 * span:
                begins.append(near[0] - gap[near[0]])
    if len(gap) > MOSTLY * (last + 1):
        begins.append(min(gap) - gap[min(gap)])
    return begins


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=6),
                max_size=4), st.integers(0, 9))
def test_equals_the_slow_reference(plans, seed):
    """Rows put together from fresh text, a few words over and over, and a copy of what stood before."""
    rng, rows = np.random.default_rng(seed), []
    for plan in plans:
        ids, mask = [], []
        for kind, size, other in plan:
            block = [fresh(rng, size), (ids[-size:] or [7]) * (other + 1), [int(rng.integers(3))] * (2 * size)][kind]
            ids += block
            mask += [int(other != 3)] * len(block)
        rows.append((ids, mask))
    wanted = {r: at for r, row in enumerate(rows) if (at := slow(*row)) is not None}
    assert found(*rows) == wanted


def test_every_kind_of_circle_is_found_where_it_begins():
    rng = np.random.default_rng(0)
    sentence, block, text = fresh(rng, 9), fresh(rng, 40), fresh(rng, 300)
    nested = [*[70] * 20, 71, *[72] * 11, 73]
    rows = [answer(text + ids) for ids in (
        sentence * 4, [7] * 30, block * 6, block * 2, (sentence + sentence[:5]) * 3, sentence * 3 + sentence[:5])]
    rows += [answer(text + ids + text[::-1]) for ids in (sentence * 15, [7] * 120, block * 6, nested * 8)]
    rows.append(answer(text + block * 2 + text[:150] + block * 9 + text[::-1]))  # two rounds stood there before
    hits = found(*rows)
    assert list(hits) == list(range(len(rows)))
    assert all(at == 303 for at in list(hits.values())[:-2])
    assert 303 <= hits[9] <= 303 + len(nested) and 533 <= hits[10] <= 533 + 80


def test_share_is_that_of_all_the_rows_answers():
    rng = np.random.default_rng(1)
    first, second = fresh(rng, 40) + [END], [7] * 40 + [END]
    ids, mask = [1, 2, 3, *first, 5, *second], [0] * 3 + [1] * 41 + [0] + [1] * 41
    rows, at, share = loops(*flat([(ids, mask)]))
    assert (rows.tolist(), at.tolist()) == ([0], [45])
    assert share[0] == pytest.approx(32 / 68)
    share = loops(*flat([([7] * 40, [1] * 40)] * 3 + [answer([7] * 40)]))[2]
    assert share == pytest.approx([32 / 33] * 3 + [32 / 34])  # no n-gram reaches into the next row


def test_a_row_is_told_once_by_its_first_circle():
    rng = np.random.default_rng(2)
    ids = fresh(rng, 50) + [7] * 120 + fresh(rng, 50) + [8] * 120
    assert found(answer(fresh(rng, 60)), answer(ids), answer(fresh(rng, 60))) == {1: 53}


def test_only_what_is_supervised_counts_and_only_inside_one_run():
    rng = np.random.default_rng(3)
    text = fresh(rng, 120)
    assert found(answer(fresh(rng, 50), prompt=[7] * 200)) == {}
    again = ([1, *text, 2, *text, 3, *text], [0, *[1] * 120, 0, *[1] * 120, 0, *[1] * 120])  # the file, once a turn
    assert found(again) == {}
    assert found((text + text[:0] + text, [1] * 240)) == {0: 0}
    assert found((text, [1] * 120), (text, [1] * 120), (text, [1] * 120)) == {}  # nor over the border of two rows


def test_no_rows_short_rows_and_nothing_supervised():
    assert [len(part) for part in loops(*flat([]))] == [0, 0, 0]
    assert found(([7], [1]), ([7] * 23, [1] * 23), ([7] * 99, [0] * 99), ([7] * 24, [1] * 24)) == {3: 0}


def test_agrees_with_what_the_synthesis_throws_away():
    """Whatever ends in a circle for `looping` does so here, with and without an end of turn behind it."""
    rng = np.random.default_rng(4)
    for _ in range(300):
        period = int(rng.integers(1, 60))
        block = fresh(rng, period)
        length = max(LEAST, int(period * rng.uniform(2, 5)))
        ids = fresh(rng, int(rng.integers(0, 200))) + (block * length)[:length]
        assert looping(ids)
        assert found(answer(ids)) and found((ids, [1] * len(ids)))


def lists_and_tables(rng):
    """Token sequences with much in common that say something new in each line: 8 to 30 tokens, 2 of them fresh."""
    for size in (8, 14, 30):
        frame = fresh(rng, size)
        yield [token for _ in range(60) for token in [*frame[:-2], *fresh(rng, 2), *frame[-2:]]]
    row = fresh(rng, 12)
    for _ in range(3):  # rows whose values come from a handful: {"side": "left", "index": 3}
        yield [token for _ in range(40) for token in [*row, *rng.integers(0, 9, 3).tolist(), *row[:2]]]
    yield fresh(rng, 200) + [50, 51] * 30 + fresh(rng, 20)  # a list of 30 zeros, a table's rule
    code = fresh(rng, 150)
    yield fresh(rng, 60) + code + fresh(rng, 80) + code + fresh(rng, 40)  # the code once more, corrected below
    table = [token for _ in range(20) for token in [*row, *fresh(rng, 3)]]
    yield fresh(rng, 60) + table + fresh(rng, 80) + table + fresh(rng, 40)  # and a table once more
    yield fresh(rng, 60) + fresh(rng, 10) * 2 + fresh(rng, 30)  # two equal lines


def test_lists_tables_and_code_are_none():
    rng = np.random.default_rng(5)
    assert found(*(answer(ids) for ids in lists_and_tables(rng))) == {}


def rows_of(folder):
    for file in sorted(folder.glob("*.gz")):
        with gzip.open(file) as lines:
            yield from ((row["input_ids"], row["loss_mask"]) for row in map(json.loads, lines))


def test_the_demo_corpus_has_one_and_it_is_one():
    """B and A2, which the demo trains on, have none; A1 has an answer that says "forever" 400 times."""
    for folder in sorted(path for path in DEMO.iterdir() if path.is_dir()):
        rows = list(rows_of(folder))
        hits = found(*rows)
        if folder.name != "A1_longform":
            assert rows and hits == {}, folder.name
        for r, at in hits.items():
            assert len(set(rows[r][0][at + 10:at + 100])) < 10
