"""What the merge's first pass notes of every row that it may keep, and the second pass's orders: 150 bytes a row."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import xxhash

from eagle3nb.corpus.batch import Batch
from eagle3nb.corpus.decision import KEPT, Decisions
from eagle3nb.corpus.rewrite import line_of

COLUMNS = ("source", "file", "line", "at", "place", "bytes", "tokens", "supervised", "teachers", "truncated")


@dataclass
class Part:
    """The rows of one batch; line numbers count within its chunk."""

    columns: dict[str, np.ndarray]  # int64[R] by name: those of COLUMNS from `line` on, but `spooled` for `place`
    ids_hash: np.ndarray  # V16[R] xxh3-128 of the ids as little-endian int32
    mask_hash: np.ndarray  # V8[R] xxh3-64 of the mask's bytes
    raw_hash: np.ndarray  # uint64[R] xxh3-64 of the source's line: tells rows with the same ids apart
    line_hash: np.ndarray  # uint64[R] xxh3-64 of the merged line
    spool: str  # the file that holds the lines with `spooled`
    skipped: tuple[np.ndarray, np.ndarray]  # (line int64, reason uint8) of the rows that are not kept
    faults: list[tuple[int, str, str]]  # (line, rule, detail)
    checks: Counter
    sketches: np.ndarray | None = None  # uint16[R, …] of sketch.py
    overlaps: np.ndarray | None = None  # int64[R] number of the evaluation prompt that the row holds, -1 for none


def part_of(batch: Batch, made: Decisions, write=None, spool: str = "") -> Part:
    """Hashes and places of the rows that stay; lines that must change go through `write(bytes) -> offset`.

    Without `write` no line is made: enough for an audit to foretell what the merge will take.
    """
    kept = np.flatnonzero(made.reason == KEPT)
    begins, ends = batch.starts[:-1][kept], batch.starts[:-1][kept] + made.length[kept]
    spooled = (made.changed[kept] | (batch.offsets[kept] < 0)) & (write is not None)
    at, size = batch.offsets[kept].copy(), np.zeros(len(kept), np.int64)
    ids_hash, mask_hash = bytearray(), bytearray()
    raw_hash, line_hash = np.empty(len(kept), np.uint64), np.empty(len(kept), np.uint64)
    ids, mask = batch.ids.astype("<i4", copy=False), made.mask
    for i, (r, begin, end) in enumerate(zip(kept.tolist(), begins.tolist(), ends.tolist(), strict=True)):
        line = batch.raws[r]
        raw_hash[i] = line_hash[i] = xxhash.xxh3_64_intdigest(line)
        if spooled[i] and made.changed[r]:
            line = line_of(line, ids[begin:end], mask[begin:end], int(batch.starts[r + 1]) - begin,
                           bare=bool(batch.bare[r]), own=bool(batch.own[r]))
            line_hash[i] = xxhash.xxh3_64_intdigest(line)
        if spooled[i]:
            at[i] = write(line)
        size[i] = len(line)
        ids_hash += xxhash.xxh3_128_digest(ids[begin:end])
        mask_hash += xxhash.xxh3_64_digest(mask[begin:end])
    columns = {"line": batch.lines[kept], "at": at, "spooled": spooled.astype(np.int64), "bytes": size,
               "tokens": made.length[kept], "supervised": made.supervised[kept], "teachers": made.teachers[kept],
               "truncated": made.truncated[kept]}
    left = np.flatnonzero(made.reason != KEPT)
    return Part(columns, np.frombuffer(bytes(ids_hash), "V16"), np.frombuffer(bytes(mask_hash), "V8"), raw_hash,
                line_hash, spool, (batch.lines[left], made.reason[left]), batch.faults, made.checks)


class Rows:
    """The rows that the first pass keeps, in the order they lie in: sources, files, lines.

    columns  int64[R], of COLUMNS: `file` counts over all sources, `line` from 1; `at` and `place` say where the merged
             line's bytes begin, and in which of `paths`
    """

    def __init__(self, files: list[tuple[int, str, object]]):
        """`files`: (source, name as shown, path) of every file, in order."""
        self.files, self.paths = files, [path for _, _, path in files]
        self.first = {source: i for i, (source, _, _) in reversed(list(enumerate(files)))}
        self.spools: dict[str, int] = {}
        self.parts: list[Part] = []
        self.placed: list[dict[str, np.ndarray]] = []

    def add(self, source: int, file: int, before: int, part: Part) -> None:
        """`file` is its place among the source's, `before` the lines of it that precede the part's chunk."""
        number, column = self.first[source] + file, part.columns
        if part.spool and part.spool not in self.spools:
            self.spools[part.spool] = len(self.paths)
            self.paths.append(part.spool)
        spool = self.spools.get(part.spool, -1)
        count = len(column["line"])
        self.placed.append({
            "source": np.full(count, source), "file": np.full(count, number), "line": column["line"] + before + 1,
            "at": column["at"], "place": np.where(column["spooled"] == 1, spool, number)}
            | {name: column[name] for name in ("bytes", "tokens", "supervised", "teachers", "truncated")})
        self.parts.append(part)

    def close(self) -> None:
        """After the last part: one array a column."""
        none = np.zeros(0, np.int64)
        self.columns = {name: np.concatenate([none, *(placed[name] for placed in self.placed)]) for name in COLUMNS}
        self.placed = []
        self.ids_hash, self.mask_hash = self._joined("ids_hash", "V16"), self._joined("mask_hash", "V8")
        self.raw_hash, self.line_hash = self._joined("raw_hash", "u8"), self._joined("line_hash", "u8")
        self.sketches, self.overlaps = self._joined("sketches"), self._joined("overlaps")
        self.parts = []

    def _joined(self, name: str, empty: str = "") -> np.ndarray | None:
        """The parts' arrays as one, each freed once it is copied; None where the parts have none."""
        first = getattr(self.parts[0], name) if self.parts else np.empty(0, empty) if empty else None
        if first is None:
            return None
        count = sum(len(getattr(part, name)) for part in self.parts)
        whole, at = np.empty((count, *first.shape[1:]), first.dtype), 0
        for part in self.parts:
            array = getattr(part, name)
            whole[at:at + len(array)] = array
            at += len(array)
            setattr(part, name, None)
        return whole

    def __len__(self) -> int:
        return len(self.ids_hash)

    @property
    def ids_words(self) -> tuple[np.ndarray, np.ndarray]:
        """(high, low) uint64[R] of the ids' hash."""
        words = self.ids_hash.view(">u8").reshape(-1, 2).astype(np.uint64)
        return words[:, 0], words[:, 1]

    def order_hash(self, order: np.ndarray) -> str:
        """xxh3-128 over the rows' id hashes as they are ordered."""
        return xxhash.xxh3_128_hexdigest(self.ids_hash[order].tobytes())

    def corpus_hash(self, order: np.ndarray) -> str:
        """xxh3-128 over the ordered id hashes, then the ordered mask hashes."""
        return corpus_hash(self.ids_hash[order].tobytes(), self.mask_hash[order].tobytes())


def corpus_hash(ids_hashes: bytes, mask_hashes: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(ids_hashes + mask_hashes)
