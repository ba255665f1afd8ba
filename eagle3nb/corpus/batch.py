"""Lines → a batch of rows laid end to end, so that whatever looks at tokens looks at a million of them at once.

A row that is as it should be is parsed by simdjson, which hands its numbers over as buffers, three times as fast as a
parser that makes Python objects. Anything else goes through records.py, which alone says what a row may be and what is
wrong with it: a test holds the two to each other on random rows, good and bad.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import orjson
import simdjson

from eagle3nb.corpus.lines import CHUNK, Chunk, Lines, read
from eagle3nb.corpus.records import Record, Unusable, conversation, tokens

BARE = {"id", "source", "input_ids", "loss_mask"}
TEXT = {"messages", "conversations", "prompt", "response"}  # what the second derivation of a missing mask reads


@dataclass(frozen=True)
class Batch:
    """R usable rows of one chunk. Line numbers count from 0 within the chunk."""

    source: int
    file: int
    raws: list[bytes]  # R lines, without white space around
    lines: np.ndarray  # int64[R]
    offsets: np.ndarray  # int64[R] byte in the file, -1 where that is compressed
    ids: np.ndarray  # int32[N]
    mask: np.ndarray  # uint8[N] the rows' own; 0 where a row brings none
    starts: np.ndarray  # int64[R+1]
    own: np.ndarray  # bool[R] does the row bring a mask
    plain: np.ndarray  # bool[R] `input_ids` and what it has of `loss_mask` stand in the line as they are here
    bare: np.ndarray  # bool[R] plain, and beside them there is at most an id and a source
    faults: list[tuple[int, str, str]]  # (line, rule, detail) of the lines that are no rows
    breaks: int  # line breaks read
    read: int  # bytes taken off the disk

    def __len__(self) -> int:
        return len(self.raws)

    @property
    def lengths(self) -> np.ndarray:
        """int64[R] tokens a row."""
        return np.diff(self.starts)

    def row(self, r: int) -> slice:
        return slice(self.starts[r], self.starts[r + 1])

    def one(self, r: int) -> "Batch":
        """A batch of row r alone."""
        here = slice(r, r + 1)
        return replace(self, raws=self.raws[here], lines=self.lines[here], offsets=self.offsets[here],
                       ids=self.ids[self.row(r)], mask=self.mask[self.row(r)], own=self.own[here],
                       starts=np.array([0, self.starts[r + 1] - self.starts[r]]), plain=self.plain[here],
                       bare=self.bare[here], faults=[])

    def messages(self, r: int) -> tuple[list[dict] | None, list | None]:
        """(messages, tools) of a row, None where it has none or they cannot be used."""
        row = orjson.loads(self.raws[r])
        tools = row.get("tools")
        try:
            return conversation(row), tools if isinstance(tools, list) else None
        except Unusable:
            return None, None

    def record(self, r: int, source: str = "", file: str = "") -> Record:
        """Row r by itself, its line as counted in the chunk; `source` and `file` as a record may show them."""
        messages, tools = self.messages(r)
        return Record(self.ids[self.row(r)], self.mask[self.row(r)] if self.own[r] else None, messages, tools,
                      self.raws[r], source, file, int(self.lines[r]) + 1,
                      None if self.offsets[r] < 0 else int(self.offsets[r]), bool(self.plain[r]))


def batches(chunk: Chunk, *, vocab_size: int, tokenizer=None, size: int = CHUNK) -> Iterator[Batch]:
    """The chunk's rows in batches of about `size` bytes. `tokenizer` renders rows of text; without one they are faults.

    `tokenizer` is a function without arguments that returns it: loading one takes seconds, and most corpora need none.
    """
    parser = simdjson.Parser()
    for lines in read(chunk, size):
        yield _batch(chunk, lines, parser, vocab_size, tokenizer)


def _batch(chunk: Chunk, lines: Lines, parser, vocab_size: int, tokenizer) -> Batch:
    rows, faults = [], []  # rows: (place in `lines`, ids, mask or None, plain, bare)
    for number, raw in enumerate(lines.raws):
        try:
            rows.append((number, *(_fast(parser, raw, vocab_size) or tokens(raw, vocab_size, tokenizer))))
        except Unusable as unusable:
            faults.append((lines.numbers[number], *unusable.args))
    if lines.damage:
        faults.append((lines.after, "json_invalid", f"file cannot be read on: {lines.damage}"))
    places, parts, masks, plain, bare = zip(*rows, strict=True) if rows else [()] * 5
    lengths = np.array([len(part) for part in parts], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids, mask = np.empty(starts[-1], np.int32), np.zeros(starts[-1], np.uint8)
    for r, (part, own) in enumerate(zip(parts, masks, strict=True)):
        ids[starts[r]:starts[r + 1]] = part
        if own is not None:
            mask[starts[r]:starts[r + 1]] = own
    return Batch(chunk.source, chunk.file, [lines.raws[p] for p in places],
                 np.array([lines.numbers[p] for p in places], np.int64),
                 np.array([lines.offsets[p] for p in places], np.int64), ids, mask, starts,
                 np.array([own is not None for own in masks], bool), np.array(plain, bool), np.array(bare, bool),
                 faults, lines.breaks, lines.read)


def _fast(parser, raw: bytes, vocab_size: int):
    """(ids int64[T], mask int64[T] or None, plain, bare) of a row that is as it should be; None where it may not be."""
    if raw[:1] != b"{":  # simdjson passes over a byte order mark
        return None
    try:
        row = parser.parse(raw)
        keys = list(row.keys())
        own = "loss_mask" in keys
        if "input_ids" not in keys or len(set(keys)) < len(keys) or not (own or TEXT.isdisjoint(keys)):
            return None  # text beside the ids matters where no mask is given
        ids = _numbers(row["input_ids"], vocab_size)
        mask = _numbers(row["loss_mask"], 2) if own else None
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return None
    finally:
        row = None  # the parser takes no new row while this one is held
    if ids is None or own and (mask is None or len(mask) != len(ids)):
        return None
    return ids, mask, True, BARE.issuperset(keys)


def _numbers(array, bound: int) -> np.ndarray | None:
    """int64[T] of a flat list of integers from 0 to below `bound`; None for others, and for an empty or nested list.

    TypeError, ValueError or AttributeError for what is no list of integers.
    """
    values = np.frombuffer(array.as_buffer(of_type="i"), np.int64)
    if not len(values) == len(array) > 0:  # as_buffer flattens nested lists
        return None
    return values if values.view(np.uint64).max() < bound else None  # a negative number is a large one without its sign
