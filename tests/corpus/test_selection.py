"""Which rows are written, how often and where: decided by content and seed alone, evenly; every row accounted for."""

from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3nb.corpus.rows import Rows
from eagle3nb.corpus.selection import VALIDATION, Mix, select
from eagle3nb.corpus.sketch import sketches
from eagle3nb.errors import UserError

NAMES = ["A_x", "B_y", "C"]


def rows_of(items, overlaps=None) -> Rows:
    """Rows of (source, content, line) triples, contents and lines being bytes or numbers."""
    rows = Rows([(s, f"{name}/rows.jsonl", "") for s, name in enumerate(NAMES)])
    rows.close()
    rows.columns = dict(rows.columns, source=np.array([source for source, *_ in items], np.int64))
    rows.ids_hash = np.array([xxhash.xxh3_128_digest(repr(content).encode()) for _, content, _ in items], "V16")
    lines = [f"{content} {line}".encode() for _, content, line in items]
    rows.raw_hash = np.array([xxhash.xxh3_64_intdigest(line) for line in lines], np.uint64)
    rows.overlaps = None if overlaps is None else np.array(overlaps, np.int64)
    return rows


def chosen_items(items, mix, seed, overlaps=None) -> list:
    """[(item, copy, validation?)] in order."""
    chosen = select(rows_of(items, overlaps), mix, NAMES, seed)
    first = len(chosen.rows) - chosen.held
    return [(items[row], copy, i >= first)
            for i, (row, copy) in enumerate(zip(chosen.rows.tolist(), chosen.copy.tolist(), strict=True))]


items_of = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=25)
mixes = st.builds(
    Mix, st.sampled_from(["exact", "none"]), st.dictionaries(st.sampled_from(["A", "B_y"]), st.integers(1, 6)),
    st.dictionaries(st.sampled_from(["A_x", "B", "C"]), st.sampled_from([0.5, 1, 1.0, 2.5, 0.01, 3])),
    st.sampled_from([0, 0.0, 0.3]))


@settings(max_examples=200)
@given(items_of, mixes, st.integers(-5, 2**70), st.randoms(use_true_random=False))
def test_neither_the_order_of_the_rows_nor_their_files_decide_anything(items, mix, seed, rng):
    overlaps = {content: rng.choice([-1, -1, -1, 4]) for _, content, _ in items}
    items = sorted(items, key=lambda item: item[0])
    moved = sorted(rng.sample(items, len(items)), key=lambda item: item[0])  # sources come by name, always
    try:
        first = chosen_items(items, mix, seed, [overlaps[content] for _, content, _ in items])
    except UserError as error:
        assert "leaves none" in str(error)
        return
    assert chosen_items(moved, mix, seed, [overlaps[content] for _, content, _ in moved]) == first


@settings(max_examples=200)
@given(items_of, mixes, st.integers(0, 9), st.randoms(use_true_random=False))
def test_every_row_is_written_or_removed_for_one_reason(items, mix, seed, rng):
    overlaps = {content: rng.choice([-1, -1, 4]) for _, content, _ in items}
    try:
        chosen = select(rows_of(items, [overlaps[content] for _, content, _ in items]), mix, NAMES, seed)
    except UserError:
        return
    removed = [row for _, rows in chosen.removed for row in rows.tolist()]
    assert sorted([*removed, *set(chosen.rows.tolist())]) == list(range(len(items)))
    assert all(len(rows) for _, rows in chosen.removed)
    pairs = list(zip(chosen.rows.tolist(), chosen.copy.tolist(), strict=True))
    times = Counter(row for row, _ in pairs)
    assert sorted(pairs) == sorted((row, copy) for row, count in times.items() for copy in range(count))
    out = held_out({content for _, content, _ in items if overlaps[content] < 0}, mix.validation_share)
    last = [items[row][1] in out for row in chosen.rows.tolist()]
    assert last == sorted(last) and sum(last) == chosen.held  # they stand at the end
    assert all(times[row] == 1 for row, _ in pairs if items[row][1] in out)
    if mix.dedup == "exact":
        assert len({items[row][1] for row, _ in pairs}) == len(times)


def held_out(contents: set, share: float) -> set:
    """The contents whose hash lies in the share, or the lowest."""
    hashes = {content: xxhash.xxh3_64_intdigest(xxhash.xxh3_128_digest(repr(content).encode()) + bytes(8), VALIDATION)
              for content in contents}
    found = {content for content, value in hashes.items() if value / 2**64 < share}
    return found or set(sorted(contents, key=hashes.get)[:1] if share else [])


