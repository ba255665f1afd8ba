"""index.parquet, written. Apart from the rest of the merge, which starts in half the time without pandas."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3nb.corpus.accounts import COUNTS
from eagle3nb.corpus.rows import Rows
from eagle3nb.corpus.selection import Selection

GROUP = 1 << 16  # rows of a row group


def write_index(handle, rows: Rows, chosen: Selection, names: list[str]) -> None:
    """index.parquet: a row a record, in the order of merged.jsonl; made and written some at a time."""
    begin, writer = 0, None
    for first in range(0, len(chosen.rows), GROUP):
        frame = _index(rows, chosen, names, first, begin)
        table = pa.Table.from_pandas(frame, preserve_index=False)
        writer = writer or pq.ParquetWriter(handle, table.schema)
        writer.write_table(table)
        begin = int(frame["offset"].iloc[-1] + frame["bytes"].iloc[-1] + 1)
    if writer:
        writer.close()


def _index(rows: Rows, chosen: Selection, names: list[str], first: int, begin: int) -> pd.DataFrame:
    """GROUP rows of the index from row `first` on, whose line begins at byte `begin`."""
    some = slice(first, first + GROUP)
    which = chosen.rows[some]
    column = {name: values[which] for name, values in rows.columns.items()}
    ends = begin + np.cumsum(column["bytes"] + 1)
    frame = pd.DataFrame({
        "source": pd.Categorical.from_codes(column["source"], names),
        "file": pd.Categorical.from_codes(column["file"], [name for _, name, _ in rows.files]),
        "line": column["line"], "offset": ends - column["bytes"] - 1, "bytes": column["bytes"]})
    for name, values in (*COUNTS.items(), ("truncated", "truncated")):
        frame[name] = column[values].astype(np.int32)
    frame["copy"] = chosen.copy[some].astype(np.int32)
    frame["validation"] = np.arange(first, first + len(frame)) >= len(chosen.rows) - chosen.held
    frame["xxh3"], frame["mask_xxh3"] = _hex(rows.ids_hash[which]), _hex(rows.mask_hash[which])
    return frame


def _hex(hashes: np.ndarray):
    """Strings of V16[R] or V8[R], without a Python object for each."""
    width = 2 * hashes.itemsize
    offsets = np.arange(0, width * len(hashes) + 1, width, dtype=np.int64)
    return pd.array(pa.LargeStringArray.from_buffers(
        len(hashes), pa.py_buffer(offsets), pa.py_buffer(hashes.tobytes().hex().encode())), dtype="str")
