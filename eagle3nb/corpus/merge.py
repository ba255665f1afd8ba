"""Merge: every dataset into one globally shuffled corpus, in memory that does not grow with the text.

Pass 1 reads every row in parallel, decides it and notes where its bytes lie; `selection` says which rows are written
and in what order; pass 2 writes them, in parallel too. Rows that need no change are copied as bytes; the others, and
what comes out of compressed files, wait in files beside the output.

The output is a folder that changes places with the old one in one step, so that there is one or the other.
"""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson
import xxhash

from eagle3nb.corpus import accounts
from eagle3nb.corpus.decision import REASONS, Rules
from eagle3nb.corpus.masks import Markers
from eagle3nb.corpus.merged import INDEX, REJECTED, REPORT, ROWS, vocabulary_hash
from eagle3nb.corpus.overlap import Needles
from eagle3nb.corpus.passes import Block, FirstPass, first_pass, write_block
from eagle3nb.corpus.records import Source
from eagle3nb.corpus.rows import Rows
from eagle3nb.corpus.scan import Pool, file_name, named_files, pool_of, processes_for, scan
from eagle3nb.corpus.selection import Mix, Selection, select
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, disk_free, fresh_folder, replace_folder, shown, write_json
from eagle3nb.progress import progress

BLOCK = 16 << 20  # bytes of merged.jsonl that one task writes


def merge(sources: list[Source], out_dir: str | Path, *, max_seq_len: int, seed: int, vocab_size: int,
          markers: Markers | None, tokenizer=None, masks: str = "own", truncation: str = "right", limit: int = 0,
          exclude=(), include=(), mix: Mix | None = None, needles: Needles | None = None, processes: int = 0) -> dict:
    """Write merged.jsonl, index.parquet, rejected.jsonl and merge.json into `out_dir`; returns merge.json's content.

    Raises UserError where nothing is left to train on, or where the disk is full; then the old files stand.
    """
    rules, out_dir, mix = Rules(max_seq_len, masks, markers, tokenizer, truncation), Path(out_dir), mix or Mix()
    names = [source.name for source in sources]
    mix.check(names)
    size = sum(source.bytes for source in sources)
    with _disk(out_dir), fresh_folder(out_dir) as folder:
        (folder / "spool").mkdir()
        shared = FirstPass(rules, str(folder / "spool"), mix.dedup == "near", needles)
        with pool_of(processes_for(size, processes), shared) as pool:
            rows, tallies = _read(sources, folder, pool, vocab_size, limit)
            chosen = select(rows, mix, names, seed)
            _note_removed(folder, rows, chosen, names)
            accounts.fill(tallies, rows, chosen)
            if not len(chosen.rows):
                skipped = sum(tally.skipped.total() for tally in tallies)
                raise UserError(f"the merge keeps no record of {len(sources)} datasets ({skipped} skipped); "
                                "run the audit")
            with ThreadPoolExecutor(1) as beside:
                index = beside.submit(_index, folder, rows, chosen, names)
                digest = _write(folder, rows, chosen, pool)
                index.result()
        report = {
            "schema": 2, "seed": seed, "max_seq_len": max_seq_len, "masks": masks, "truncation": truncation,
            "limit": limit, "exclude": list(exclude), "include": list(include), **vars(mix),
            "decontaminate": sorted(set(needles.benchmarks)) if needles else [], "vocab_size": vocab_size,
            "tokenizer": vocabulary_hash(tokenizer) if tokenizer else None,
            "sources": [tally.to_json() for tally in tallies], **accounts.totals(tallies),
            "validation": accounts.validation(rows, chosen), "order_hash": rows.order_hash(chosen.rows),
            "corpus_hash": rows.corpus_hash(chosen.rows), "bytes": (folder / ROWS).stat().st_size,
            "lines_xxh3": digest, "index_xxh3": accounts.xxh3_file(folder / INDEX),
            "rejected_xxh3": accounts.xxh3_file(folder / REJECTED)}
        write_json(folder / REPORT, report)
        shutil.rmtree(folder / "spool")
        replace_folder(folder, out_dir, {ROWS, INDEX, REJECTED, REPORT})
    return report


