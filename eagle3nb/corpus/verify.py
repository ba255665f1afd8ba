"""The merged corpus read back: is the file what its index and its report say, and do the books balance?"""

from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import xxhash

from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.merged import INDEX, REJECTED, REPORT, ROWS, Corpus
from eagle3nb.corpus.passes import Reading, read_back
from eagle3nb.corpus.records import Source
from eagle3nb.corpus.rows import corpus_hash
from eagle3nb.corpus.scan import pool_of, processes_for, scan
from eagle3nb.errors import UserError
from eagle3nb.files import shown, xxh3_file


def verify(out_dir: str | Path, processes: int = 0) -> dict:
    """Read merged.jsonl back: every row against the index (order, ids, mask, counts), every byte and all of the index
    and of rejected.jsonl against merge.json.

    Returns {records, tokens, supervised, corpus_hash, lines_xxh3}. Raises UserError at the first disagreement.
    """
    corpus = Corpus.open(out_dir)
    _books(corpus)
    path, seen, hashes = Path(out_dir) / ROWS, 0, {"xxh3": bytearray(), "mask_xxh3": bytearray()}
    source, lines = Source("corpus", path.parent, (path,)), xxhash.xxh3_128()
    with pool_of(processes_for(path.stat().st_size, processes), Reading(Rules(1 << 40))) as pool:
        for found in scan([source], read_back, pool, vocab_size=corpus.vocab_size, what="merge: verifying"):
            lines.update(np.array(found.value.pop("line"), "<u8"))
            rows = list(zip(*found.value.values(), strict=True))
            told = corpus.index.iloc[seen:seen + len(rows)]
            if len(told) < len(rows):
                raise UserError(f"{ROWS} holds rows that the index does not; run the merge again")
            told = zip(*(told[name].tolist() for name in found.value), strict=True)
            for row, (one, other) in enumerate(zip(rows, told, strict=True), seen):
                if one != other:
                    raise UserError(f"{_place(corpus, row)}; run the merge again")
            seen += len(rows)
            for name, values in hashes.items():
                values += bytes.fromhex("".join(found.value[name]))
    if seen != len(corpus) or not _ends(path):
        raise UserError(f"{ROWS} holds {seen} of {len(corpus)} rows, or its last line has no end; run the merge again")
    result = {"records": seen, "tokens": corpus.tokens, "supervised": corpus.supervised,
              "corpus_hash": corpus_hash(*map(bytes, hashes.values())), "lines_xxh3": lines.hexdigest()}
    for name, value in result.items():
        if corpus.report[name] != value:
            raise UserError(f"{ROWS} read back gives {name} {value}, {REPORT} says {corpus.report[name]}; merge again")
    return result


def _books(corpus: Corpus) -> None:
    """The index and rejected.jsonl against what merge.json says of every source."""
    index, report = corpus.index, corpus.report
    ends = np.cumsum(index["bytes"].to_numpy() + 1)
    held = np.arange(len(index)) >= report["validation"]["first_row"]
    lie = np.array_equal(index["offset"], ends - index["bytes"] - 1) and ends[-1] == report["bytes"]
    if not lie or not np.array_equal(index["validation"], held):
        raise UserError(f"{INDEX} does not say where the rows of {ROWS} lie; run the merge again")
    rejected = corpus.folder / REJECTED
    if not rejected.is_file() or xxh3_file(rejected) != report["rejected_xxh3"]:
        raise UserError(f"{shown(rejected)} is not what the merge wrote; run the merge again")
    removed: dict[str, Counter] = {source["name"]: Counter() for source in report["sources"]}
    with open(rejected, "rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            removed[row["source"]][row["reason"]] += 1
    for source in report["sources"]:
        mine = index[index["source"] == source["name"]]
        found = {"records": len(mine), "copies": int((mine["copy"] > 0).sum()),
                 "truncated_records": int((mine["truncated"] > 0).sum()),
                 "truncated_tokens": int(mine["truncated"].sum()),
                 **{name: int(mine[name].sum()) for name in ("tokens", "supervised", "teacher_positions")},
                 "skipped": dict(removed[source["name"]])}
        for name, value in found.items():
            if source[name] != value:
                raise UserError(f"{source['name']}: {INDEX} and {REJECTED} hold {name} {value}, {REPORT} says "
                                f"{source[name]}; run the merge again")


def _ends(path: Path) -> bool:
    with open(path, "rb") as handle:
        handle.seek(-1, 2)
        return handle.read() == b"\n"


def _place(corpus: Corpus, row: int) -> str:
    told = corpus.index.iloc[row]
    return f"{ROWS} row {row} is not {told['file']} line {told['line']}, as its index says"
