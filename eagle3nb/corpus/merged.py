"""The merged corpus, as every later stage reads it.

    corpus = Corpus.open(stage.paths.corpus)
    ids, mask = corpus.row(0)          # int32[T], uint8[T]; the training order is the row order
"""

import os
from pathlib import Path

import numpy as np
import orjson
import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown, xxh3_file

ROWS, INDEX, REJECTED, REPORT = "merged.jsonl", "index.parquet", "rejected.jsonl", "merge.json"


def vocabulary_hash(tokenizer) -> str:
    """xxh3-128 over every token and its id, added ones included: equal ids, equal text."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return xxhash.xxh3_128_hexdigest(orjson.dumps(pairs))


class Corpus:
    """merged.jsonl with its index; rows are read one at a time, so memory does not grow with the corpus.

    index   DataFrame, a row a record: source, file, line, offset, bytes, tokens, supervised, teacher_positions,
            truncated (tokens cut off), copy (0: the row itself), validation, xxh3 (of the ids' int32 bytes), mask_xxh3
    report  merge.json
    hash    over the ordered hashes of ids and masks: the content and the order, not how the lines are spelt
    """

    def __init__(self, folder: Path, index, report: dict):
        self.folder, self.index, self.report = folder, index, report
        self.hash: str = report["corpus_hash"]
        self.tokens, self.supervised = int(index["tokens"].sum()), int(index["supervised"].sum())
        self.vocab_size: int = report["vocab_size"]
        self.tokenizer: str | None = report.get("tokenizer")  # vocabulary_hash; None: merged without a tokenizer
        self.lengths = index["tokens"].to_numpy(np.int64)  # int64[R]
        self._offsets, self._bytes = index["offset"].to_numpy(), index["bytes"].to_numpy()
        self._handle = os.open(folder / ROWS, os.O_RDONLY)

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Raises UserError where the merge has not run, or where the three files are not of one merge."""
        folder = Path(folder)
        report = read_json(folder / REPORT)
        for name in (ROWS, INDEX):
            if not (folder / name).is_file():
                raise UserError(f"{shown(folder / name)} does not exist; run the merge again")
        if (folder / ROWS).stat().st_size != report["bytes"] or xxh3_file(folder / INDEX) != report["index_xxh3"]:
            raise UserError(f"{shown(folder)} holds files of different merges; run the merge again")
        import pandas as pd  # here: what merges needs these names and no table yet

        return cls(folder, pd.read_parquet(folder / INDEX), report)

    def __len__(self) -> int:
        return len(self.index)

    def __del__(self, close=os.close):  # bound here: at the end of the process `os` may be gone
        if hasattr(self, "_handle"):
            close(self._handle)

    def line(self, i: int) -> bytes:
        """Row i as it stands in merged.jsonl, without the line break."""
        return os.pread(self._handle, int(self._bytes[i]), int(self._offsets[i]))

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[T], mask uint8[T]) of row i."""
        record = orjson.loads(self.line(i))
        return np.asarray(record["input_ids"], np.int32), np.asarray(record["loss_mask"], np.uint8)
