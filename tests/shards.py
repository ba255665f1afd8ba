"""Shards of random states that cost nothing to make: what a target would have handed the store's writer."""

import numpy as np
import torch

from eagle3nb.corpus.masks import teacher_positions

HIDDEN, VOCAB = 8, 50


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    """Tokens of each row, the same whatever range of them a shard holds."""
    return np.random.default_rng(seed).integers(1, 13, rows)


def sizes(rows: int, seed: int = 0) -> dict:
    return {"hidden": HIDDEN, "vocab": VOCAB, "rows": rows, "tokens": int(lengths(rows, seed).sum())}


def head() -> dict:
    generator = torch.Generator().manual_seed(1)
    return {"embedding": torch.randn(VOCAB, HIDDEN, generator=generator), "final_norm": torch.ones(HIDDEN),
            "lm_head": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()}


def one(row: int, length: int, dtype: torch.dtype, seed: int) -> dict:
    """A row's tensors; every row has its own seed, the first token is massive in the middle layer."""
    rng = np.random.default_rng([seed, row])
    mask = (rng.random(length) < 0.8).astype(np.uint8)
    positions = teacher_positions(mask)
    aux = torch.from_numpy(rng.standard_normal((length, 3 * HIDDEN))).to(dtype)
    aux[0, HIDDEN + 3] = 2e4
    return {"input_ids": torch.from_numpy(rng.integers(0, VOCAB, length).astype(np.int32)),
            "loss_mask": torch.from_numpy(mask), "aux": aux,
            "last": torch.from_numpy(rng.standard_normal((len(positions), HIDDEN))).to(dtype),
            "last_positions": torch.from_numpy(positions.astype(np.int32)),
            "teacher_argmax": torch.from_numpy(rng.integers(0, VOCAB, len(positions)).astype(np.int32)),
            "teacher_lse": torch.from_numpy(rng.standard_normal(len(positions)).astype(np.float32))}


def shard(first: int, last: int, rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
    """The tensors of rows first to last, of a corpus of `rows`."""
    each = [one(row, int(lengths(rows, seed)[row]), dtype, seed) for row in range(first, last + 1)]
    made = {name: torch.cat([row[name] for row in each]) for name in each[0]}
    offsets = {"row_offsets": "input_ids", "last_offsets": "last_positions"}
    return made | {"rows": torch.arange(first, last + 1)} | {
        name: torch.tensor([0, *(len(row[of]) for row in each)]).cumsum(0) for name, of in offsets.items()}