def positions(items, mix, seeds) -> tuple[np.ndarray, int]:
    """(int64[seeds, M] the place of each (row, copy), M)."""
    places, rows = [], rows_of(items)
    for seed in range(seeds):
        chosen = select(rows, mix, NAMES, seed)
        places.append(np.lexsort((chosen.copy, chosen.rows)))  # row by row, copy by copy: where it stands
    return np.array(places), len(places[0])


@pytest.mark.parametrize(("items", "mix"), [
    ([(0, i, 0) for i in range(24)], Mix("exact")),
    ([(i % 3, 7, i % 2) for i in range(24)], Mix("none")),  # all have the same ids, many the same line
    ([(i % 2, i, 0) for i in range(12)], Mix("exact", weights={"A": 3}))])
def test_every_place_is_as_likely_for_every_row_and_copy(items, mix):
    seeds = 3000
    places, count = positions(items, mix, seeds)
    assert count == 24
    for place in places.T:  # chi-square with 23 degrees of freedom: mean 23, sd 6.8; 76 is at one in 10^7
        seen = np.bincount(place, minlength=count)
        assert ((seen - seeds / count) ** 2 / (seeds / count)).sum() < 76
    apart = np.abs(places[:, :, None] - places[:, None, :]) == 1
    neighbours = apart.mean(axis=0)[np.triu_indices(count, 1)]  # of each pair: 2 / 24, sd 0.005
    assert np.abs(neighbours - 2 / count).max() < 6 * np.sqrt(2 / count / seeds)
    before = (places[:, :, None] < places[:, None, :]).mean(axis=0)[np.triu_indices(count, 1)]
    assert np.abs(before - 0.5).max() < 6 * 0.5 / np.sqrt(seeds)


