"""The two readers of a line held to each other, chunks held to whole files, processes to none."""

import gzip
import json
import random

import numpy as np
import orjson
import pytest
import simdjson
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.batch import _fast, batches
from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.lines import Chunk, chunks
from eagle3nb.corpus.passes import Reading, read_back
from eagle3nb.corpus.records import Unusable, find_sources, tokens
from eagle3nb.corpus.scan import pool_of, read_records, scan

V = 50
number = st.one_of(st.integers(-2, V + 1), st.integers(0, V - 1),
                   st.sampled_from([0, 1, 2**31, 2**63, 2**64, 0.0, 1.5]))
value = st.one_of(st.none(), st.booleans(), number, st.text(max_size=3))
flat = st.lists(st.integers(0, V - 1), max_size=6)
bits = st.lists(st.integers(0, 1), max_size=6)
lists = st.one_of(flat, bits, st.lists(value, max_size=4), st.lists(flat, max_size=2), value)
keys = st.sampled_from(["input_ids", "loss_mask", "id", "source", "messages", "prompt_ids", "response_ids", "x"])
pairs = st.lists(st.tuples(keys, lists), max_size=5)
likely = st.integers(1, 6).flatmap(lambda n: st.tuples(
    st.lists(st.integers(0, V - 1), min_size=n, max_size=n), st.lists(st.integers(0, 1), min_size=n, max_size=n))).map(
        lambda both: [("input_ids", both[0]), ("loss_mask", both[1])])


def spelt(items, spaces: str) -> bytes:
    """A JSON object that may hold a key twice."""
    body = ",".join(f"{json.dumps(key)}{spaces}:{spaces}{json.dumps(item)}" for key, item in items)
    return ("{" + spaces + body + "}").encode()


@given(st.one_of(pairs, likely, st.tuples(likely, pairs).map(lambda both: both[0] + both[1])),
       st.sampled_from(["", " ", "\t "]), st.sampled_from([b"", b"\xef\xbb\xbf", b"x", b"\x00"]), st.booleans())
def test_what_the_fast_reader_takes_is_what_the_exact_one_reads(items, spaces, stray, before):
    line = spelt(items, spaces)
    line = stray + line if before else line + stray
    fast = _fast(simdjson.Parser(), line, V)
    try:
        ids, mask, plain, _ = tokens(line, V)
    except Unusable:
        assert fast is None
        return
    if fast is None:
        return
    assert fast[0].tolist() == ids.tolist() and fast[2] and plain
    assert (fast[1] is None) == (mask is None) and (mask is None or fast[1].tolist() == mask.tolist())


def test_ordinary_rows_take_the_fast_way():
    for row in ({"input_ids": [1, 2], "loss_mask": [0, 1]}, {"id": "a", "input_ids": [3]},
                {"input_ids": [1, 2], "loss_mask": [0, 1], "messages": [{"role": "user", "content": "é\n"}]}):
        assert _fast(simdjson.Parser(), json.dumps(row).encode(), V) is not None


def some_lines(rng: random.Random, count: int) -> list[bytes]:
    lines = []
    for i in range(count):
        n = rng.randint(1, 30)
        row = {"id": f"é{i}", "input_ids": [rng.randrange(V) for _ in range(n)], "loss_mask": [rng.randint(0, 1)] * n}
        lines.append(rng.choice([b"", b"  ", b"{", json.dumps(row).encode(), b" " + json.dumps(row).encode() + b"\r",
                                 json.dumps(row, ensure_ascii=False).encode(), orjson.dumps(row)]))
    return lines


def flattened(chunk_list, **options):
    """[(file, line in the file, ids, mask, raw) or (file, line, rule)] of chunks read in order."""
    found, before, last = [], 0, None
    for chunk in chunk_list:
        if chunk.file != last:
            before, last = 0, chunk.file
        breaks = 0
        for batch in batches(chunk, vocab_size=V, **options):
            breaks += batch.breaks
            for r in range(len(batch)):
                row = batch.row(r)
                found.append((chunk.file, before + int(batch.lines[r]), batch.ids[row].tolist(),
                              batch.mask[row].tolist(), batch.raws[r]))
                if batch.offsets[r] >= 0:
                    data = chunk.path.read_bytes()
                    assert data[batch.offsets[r]:batch.offsets[r] + len(batch.raws[r])] == batch.raws[r]
            found += [(chunk.file, before + line, rule) for line, rule, _ in batch.faults]
        before += breaks
    return sorted(found, key=lambda item: item[:2])


@pytest.mark.parametrize("last", [b"", b"\n"])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_size_give_the_lines_of_the_whole(tmp_path, seed, last):
    rng = random.Random(seed)
    files = []
    for f, pack in enumerate((bytes, gzip.compress, zstandard.ZstdCompressor().compress)):
        path = tmp_path / f"{f}.jsonl{('', '.gz', '.zst')[f]}"
        path.write_bytes(pack(b"\n".join(some_lines(rng, 40)) + last))
        files.append((0, f, path))
    whole = flattened(chunks(files))
    lines = [line for _, _, path in files for line in
             ({".gz": gzip.decompress, ".zst": zstandard.ZstdDecompressor().decompress}.get(path.suffix, bytes))(
                 path.read_bytes()).split(b"\n")]
    assert len(whole) == sum(bool(line.strip()) for line in lines)
    for size in (1, 7, 100, 1000):
        assert flattened(chunks(files, size=size)) == whole
        assert flattened(chunks(files, size=size), size=size) == whole
    for limit in (1, 3, 50, 1000):
        assert flattened(chunks(files, limit)) == whole[:limit]


def test_a_damaged_file_gives_what_comes_before_the_damage(tmp_path):
    packed = gzip.compress(b"".join(json.dumps({"input_ids": [i % V], "loss_mask": [1]}).encode() + b"\n"
                                    for i in range(20_000)), mtime=0)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[:len(packed) // 2])
    found = flattened([Chunk(0, 0, path, 0, len(packed))])
    *rows, fault = found
    assert fault[2] == "json_invalid" and len(rows) > 5_000 and fault[1] == len(rows)
    assert all(row[2] == [i % V] for i, row in enumerate(rows))
    assert flattened(chunks([(0, 0, path)], 10)) == rows[:10]


def test_processes_give_the_rows_and_line_numbers_of_one(tmp_path):
    rng = random.Random(1)
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_bytes(b"\n".join(some_lines(rng, 300)))
    sources, results = find_sources(tmp_path), []
    for processes in (1, 2):
        with pool_of(processes, Reading(Rules(1 << 40))) as pool:
            results.append([(found.source, found.file, found.before, found.value)
                            for found in scan(sources, read_back, pool, vocab_size=V)])
    assert results[0] == results[1]
    assert sum(len(value["tokens"]) for *_, value in results[0]) == sum(
        len(list(read_records(source, vocab_size=V))) for source in sources)


def test_no_rows_make_an_empty_batch(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n\n{\n")
    [batch] = batches(Chunk(0, 0, path, 0, 4), vocab_size=V)
    assert len(batch) == 0 and batch.starts.tolist() == [0] and len(batch.ids) == 0 and len(batch.faults) == 1
    assert np.diff(batch.starts).tolist() == []
