"""Merge: every dataset into one globally shuffled corpus, in memory that does not grow with the text.

Pass 1 decides every row and notes where its bytes lie; pass 2 writes them in shuffled order. Rows that need no change
are copied as bytes; the others, and what comes out of compressed files, wait in a nameless file on the output's disk.

The order is by a keyed hash of each row's content, so the same seed gives the same bytes however the rows are spread
over files. `merged.jsonl` is the training order.
"""

import io
import os
import tempfile
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pandas as pd
import xxhash

from eagle3nb.corpus import decision as deciding
from eagle3nb.corpus.decision import Decision, Rules, Tally, decide
from eagle3nb.corpus.masks import Markers, teacher_positions
from eagle3nb.corpus.merged import INDEX, REPORT, ROWS, Corpus
from eagle3nb.corpus.records import Fault, Record, Source, read_records
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, disk_free, read_json, shown
from eagle3nb.progress import progress

TEXT_KEYS = ("messages", "conversations", "prompt", "response", "text", "tools")
OPEN_FILES = 200  # rows of further files are spooled rather than read in place: open files are few
SPOOL = -1


def merge(sources: list[Source], out_dir: str | Path, *, max_seq_len: int, seed: int, vocab_size: int,
          markers: Markers | None, tokenizer=None, masks: str = "own", limit: int = 0, exclude=()) -> dict:
    """Write merged.jsonl, index.parquet and merge.json into `out_dir`; returns merge.json's content.

    Raises UserError where nothing is left to train on, or where the disk is full; then the old files stand.
    """
    rules, out_dir = Rules(max_seq_len, masks, markers, tokenizer), Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    size = sum(path.stat().st_size for source in sources for path in source.files)
    with _spool(out_dir) as spool:
        rows, tallies = Rows(), []
        with progress(size, "merge: reading", "B") as bar:
            for source in sources:
                tallies.append(_read(source, rows, spool, rules, vocab_size, limit, bar))
        if not len(rows):
            skipped = sum(tally.skipped.total() for tally in tallies)
            raise UserError(f"the merge keeps no record of {len(sources)} datasets ({skipped} skipped); run the audit")
        order = rows.order(seed)
        report = {
            "schema": 1, "seed": seed, "max_seq_len": max_seq_len, "masks": masks, "limit": limit,
            "exclude": list(exclude), "vocab_size": vocab_size, "sources": [tally.to_json() for tally in tallies],
            **_totals(tallies), "order_hash": rows.order_hash(order), "corpus_hash": rows.corpus_hash(order),
        }
        _write(rows, order, spool, out_dir, report)
    return report


def accounting_lines(report: dict) -> list[str]:
    """The merge's account: a line a source and the total."""
    return deciding.accounting_lines(report["sources"])


def account(report: dict) -> list[dict]:
    """A row a source, for a table: lines read = records + skipped."""
    return [{"source": source["name"], "lines read": source["lines"], "records": source["records"],
             "skipped": sum(source["skipped"].values()), "tokens": source["tokens"], "supervised": source["supervised"],
             "rows cut": source["truncated_records"], "tokens cut off": source["truncated_tokens"]}
            for source in report["sources"]]


def skipped(report: dict) -> list[dict]:
    """A row a source and reason, for a table."""
    found = [{"source": source["name"], "reason": reason, "rows": count}
             for source in report["sources"] for reason, count in source["skipped"].items()]
    return found or [{"source": "all", "reason": "no row was skipped", "rows": 0}]


