"""Finding short sequences of token ids in a flat batch of rows."""

import numpy as np


def find(ids: np.ndarray, pattern) -> np.ndarray:
    """int64[K]: where the id sequence begins in the flat ids, ascending; overlapping ones too."""
    return find_all(ids, [pattern])[0]


def find_all(ids: np.ndarray, patterns) -> list[np.ndarray]:
    """`find` of many patterns in one pass: only places that hold a pattern's rarest token are looked at.

    What is rare is estimated on every 16th token; a wrong guess costs time, not a hit. The empty pattern is found
    nowhere.
    """
    highest = max((max(pattern) for pattern in patterns if pattern), default=0)
    size = 1 + max(int(ids.max(initial=0)), highest)
    often = np.bincount(ids[::16], minlength=size)
    rarest = [int(np.argmin(often[list(pattern)])) if pattern else 0 for pattern in patterns]  # index in the pattern
    wanted = np.zeros(size, bool)
    wanted[[pattern[i] for pattern, i in zip(patterns, rarest, strict=True) if pattern]] = True
    places = np.flatnonzero(wanted.take(ids))
    tokens, found = ids[places], []
    for pattern, rare in zip(patterns, rarest, strict=True):
        begins = places[tokens == pattern[rare]] - rare if pattern else places[:0]
        begins = begins[(begins >= 0) & (begins <= len(ids) - len(pattern))]
        for i, token in enumerate(pattern):
            begins = begins[ids[begins + i] == token]
        found.append(begins)
    return found


def in_one_row(begins: np.ndarray, length: int, starts: np.ndarray) -> np.ndarray:
    """Those of the begins whose `length` tokens lie in one row."""
    first, last = (np.searchsorted(starts, at, side="right") for at in (begins, begins + max(length, 1) - 1))
    return begins[first == last]


def ends_with(ids: np.ndarray, ends: np.ndarray, pattern) -> np.ndarray:
    """bool[K]: does the pattern stand right before each of the flat ends? Rows are not told apart."""
    held = ends >= len(pattern)
    for i, token in enumerate(pattern):
        held &= ids[np.maximum(ends - len(pattern) + i, 0)] == token
    return held
