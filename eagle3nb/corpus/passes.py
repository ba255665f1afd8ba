"""What the merge does in processes of their own: its two passes, and the reading back.

Kept apart from merge.py and verify.py: what a process imports costs its start.
"""

import os
from dataclasses import dataclass

import numpy as np
import xxhash

from eagle3nb.corpus.batch import Batch
from eagle3nb.corpus.decision import Decisions, Rules, decide
from eagle3nb.corpus.overlap import Needles, overlaps
from eagle3nb.corpus.rows import Part, part_of
from eagle3nb.corpus.sketch import sketches
from eagle3nb.errors import UserError
from eagle3nb.files import shown

OPEN_FILES = 200  # at once in a process
HELD = 4 << 20  # bytes written at a time


@dataclass(frozen=True)
class FirstPass:
    """What every process knows of the first pass."""

    rules: Rules
    spool: str  # folder for lines that are not copied from where they lie
    near: bool  # sketch the rows
    needles: Needles | None  # evaluation prompts


def first_pass(batch: Batch, shared: FirstPass) -> Part:
    """One batch, in a process of its own."""
    made = decide(batch, shared.rules)
    with _Spool(shared.spool) as spool:
        part = part_of(batch, made, spool.write, spool.path)
    return part if not (shared.near or shared.needles) else _looked_at(part, batch, made, shared)


def _looked_at(part: Part, batch: Batch, made: Decisions, shared: FirstPass) -> Part:
    """With sketches and overlaps of the rows as they are merged, that is, cut."""
    ids, mask, starts = made.kept_rows(batch)
    if shared.near:
        part.sketches = sketches(ids, mask, starts)
    if shared.needles:
        part.overlaps = np.full(len(part.line_hash), -1, np.int64)
        found, _, which, _ = overlaps(ids, starts, shared.needles)
        part.overlaps[found] = which
    return part


class _Spool:
    """A file of this process's own in the spool folder, open while a batch is worked on."""

    def __init__(self, folder: str):
        self.path, self.handle = f"{folder}/{os.getpid()}.lines", None

    def __enter__(self):
        return self

    def write(self, line: bytes) -> int:
        """Append the line; returns where it begins."""
        if self.handle is None:
            self.handle = open(self.path, "ab", buffering=1 << 20)  # noqa: SIM115 (closed in __exit__)
        at = self.handle.tell()
        self.handle.write(line)
        return at

    def __exit__(self, *error):
        if self.handle is not None:
            self.handle.close()


@dataclass(frozen=True)
class Block:
    """Rows that follow one another in merged.jsonl, from byte `begin` on; `place` is an index of `paths`."""

    out: str
    begin: int
    paths: list[str]
    place: np.ndarray
    at: np.ndarray
    bytes: np.ndarray
    line_hash: np.ndarray


def write_block(block: Block, shared, add) -> None:
    """Copy the block's lines to their place, in a process of its own."""
    handles: dict[int, int] = {}
    out, held, size, begin = os.open(block.out, os.O_WRONLY), [], 0, block.begin
    columns = (column.tolist() for column in (block.place, block.at, block.bytes, block.line_hash))
    try:
        for place, at, length, line_hash in zip(*columns, strict=True):
            if place not in handles:
                if len(handles) >= OPEN_FILES:
                    os.close(handles.pop(next(iter(handles))))
                handles[place] = _opened(block.paths[place])
            line = os.pread(handles[place], length, at)
            if xxhash.xxh3_64_intdigest(line) != line_hash:
                raise UserError(f"{shown(block.paths[place])} changed while it was merged; run the merge again")
            held += (line, b"\n")
            size += length + 1
            if size >= HELD:
                begin, held, size = _put(out, held, begin, add), [], 0
        _put(out, held, begin, add)
    finally:
        for handle in (out, *handles.values()):
            os.close(handle)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read any more: {error.strerror}; run the merge again") from error


def _put(out: int, held: list[bytes], begin: int, add) -> int:
    """Write the lines at `begin`; returns the byte after them."""
    data = memoryview(b"".join(held))
    add(len(data))
    while data:
        written = os.pwrite(out, data, begin)
        data, begin = data[written:], begin + written
    return begin


@dataclass(frozen=True)
class Reading:
    """What every process knows: merged rows need no rules."""

    rules: Rules


def read_back(batch: Batch, shared: Reading) -> dict[str, list]:
    """Counts and hashes of the rows of one batch; a line that is no row with a mask counts as one of no tokens."""
    count = len(batch) + len(batch.faults)
    broken = {line for line, _, _ in batch.faults}
    lines = sorted([*batch.lines.tolist(), *broken])
    rows = iter(range(len(batch)))
    found = {name: [0] * count for name in ("tokens", "supervised", "bytes", "xxh3", "mask_xxh3", "line")}
    for i, line in enumerate(lines):
        if line in broken:
            continue
        r = next(rows)
        ids, mask = batch.ids[batch.row(r)], batch.mask[batch.row(r)]
        values = (len(ids) if batch.own[r] else 0, int(np.count_nonzero(mask)), len(batch.raws[r]),
                  xxhash.xxh3_128_hexdigest(ids.astype("<i4", copy=False)), xxhash.xxh3_64_hexdigest(mask),
                  xxhash.xxh3_64_intdigest(batch.raws[r]))
        for name, value in zip(found, values, strict=True):
            found[name][i] = value
    return found
