"""Streaming: the extraction runs ahead of training by at most `keep_bytes` of disk; shards are made, read, deleted.

    states/manifest.json, head.safetensors   as of a store of no shards yet; stage 3 writes them (begin)
    states/stream.json                       how the states are to be made: engine, dtype, batches, keep_bytes
    states/kept/                             shards that stay: held-out rows, and what the start of training reads
    states/ahead/                            shards that training has not read to their end
    states/feed.json, feeding.json, feeder.log   the feeder's orders, its progress, its own words

Who drives. Training knows every row that it will read, and the order: the merged one, then each later epoch's shuffle.
It announces them (streamed.py) and starts a feeder (feeder.py), a process of its own, which makes shards in that order.
Training waits for a shard, copies its rows out one after the other, and deletes it with the last.

Positions. To the feeder, the announced rows laid end to end are a corpus (Ordered), and position p of it is a row. So a
shard is still a contiguous range, cut by `shard_tokens` from the first position whatever step training is at: the same
positions give the same bytes in every start. A later epoch makes its rows anew: that is the price, one extraction an
epoch. Rows that are kept are in no shard ahead, in any epoch.

The bound. The bytes of head, kept and ahead together, shards that are being written included, never exceed `keep_bytes`
(manifests and logs, some kilobytes, come on top). The feeder has a shard computed in memory and waits until there is
room for it, then writes. What cannot fit (head, kept rows and the largest shard) is refused before anything is made.

Killed. Training resumes at its checkpoint, announces the same order and the position it is at. Shards ahead that stand,
that it will still read and that fit the bound are used; the others go. The feeder ends when training does; if the
feeder ends too early, training saves a checkpoint and ends with the feeder's own line.

Equality. The packs are those of the whole store, in the same order. States differ by rounding alone, since other rows
share a batch (1e-6 in float32); with one row a batch they are the same bit for bit.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.files import shown, write_json
from eagle3nb.states import extract
from eagle3nb.states import store as stores
from eagle3nb.states.plan import head_bytes, states_bytes

STREAM, FEED, LOG, KEPT, AHEAD, ORDER = "stream.json", "feed.json", "feeder.log", "kept", "ahead", "order.npy"
FEEDING = "feeding.json"  # progress of the feeder, for who waits (drafter/launch.py)
FEEDER_LOCK, STREAM_LOCK = ".feeder.lock", ".stream.lock"
POLL = 0.02  # seconds between looks at the disk
HEADER = 4096  # bytes of a safetensors header, at most


# ---------------------------------------------------------------------------------------------------- stage 3


def begin(corpus: Corpus, target, folder: str | Path, *, dtype: str, batch_tokens: int, shard_tokens: int,
          keep_bytes: int, limit: int = 0, tensor_parallel: int = 1, engine_args=()) -> dict:
    """What stage 3 writes instead of the store: the head, the fingerprint, and how the states are to be made.

    The kept rows come with training, whose parameters decide which they are. Returns sizes for a table. UserError for
    a store of something else, shards of a whole store standing there, and a bound that cannot hold the head, one shard
    and the rows that the merge has held out.
    """
    stores.dtype_of(dtype)
    folder, rows = Path(folder), min(limit, len(corpus)) if limit else len(corpus)
    lengths, teacher = corpus.lengths[:rows], corpus.index["teacher_positions"].to_numpy(np.int64)[:rows]
    extract.check_corpus(corpus, lengths, target)
    shard = largest_shard(target.facts, lengths, teacher, dtype, shard_tokens)
    held = slice(min(rows, corpus.report["validation"]["first_row"]), rows)
    held_out, count = 0, held.stop - held.start
    if count:
        held_out = shard_bytes(target.facts, int(lengths[held].sum()), int(teacher[held].sum()), count, dtype)
    check_fits(keep_bytes, head_bytes(target.facts), count, held_out, shard)
    fingerprint = extract.fingerprint(corpus, target, rows, dtype, shard_tokens)
    sizes = {"hidden": target.facts.hidden, "vocab": target.facts.vocab, "rows": rows, "tokens": int(lengths.sum())}
    with stores.open_writer(folder, fingerprint, sizes) as writer:
        if shards := writer.manifest["shards"]:
            raise UserError(f"{shown(folder)} holds {len(shards)} shards of a whole store; set keep_bytes to 0 to go "
                            f"on with it, or delete {shown(folder)} to stream")
        if not writer.manifest["head"]:
            writer.write_head(extract.head_of(target))
        head = writer.manifest["head"]["bytes"]
        check_fits(keep_bytes, head, count, held_out, shard)
        write_json(folder / STREAM, {
            "keep_bytes": keep_bytes, "engine": target.engine, "dtype": dtype, "batch_tokens": batch_tokens,
            "shard_tokens": shard_tokens, "tensor_parallel": tensor_parallel, "engine_args": list(engine_args)})
    whole = states_bytes(target.facts, int(lengths.sum()), int(teacher.sum()), dtype)
    return {"rows": rows, "tokens": int(lengths.sum()), "teacher_positions": int(teacher.sum()), "dtype": dtype,
            "keep_bytes": keep_bytes, "head_bytes": head, "held_out_bytes": held_out, "shard_bytes": shard,
            "whole_bytes": whole, "shards_ahead": (keep_bytes - head - held_out) // shard}


def streams(folder: str | Path) -> bool:
    """The states in this folder are made while training runs: stage 3 has begun a stream there, and no store."""
    folder = Path(folder)
    return (folder / STREAM).is_file() and not stores.read_manifest(folder)["shards"]


def check_fits(keep_bytes: int, head: int, rows: int, kept: int, shard: int) -> None:
    if head + kept + shard > keep_bytes:
        held = f", {rows:,} rows that are kept ({kept / 1e9:,.3f} GB)" if rows else ""
        raise UserError(f"keep_bytes is {keep_bytes / 1e9:,.3f} GB, but the head ({head / 1e9:,.3f} GB){held} and one "
                        f"shard ({shard / 1e9:,.3f} GB) need {(head + kept + shard) / 1e9:,.3f} GB; raise it, or lower "
                        f"shard_tokens{' or validation_share' if rows else ''}")


def shard_bytes(facts, tokens: int, teacher: int, rows: int, dtype: str) -> int:
    """Bytes of a shard's file, at most; HEADER is what this is too high by."""
    return states_bytes(facts, tokens, teacher, dtype) - head_bytes(facts) + 48 * rows + 16 + HEADER