def test_one_order_of_many_rows_has_nothing_to_do_with_how_they_came():
    count = 20_000
    chosen = select(rows_of([(0, i // 2, i) for i in range(count)]), Mix("none"), NAMES, 5)
    place = np.argsort(chosen.rows)
    assert abs(np.corrcoef(place, np.arange(count))[0, 1]) < 5 / np.sqrt(count)
    cells = np.histogram2d(place, np.arange(count), bins=20)[0]  # 400 cells of 50
    assert ((cells - 50) ** 2 / 50).sum() < 361 + 5 * np.sqrt(2 * 361)
    pairs = np.abs(place[::2] - place[1::2])  # equal rows lie a third of the corpus apart
    assert abs(pairs.mean() - count / 3) < 5 * count / np.sqrt(18 * count / 2)


def test_a_cap_draws_equal_rows_one_by_one():
    items = [(0, i // 10, i) for i in range(500)] + [(1, 0, i) for i in range(20)]
    kept = Counter(item[1] for item, _, _ in chosen_items(items, Mix("none", {"A": 100}), 1) if item[0] == 0)
    assert kept.total() == 100
    assert 35 < len(kept) < 50 and 3 < max(kept.values()) < 8  # of 50 contents: not 10 whole, nor 2 of each
    other = Counter(item[1] for item, _, _ in chosen_items(items, Mix("none", {"A": 100}), 2) if item[0] == 0)
    assert other != kept and other.total() == 100


@pytest.mark.parametrize(("weight", "copies"), [(0.5, {1: 10}), (1, {1: 21}), (2.5, {2: 11, 3: 10}), (3, {3: 21}),
                                                (0.01, {}), (2.3, {2: 15, 3: 6}), (1.02, {1: 21})])
def test_weights_make_whole_copies_and_a_seeded_rest(weight, copies):
    items = [(0, i, 0) for i in range(21)] + [(1, 99, 0)]
    drawn = []
    for seed in range(4):
        times = Counter(item for item, _, _ in chosen_items(items, Mix(weights={"A_x": weight}), seed))
        assert Counter(count for item, count in times.items() if item[0] == 0) == copies and times[(1, 99, 0)] == 1
        drawn.append(tuple(sorted(item for item, count in times.items() if count == max(copies, default=0))))
    assert len(copies) < 2 and weight != 0.5 or len(set(drawn)) == 4  # another seed draws others


def test_caps_come_before_weights():
    kept = chosen_items([(0, i, 0) for i in range(30)], Mix(caps={"A": 4}, weights={"A": 2.5}), 1)
    assert Counter(Counter(item for item, *_ in kept).values()) == {2: 2, 3: 2}


def test_validation_does_not_move_when_the_seed_changes_or_data_comes():
    def held(items, seed=0, dedup="exact"):
        return {item for item, _, last in chosen_items(items, Mix(dedup, validation_share=0.1), seed) if last}

    items = [(i % 2, i, 0) for i in range(3000)]
    more = items + [(2, i, 0) for i in range(3000, 9000)] + [(2, i, 1) for i in range(0, 3000, 7)]
    first = held(items)
    assert 240 < len(first) < 360  # binomial: 300, sd 16
    assert held(items, 9) == first
    contents = {content for _, content, _ in held(more, 3)}
    assert {content for content in contents if content < 3000} == {content for _, content, _ in first}
    assert held(more, dedup="none") >= first
    small = held(items[:12])
    assert len(small) >= 1  # however few rows there are, one is held out


def test_validation_is_neither_copied_nor_thinned():
    items = [(0, i, 0) for i in range(400)]
    for weight in (3, 0.2):
        plain = chosen_items(items, Mix(validation_share=0.2), 1)
        weighed = chosen_items(items, Mix(weights={"A": weight}, validation_share=0.2), 1)
        assert {item for item, _, last in plain if last} == {item for item, _, last in weighed if last}
        assert sum(last for *_, last in weighed) == sum(last for *_, last in plain)
        train = 400 - sum(last for *_, last in plain)
        assert len(weighed) - (400 - train) == round(weight * train)
        assert not any(last for *_, last in weighed[:round(weight * train)])


@pytest.mark.parametrize("items", [[(0, 1, 0)], [(0, 1, 0), (1, 1, 5)]])
def test_validation_never_takes_all(items):
    with pytest.raises(UserError, match="validation_share 0.5 leaves none of . rows to train on"):
        select(rows_of(items), Mix("none", validation_share=0.5), NAMES, 0)


def test_near_duplicates_stay_the_same_whatever_seed_and_order():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 5000, 200) for _ in range(30)]
    for text in list(texts):
        for _ in range(rng.integers(0, 3)):
            near = text.copy()
            near[rng.integers(0, 200, 3)] = 5001  # 3-grams: about 9 of 198 others
            texts += [near, near.copy()]
    ids, mask = np.concatenate(texts).astype(np.int32), np.ones(200 * len(texts), np.uint8)
    drawn = sketches(ids, mask, np.arange(len(texts) + 1) * 200)
    found = []
    for seed, order in ((0, np.arange(len(texts))), (1, np.arange(len(texts))), (0, rng.permutation(len(texts)))):
        rows = rows_of([(0, texts[i].tobytes(), 0) for i in order])
        rows.sketches = drawn[order]
        chosen = select(rows, Mix("near"), NAMES, seed)
        found.append(sorted(texts[i].tobytes() for i in order[chosen.rows]))
        assert len(chosen.rows) == 30
        assert {reason: len(rows) for reason, rows in chosen.removed} == {
            "duplicate": (len(texts) - 30) // 2, "near duplicate": (len(texts) - 30) // 2}
    assert found[0] == found[1] == found[2]


def test_no_rows_at_all():
    for dedup in ("exact", "near", "none"):
        chosen = select(rows_of([]), Mix(dedup, {"A": 1}, {"A": 2.5}, 0.5), NAMES, 1)
        assert len(chosen.rows) == len(chosen.copy) == chosen.held == 0 and chosen.removed == []


@pytest.mark.parametrize(("options", "words"), [
    ({"dedup": "fuzzy"}, "dedup is 'fuzzy'; choose one of exact, near, none"),
    ({"validation_share": 1}, "validation_share is 1"), ({"validation_share": -0.1}, "validation_share is -0.1"),
    ({"validation_share": "0.1"}, "validation_share is '0.1'"), ({"validation_share": float("nan")}, "is nan"),
    ({"caps": {"A": 0}}, "caps: A is 0"), ({"caps": {"A": 2.0}}, "caps: A is 2.0"), ({"caps": ["A"]}, "caps is"),
    ({"caps": {"A": True}}, "caps: A is True"), ({"weights": None}, "weights is None"),
    ({"weights": {"A": 0}}, "weights: A is 0"), ({"weights": {"A": 101}}, "weights: A is 101"),
    ({"weights": {"A": "2"}}, "weights: A is '2'"), ({"weights": {"A": float("inf")}}, "weights: A is inf")])
def test_a_mix_that_makes_no_sense_is_one_line(options, words):
    with pytest.raises(UserError) as error:
        Mix(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "words"), [
    ({"caps": {"D": 1}}, "caps: 'D' matches no dataset; there are A_x, B_y, C"),
    ({"weights": {"A_": 1}}, "weights: 'A_' matches no dataset"), ({"weights": {1: 1}}, "weights: 1 matches no"),
    ({"weights": {"A": 1, "A_x": 2}}, "weights: A and A_x both match A_x; keep one")])
def test_a_name_that_is_no_dataset_or_two_for_one(options, words):
    with pytest.raises(UserError) as error:
        select(rows_of([(0, 1, 0)]), Mix(**options), NAMES, 0)
    assert words in str(error.value)
