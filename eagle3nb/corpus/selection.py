"""Which rows the merge writes, how often and in what order. Everything is decided by the rows' content and the seed, so
that the same rows in other files give the same corpus.

    1 evaluation prompts    rows that hold one are taken out
    2 duplicates            one row is left of those with the same ids, or with nearly the same; no seed decides which
    3 validation            contents whose hash lies below the share; no seed here either, so that a split lasts
    4 caps and weights      a source's rows with the lowest keyed hashes stay; a weight above 1 makes copies, of rows
                            that train only
    5 order                 by a keyed hash of ids and copy; validation rows come last
"""

from dataclasses import dataclass, field

import numpy as np
import xxhash

from eagle3nb.corpus.records import is_excluded
from eagle3nb.corpus.rows import Rows
from eagle3nb.corpus.sketch import near_duplicates
from eagle3nb.errors import UserError

DEDUP = ("exact", "near", "none")
OVERLAP, DUPLICATE, NEAR = "holds an evaluation prompt", "duplicate", "near duplicate"
CAPPED, THINNED = "over the source's cap", "thinned by the source's weight"
VALIDATION = 0x76616C6964  # key of the validation's hash


@dataclass(frozen=True)
class Mix:
    """What the merge takes out and repeats. Names of caps and weights as in `exclude`: A1 or A1_longform.

    caps     rows at most, by source
    weights  copies of each row of a source: 2.5 gives two and, of a seeded half, a third; 0.5 keeps a seeded half
    """

    dedup: str = "exact"
    caps: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    validation_share: float = 0.0

    def __post_init__(self):
        if self.dedup not in DEDUP:
            raise UserError(f"dedup is {self.dedup!r}; choose one of {', '.join(DEDUP)}")
        if type(self.validation_share) not in (int, float) or not 0 <= self.validation_share < 1:
            raise UserError(f"validation_share is {self.validation_share!r}; choose 0 (none) up to below 1")
        for what, values in (("caps", self.caps), ("weights", self.weights)):
            if not isinstance(values, dict):
                raise UserError(f"{what} is {values!r}; give a number by dataset, as in {{A1: 2}}")
        for name, rows in self.caps.items():
            if type(rows) is not int or rows < 1:
                raise UserError(f"caps: {name} is {rows!r}; give rows, 1 or more, or exclude the dataset")
        for name, weight in self.weights.items():
            if type(weight) not in (int, float) or not 0 < weight <= 100:
                raise UserError(f"weights: {name} is {weight!r}; give a number above 0, up to 100, or exclude it")

    def check(self, names: list[str]) -> None:
        """UserError for a cap or weight of no dataset, or two for one."""
        for what, values in (("caps", self.caps), ("weights", self.weights)):
            for entry in values:
                if not any(is_excluded(name, [entry]) for name in names):
                    raise UserError(f"{what}: {entry!r} matches no dataset; there are {', '.join(names)}")
            for name in names:
                if len(found := [entry for entry in values if is_excluded(name, [entry], names)]) > 1:
                    raise UserError(f"{what}: {' and '.join(found)} both match {name}; keep one")


@dataclass(frozen=True)
class Selection:
    """rows int64[M] in the order of merged.jsonl, copy int64[M] (0: the row itself); the last `held` are validation.

    removed: [(reason, int64 rows)].
    """

    rows: np.ndarray
    copy: np.ndarray
    held: int
    removed: list[tuple[str, np.ndarray]]