def largest_shard(facts, lengths, teacher, dtype: str, shard_tokens: int) -> int:
    """Bytes of a shard that no order of the rows exceeds."""
    longest = int(lengths.argmax())
    tokens = max(min(shard_tokens, int(lengths.sum())), int(lengths[longest]))
    rows = min(len(lengths), max(1, tokens // int(lengths.min())))
    positions = min(int(teacher.sum()), tokens)
    return shard_bytes(facts, tokens, positions, rows, dtype)


# ---------------------------------------------------------------------------------------------------- orders


class Ordered:
    """Rows of a corpus in another order, as the extraction reads a corpus."""

    def __init__(self, corpus: Corpus, order: np.ndarray):
        self.corpus, self.order = corpus, order

    def __len__(self) -> int:
        return len(self.order)

    def row(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        return self.corpus.row(int(self.order[p]))


@dataclass(frozen=True)
class Part:
    """`kept` or `ahead`: rows of the corpus in order, cut into shards by position."""

    folder: Path
    order: np.ndarray  # int64 [P]: the row at each position
    ranges: list[tuple[int, int]]  # positions (first, last) of each shard
    bytes: list[int]  # of each shard, at most

    @cached_property
    def firsts(self) -> np.ndarray:
        return np.array([first for first, _ in self.ranges], np.int64)

    def shard_of(self, p: int) -> int:
        return int(np.searchsorted(self.firsts, p, side="right")) - 1

    def entry(self, shard: int) -> dict | None:
        """What the manifest says of a shard; None until it is whole."""
        first, last = self.ranges[shard]
        if not (self.folder / stores.shard_name(first, last)).is_file():
            return None
        return next((e for e in stores.read_manifest(self.folder)["shards"] if e["first"] == first), None)