@contextmanager
def _disk(out_dir: Path):
    """A full disk in one line, whichever process met it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot merge into {shown(out_dir)}: {error.strerror or error}; free space or choose another "
                        "work_dir") from error


# ------------------------------------------------------------------------------------------------------- first pass


def _read(sources: list[Source], folder: Path, pool: Pool, vocab_size: int, limit: int):
    """(Rows, a Tally a source); what is not kept goes to rejected.jsonl as it is met."""
    tallies = [accounts.Tally(source.name) for source in sources]
    rows = Rows(named_files(sources))
    with open(folder / REJECTED, "wb") as rejected:
        for found in scan(sources, first_pass, pool, vocab_size=vocab_size, limit=limit, what="merge: reading"):
            part, tally, source = found.value, tallies[found.source], sources[found.source]
            place = {"source": source.name, "file": file_name(source, found.file)}
            for line, rule, detail in part.faults:
                rejected.write(_json(place | {"line": found.line(line), "reason": rule, "detail": detail}))
            for line, reason in zip(*(column.tolist() for column in part.skipped), strict=True):
                rejected.write(_json(place | {"line": found.line(line), "reason": REASONS[reason]}))
            tally.take(part.faults, part.skipped[1], part.checks)
            rows.add(found.source, found.file, found.before, part)
    rows.close()
    return rows, tallies


def _index(folder: Path, rows: Rows, chosen: Selection, names: list[str]) -> None:
    """index.parquet, beside the second pass."""
    from eagle3nb.corpus.index import write_index  # pandas and pyarrow: a third of a second

    with atomic_write(folder / INDEX, "wb") as handle:
        write_index(handle, rows, chosen, names)


def _note_removed(folder: Path, rows: Rows, chosen: Selection, names: list[str]) -> None:
    """What the selection takes out, in rejected.jsonl too; then it is whole."""
    with open(folder / REJECTED, "ab") as rejected:
        for reason, which in chosen.removed:
            columns = (rows.columns[name][which].tolist() for name in ("source", "file", "line"))
            for source, file, line in zip(*columns, strict=True):
                rejected.write(_json({"source": names[source], "file": rows.files[file][1], "line": line,
                                      "reason": reason}))
        rejected.flush()
        os.fsync(rejected.fileno())


def _json(value: dict) -> bytes:
    return orjson.dumps(value) + b"\n"


# ------------------------------------------------------------------------------------------------------ second pass


def _write(folder: Path, rows: Rows, chosen: Selection, pool: Pool) -> str:
    """merged.jsonl; returns xxh3-128 over the lines' hashes in their order."""
    size = rows.columns["bytes"][chosen.rows]
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(size + 1)])
    total, free = int(begins[-1]), disk_free(folder)
    if total > free:
        raise UserError(f"{shown(folder.parent)}: {ROWS} needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
                        "make room or choose another work_dir")
    cuts = np.searchsorted(begins, np.arange(0, total + BLOCK, BLOCK))
    with open(folder / ROWS, "wb") as out, progress(total, "merge: writing", "B") as bar:
        out.truncate(total)
        tasks = (_block(out.name, rows, chosen.rows[a:b], int(begins[a]))
                 for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a)
        with _flushing(out.fileno()):
            for _ in pool.map(write_block, tasks, bar.advance):
                pass
        os.fsync(out.fileno())
    return xxhash.xxh3_128_hexdigest(rows.line_hash[chosen.rows].astype("<u8").tobytes())


def _block(out: str, rows: Rows, which: np.ndarray, begin: int) -> Block:
    places, place = np.unique(rows.columns["place"][which], return_inverse=True)
    return Block(out, begin, [str(rows.paths[p]) for p in places], place, rows.columns["at"][which],
                 rows.columns["bytes"][which], rows.line_hash[which])


@contextmanager
def _flushing(handle: int):
    """The disk writes while the processes still copy: else it would only begin with the last fsync."""
    done, failed = threading.Event(), []

    def flush():
        while not failed and not done.wait(0.05):
            try:
                os.fdatasync(handle)
            except OSError as error:  # the system tells it once: the last fsync would know nothing of it
                failed.append(error)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]