def select(rows: Rows, mix: Mix, names: list[str], seed: int) -> Selection:
    """`names`: the sources'. Rows are those of the first pass; the merge's and the audit's forecast alike. Near
    duplicates cost the rows their sketches.

    Raises UserError where a cap or a weight is wrong, or where validation leaves nothing to train on.
    """
    mix.check(names)
    high, low = rows.ids_words
    source, removed = rows.columns["source"], []
    stays = np.ones(len(rows), bool)

    def remove(reason: str, which: np.ndarray) -> None:
        which = np.flatnonzero(which & stays)
        stays[which] = False
        if len(which):
            removed.append((reason, which))

    if rows.overlaps is not None:
        remove(OVERLAP, rows.overlaps >= 0)
    rank = _rank(high, low, rows.raw_hash)
    if mix.dedup != "none":
        remove(DUPLICATE, rank > 0)
    if mix.dedup == "near" and len(rows):
        left = np.flatnonzero(stays)
        sketches, rows.sketches = rows.sketches[left], None  # the largest thing that the merge holds, needed once
        label = near_duplicates(sketches, high[left])
        del sketches
        again = np.zeros(len(rows), bool)
        again[left] = label != np.arange(len(left))
        remove(NEAR, again)
    key = _keys(rows.ids_hash, rank, seed)
    held = _held(rows.ids_hash, stays, mix.validation_share)
    times = np.ones(len(rows), np.int64)
    for number, name in enumerate(names):
        mine = stays & (source == number)
        if (cap := _of(mix.caps, name, names)) is not None:
            remove(CAPPED, mine & ~_first(mine, key, rank, cap))
        if (weight := _of(mix.weights, name, names)) is not None:
            mine = stays & (source == number) & ~held  # what is held out is never repeated nor thinned
            whole, rest = int(weight), round(weight * mine.sum()) - int(weight) * int(mine.sum())
            times[mine] = whole + _first(mine, key, rank, rest)[mine]
            remove(THINNED, mine & (times == 0))
    held &= stays
    if held.any() and not (stays & ~held).any():
        raise UserError(f"validation_share {mix.validation_share} leaves none of {int(held.sum())} rows to train on; "
                        "lower it or add data")
    chosen = np.flatnonzero(stays)
    listed = np.repeat(chosen, times[chosen])
    copy = np.arange(len(listed)) - np.repeat(np.cumsum(times[chosen]) - times[chosen], times[chosen])
    key = _keys(rows.ids_hash[listed], rank[listed] + (copy << 32), seed)
    order = np.lexsort((copy, rank[listed], low[listed], high[listed], key, held[listed]))
    return Selection(listed[order], copy[order], int(held.sum()), removed)


def _rank(high, low, raw_hash) -> np.ndarray:
    """int64[R]: 0 for the first of the rows with the same ids, 1 for the second, by their lines' content."""
    grouped = np.lexsort((raw_hash, low, high))
    fresh = np.ones(len(high), bool)
    fresh[1:] = (high[grouped][1:] != high[grouped][:-1]) | (low[grouped][1:] != low[grouped][:-1])
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(high)), 0))
    rank = np.empty(len(high), np.int64)
    rank[grouped] = np.arange(len(high)) - first
    return rank


def _keys(ids_hash: np.ndarray, occurrence: np.ndarray, seed: int) -> np.ndarray:
    """uint64: the keyed hash of ids and occurrence that orders the corpus. Equal rows differ by it, so they spread."""
    packed = np.empty((len(ids_hash), 24), np.uint8)
    packed[:, :16] = ids_hash.view(np.uint8).reshape(-1, 16)
    packed[:, 16:] = occurrence.astype("<i8").view(np.uint8).reshape(-1, 8)
    rows, key = packed.view("V24").ravel(), seed % (1 << 64)
    return np.fromiter((xxhash.xxh3_64_intdigest(row, key) for row in rows), np.uint64, len(rows))


def _first(mine: np.ndarray, key: np.ndarray, rank: np.ndarray, count: int) -> np.ndarray:
    """bool[R]: the `count` of `mine` with the lowest keys."""
    places = np.flatnonzero(mine)
    chosen = np.zeros(len(mine), bool)
    chosen[places[np.lexsort((rank[places], key[places]))[:count]]] = True
    return chosen


def _held(ids_hash: np.ndarray, stays: np.ndarray, share: float) -> np.ndarray:
    """bool[R]: rows whose content is held out: its hash lies below that share of all hashes. Neither the seed nor other
    rows matter, so more data moves none from one part to the other. Where no hash lies there, the lowest is taken."""
    if not share or not stays.any():
        return np.zeros(len(ids_hash), bool)
    hashes = _keys(ids_hash, np.zeros(len(ids_hash), np.int64), VALIDATION)
    return stays & (hashes <= max(np.uint64(int(share * (1 << 64))), hashes[stays].min()))


def _of(values: dict, name: str, names):
    """The entry for a source, None where there is none."""
    return next((value for entry, value in values.items() if is_excluded(name, [entry], names)), None)