def mix(index: pd.DataFrame, slices: int = 20) -> pd.DataFrame:
    """Percent of the tokens by source (columns) in each slice of the training order (index: its middle, in percent)."""
    slices = max(1, min(slices, len(index) // 50))  # fewer rows a slice would show chance, not the shuffle
    slice_of = np.arange(len(index)) * slices // len(index)
    tokens = index.groupby([slice_of, index["source"]], observed=False)["tokens"].sum().unstack(fill_value=0)
    tokens.index = (tokens.index + 0.5) * 100 / slices
    return 100 * tokens.div(tokens.sum(axis=1), axis=0)


def against_forecast(report: dict, plan_path: str | Path) -> str:
    """A sentence on how the merge compares with the audit's forecast in plan.json.

    Raises UserError where the audit looked at the same sources under the same rules and yet foretold other counts.
    """
    forecast = (read_json(plan_path) if Path(plan_path).is_file() else {}).get("forecast")
    if not forecast:
        return "The audit has left no forecast to compare with."
    for name, value in forecast["settings"].items():
        if report[name] != value:
            return f"The audit's forecast was made with another {name}; there is nothing to compare."
    if forecast["sources"] != report["sources"]:
        pairs = zip(forecast["lines"], accounting_lines(report), strict=False)
        told, found = next((pair for pair in pairs if pair[0] != pair[1]), ("other skips or masks", "these"))
        raise UserError(f"the merge is not what the audit foretold: {told.strip()!r}, but {found.strip()!r}; "
                        "the data changed in between: run the audit again")
    return "Every line is as the audit foretold."


def _totals(tallies: list[Tally]) -> dict:
    skipped = sum((tally.skipped for tally in tallies), Counter())
    masks = sum((tally.masks for tally in tallies), Counter())
    names = ("records", "tokens", "supervised", "teacher_positions", "truncated_records", "truncated_tokens")
    return {**{name: sum(getattr(tally, name) for tally in tallies) for name in names},
            "skipped": dict(sorted(skipped.items())), "provenance": dict(sorted(masks.items()))}


class Rows:
    """What pass 1 notes of every kept row: 130 bytes a row, columns in arrival order."""

    COLUMNS = ("source", "file", "line", "at", "place", "bytes", "tokens", "supervised", "teachers", "truncated")

    def __init__(self):
        self.columns = {name: array("q") for name in self.COLUMNS}
        self.ids_hash, self.mask_hash, self.line_hash = bytearray(), bytearray(), array("Q")
        self.sources: list[str] = []
        self.files: list[str] = []
        self.paths: list[Path] = []  # opened for reading in place

    def __len__(self) -> int:
        return len(self.line_hash)

    def add(self, record: Record, made: Decision, line: bytes, place: int, at: int) -> None:
        """`place` is an index of `paths` or SPOOL, `at` the byte where the line begins there."""
        values = (len(self.sources) - 1, len(self.files) - 1, record.line, at, place, len(line), len(made.ids),
                  made.supervised, len(teacher_positions(made.mask)), made.truncated)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        self.ids_hash += ids_hash(made.ids)
        self.mask_hash += xxhash.xxh3_64_digest(made.mask.tobytes())
        self.line_hash.append(xxhash.xxh3_64_intdigest(line))

    def order(self, seed: int) -> np.ndarray:
        """int64[R]: rows in training order. Equal rows are told apart by their occurrence, so they spread too."""
        high, low = np.frombuffer(self.ids_hash, ">u8").reshape(-1, 2).T
        lines = np.frombuffer(self.line_hash, np.uint64)
        grouped = np.lexsort((lines, low, high))
        fresh = np.ones(len(self), bool)
        fresh[1:] = (high[grouped][1:] != high[grouped][:-1]) | (low[grouped][1:] != low[grouped][:-1])
        first = np.maximum.accumulate(np.where(fresh, np.arange(len(self)), 0))
        occurrence = np.empty(len(self), np.int64)
        occurrence[grouped] = np.arange(len(self)) - first
        parts = (bytes(self.ids_hash[16 * i:16 * i + 16]) + int(n).to_bytes(8, "little")
                 for i, n in enumerate(occurrence))
        keys = np.array([xxhash.xxh3_64_intdigest(part, seed % (1 << 64)) for part in parts], np.uint64)
        return np.lexsort((low, high, keys))

    def order_hash(self, order: np.ndarray) -> str:
        """xxh3-128 over the rows' id hashes as they are ordered."""
        return xxhash.xxh3_128_hexdigest(np.frombuffer(self.ids_hash, "V16")[order].tobytes())

    def corpus_hash(self, order: np.ndarray) -> str:
        """xxh3-128 over the ordered id hashes, then the ordered mask hashes."""
        return corpus_hash(np.frombuffer(self.ids_hash, "V16")[order].tobytes(),
                           np.frombuffer(self.mask_hash, "V8")[order].tobytes())

    def frame(self, order: np.ndarray) -> pd.DataFrame:
        """index.parquet: a row a record, in training order."""
        column = {name: np.frombuffer(values, np.int64)[order] for name, values in self.columns.items()}
        ends = np.cumsum(column["bytes"] + 1)
        frame = pd.DataFrame({
            "source": pd.Categorical.from_codes(column["source"], self.sources),
            "file": pd.Categorical.from_codes(column["file"], self.files),
            "line": column["line"], "offset": ends - column["bytes"] - 1, "bytes": column["bytes"]})
        for name, values in (("tokens", "tokens"), ("supervised", "supervised"), ("teacher_positions", "teachers"),
                             ("truncated", "truncated")):
            frame[name] = column[values].astype(np.int32)
        frame["xxh3"] = [bytes(self.ids_hash[16 * i:16 * i + 16]).hex() for i in order]
        frame["mask_xxh3"] = [bytes(self.mask_hash[8 * i:8 * i + 8]).hex() for i in order]
        return frame


def ids_hash(ids: np.ndarray) -> bytes:
    """xxh3-128 of the ids as little-endian int32, 16 bytes."""
    return xxhash.xxh3_128_digest(ids.astype("<i4").tobytes())


def corpus_hash(ids_hashes: bytes, mask_hashes: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(ids_hashes + mask_hashes)


def _spool(out_dir: Path):
    """A file without a name: gone with this process, however it ends."""
    return tempfile.TemporaryFile(dir=out_dir, buffering=1 << 20)


def _read(source: Source, rows: Rows, spool, rules: Rules, vocab_size: int, limit: int, bar) -> Tally:
    """Pass 1 over one source."""
    tally, number = Tally(source.name), 0
    rows.sources.append(source.name)
    for item in read_records(source, vocab_size=vocab_size, tokenizer=rules.tokenizer, limit=limit, bar=bar):
        if isinstance(item, Fault):
            tally.skip(item.rule)
            continue
        number += 1
        made = decide(item, number, rules)
        tally.add(made)
        if made.reason:
            continue
        if not rows.files or rows.files[-1] != item.file:
            rows.files.append(item.file)
            rows.paths.append(source.path / item.file.removeprefix(f"{source.name}/"))
        line = line_of(item, made)
        if item.offset is not None and line is item.raw and len(rows.paths) <= OPEN_FILES:
            rows.add(item, made, line, len(rows.paths) - 1, item.offset)
        else:
            rows.add(item, made, line, SPOOL, _keep(spool, line))
    return tally


def _keep(spool, line: bytes) -> int:
    """Append the line to the spool; returns where it begins."""
    at = spool.tell()
    try:
        spool.write(line)
    except OSError as error:
        raise UserError(f"cannot merge: {error.strerror}; free space or choose another work_dir") from error
    return at


def _flush(spool) -> None:
    try:
        spool.flush()
    except OSError as error:
        raise UserError(f"cannot merge: {error.strerror}; free space or choose another work_dir") from error


def line_of(record: Record, made: Decision) -> bytes:
    """The merged line: the row's own bytes where ids and mask stand as they were, else written anew.

    A row that is cut loses its text, which no longer says what its ids say; lists a token long are cut with it.
    """
    if record.plain and not made.truncated and np.array_equal(made.mask, record.mask):
        return record.raw
    row = orjson.loads(record.raw)
    rest = {key: value for key, value in row.items()
            if key not in ("id", "source", "input_ids", "loss_mask", "prompt_ids", "response_ids")}
    if made.truncated:
        length = len(record.ids)
        rest = {key: value[:len(made.ids)] if isinstance(value, list) and len(value) == length else value
                for key, value in rest.items() if key not in TEXT_KEYS}
    head = {key: row[key] for key in ("id", "source") if key in row}
    made_row = {**head, "input_ids": made.ids, "loss_mask": made.mask, **rest}
    return orjson.dumps(made_row, option=orjson.OPT_SERIALIZE_NUMPY)


def _write(rows: Rows, order: np.ndarray, spool, out_dir: Path, report: dict) -> None:
    """Pass 2. Index and report are renamed into place after the rows; `report` gets the files' hashes."""
    size = np.frombuffer(rows.columns["bytes"], np.int64)
    total = int(size.sum()) + len(rows)
    free = disk_free(out_dir)
    if total > free:
        raise UserError(f"{shown(out_dir)}: {ROWS} needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; make room")
    _flush(spool)
    handles = {SPOOL: spool.fileno()}
    handles |= {i: os.open(path, os.O_RDONLY) for i, path in enumerate(rows.paths[:OPEN_FILES])}
    packed = io.BytesIO()
    rows.frame(order).to_parquet(packed, index=False)
    try:
        with atomic_write(out_dir / REPORT, "wb") as last, atomic_write(out_dir / INDEX, "wb") as index:
            with atomic_write(out_dir / ROWS, "wb") as out, progress(total, "merge: writing", "B") as bar:
                digest = xxhash.xxh3_128()
                for i in order:
                    line = os.pread(handles[rows.columns["place"][i]], size[i], rows.columns["at"][i]) + b"\n"
                    out.write(line)
                    digest.update(line)
                    bar.advance(len(line))
            index.write(packed.getvalue())
            report |= {"bytes": total, "merged_xxh3": digest.hexdigest(),
                       "index_xxh3": xxhash.xxh3_128_hexdigest(packed.getvalue())}
            last.write(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    finally:
        for place, handle in handles.items():
            if place != SPOOL:
                os.close(handle)


def verify(out_dir: str | Path) -> dict:
    """Read merged.jsonl back: every row against the index (order, ids, mask, counts), all of it against merge.json.

    Returns {records, tokens, supervised, corpus_hash}. Raises UserError at the first disagreement.
    """
    corpus = Corpus.open(out_dir)
    ids_hashes, mask_hashes, tokens, supervised = bytearray(), bytearray(), 0, 0
    with open(Path(out_dir) / ROWS, "rb") as handle, progress(len(corpus), "merge: verifying", "rows") as bar:
        for i, row in enumerate(corpus.index.itertuples(index=False)):
            line = handle.readline()
            try:
                record = orjson.loads(line)
                ids, mask = np.asarray(record["input_ids"], np.int32), np.asarray(record["loss_mask"], np.uint8)
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{ROWS} row {i} is broken ({error}); run the merge again") from None
            hashes = ids_hash(ids), xxhash.xxh3_64_digest(mask.tobytes())
            counts = len(ids), int(mask.sum()), len(line) - 1
            noted = row.xxh3, row.mask_xxh3, row.tokens, row.supervised, row.bytes
            if (*(value.hex() for value in hashes), *counts) != noted or len(mask) != len(ids):
                raise UserError(f"{ROWS} row {i} is not {row.file} line {row.line}, as its index says; merge again")
            ids_hashes += hashes[0]
            mask_hashes += hashes[1]
            tokens, supervised = tokens + counts[0], supervised + counts[1]
            bar.advance(1)
        if handle.read(1):
            raise UserError(f"{ROWS} holds rows that the index does not; run the merge again")
    found = {"records": len(corpus), "tokens": tokens, "supervised": supervised,
             "corpus_hash": corpus_hash(bytes(ids_hashes), bytes(mask_hashes))}
    for name, value in found.items():
        if corpus.report[name] != value:
            raise UserError(f"{ROWS} read back gives {name} {value}, {REPORT} says {corpus.report[name]}; merge again")
    return found
