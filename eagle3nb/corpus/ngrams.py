"""Hashes of the n-grams of rows laid end to end."""

from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 15  # tokens hashed at a time: a few uint64 arrays of them stay in the processor's second cache
BASE = 0x9E3779B97F4A7C15  # of the polynomial; odd, so that no token's bits are lost


def ngram_hashes(ids: np.ndarray, n: int) -> np.ndarray:
    """uint64[N]: the hash of ids[i:i+n] at i; 0 where that n-gram would cross the array's end."""
    hashes = np.zeros(len(ids), np.uint64)
    for begin, block in hash_blocks(ids, n):
        hashes[begin:begin + len(block)] = block
    return hashes


def hash_blocks(ids: np.ndarray, n: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first position, uint64 hashes) of the n-grams of `ids`, block by block: what stays in the cache is fast."""
    last = len(ids) - n + 1
    for begin in range(0, last, BLOCK):
        end = min(begin + BLOCK, last)
        yield begin, mixed(_polynomials(ids[begin:end + n - 1].astype(np.uint64), n))


def _polynomials(tokens: np.ndarray, n: int) -> np.ndarray:
    """uint64[M − n + 1]: Σ tokens[i+k]·BASE^(n−1−k) mod 2⁶⁴, put together from pieces of 1, 2, 4, … tokens."""
    whole, length, piece, size = None, 0, tokens, 1
    while True:
        if n & size:
            left = None if whole is None else whole[:len(piece) - length] * _power(size)
            whole, length = piece if left is None else left + piece[length:], length + size
        if 2 * size > n:
            return whole
        piece = piece[:len(piece) - size] * _power(size) + piece[size:]
        size *= 2


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(BASE, exponent, 1 << 64))


def mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on every other."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def whole_ngrams(starts: np.ndarray, n: int) -> np.ndarray:
    """bool[N]: the n-gram that starts here ends inside its row. `starts` int64[R+1]."""
    whole = np.ones(int(starts[-1]), bool)
    for back in range(1, n):
        ends = starts[1:] - back
        whole[ends[ends >= 0]] = False  # in a row shorter than that it hits the row before, and also there rightly
    return whole
