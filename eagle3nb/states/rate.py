"""How fast this machine extracts: measured, where the plan has only what is stated."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from eagle3nb.errors import UserError
from eagle3nb.states import extract, open_target, store
from eagle3nb.states.parameters import weights_bytes
from eagle3nb.states.plan import machine_memory
from eagle3nb.states.target import facts_of


def probe_rate(folder: str | Path, *, batch_tokens: int, row_tokens: int = 512, supervised: float = 1.0,
               states_dtype: str = "bf16", engine: str = "transformers", seconds: float = 5.0) -> dict:
    """Measured here: {"tokens_per_s", "tokens", "seconds", "load_s"} of the extraction's own forward and teacher.

    Random tokens in rows of `row_tokens` (the corpus's mean length), the last `supervised` share of each a teacher's.
    One row warms up; then at least one batch, and until `seconds` are over. UserError where the target does not fit.
    """
    needed = weights_bytes(folder, "fp32")[0]
    if engine == "transformers" and needed > machine_memory():
        raise UserError(f"the target's weights take {needed / 1e9:,.1f} GB in float32, this machine has "
                        f"{machine_memory() / 1e9:,.1f}; state a rate instead of probing it")
    began, row_tokens = time.perf_counter(), max(2, min(row_tokens, facts_of(folder).max_positions))
    target, dtype = open_target(engine, folder), store.dtype_of(states_dtype)
    rows, rng = max(1, batch_tokens // row_tokens), np.random.default_rng(0)
    ids = rng.integers(0, target.facts.vocab, (rows, row_tokens)).astype(np.int32)
    mask = (np.arange(row_tokens) >= (1 - supervised) * row_tokens).astype(np.uint8)
    corpus, nobody = SimpleNamespace(row=lambda i: (ids[i], mask)), SimpleNamespace(advance=lambda count: None)
    clock = {"forward_s": 0.0, "teacher_s": 0.0}
    extract.shard(corpus, target, 0, 0, dtype, batch_tokens, clock, nobody)
    started, done = time.perf_counter(), 0
    while not done or time.perf_counter() - started < seconds:
        extract.shard(corpus, target, 0, rows - 1, dtype, batch_tokens, clock, nobody)
        done += ids.size
    spent = time.perf_counter() - started
    return {"tokens_per_s": done / spent, "tokens": done, "seconds": spent, "load_s": started - began}
