"""verify: whatever changed in a corpus is found and told in one line."""

import json
import random

import pandas as pd
import pytest

from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.selection import Mix
from eagle3nb.corpus.verify import verify
from eagle3nb.errors import UserError
from eagle3nb.files import xxh3_file


@pytest.fixture
def corpus(tmp_path, write):
    """A corpus of 16 rows with copies, a validation part, rows that are cut and lines that are none."""
    rng = random.Random(5)
    for name in ("A", "B"):
        rows = [{"id": f"{name}{i}", "input_ids": [rng.randrange(50) for _ in range(8)], "loss_mask": [0] * 3 + [1] * 5}
                for i in range(8)]
        write(tmp_path / f"in/{name}/rows.jsonl", [*rows, rows[0], b"{", {"input_ids": [1, 2], "loss_mask": [0, 0]}])
    merge(find_sources(tmp_path / "in"), tmp_path / "corpus", max_seq_len=7, seed=3, vocab_size=50, markers=None,
          mix=Mix(weights={"A": 2}, validation_share=0.2))
    return tmp_path / "corpus"


def test_a_corpus_that_is_whole(corpus):
    report = json.loads((corpus / "merge.json").read_bytes())
    found = verify(corpus)
    assert found == {name: report[name] for name in ("records", "tokens", "supervised", "corpus_hash", "lines_xxh3")}
    assert report["copies"] > 2 and report["validation"]["records"] and report["truncated_tokens"]
    assert len(report["skipped"]) == 3


@pytest.mark.parametrize("name", ["merged.jsonl", "rejected.jsonl", "index.parquet"])
def test_a_flipped_bit_anywhere(corpus, name):
    path, rng = corpus / name, random.Random(0)
    data = path.read_bytes()
    places = range(len(data)) if name == "rejected.jsonl" else rng.sample(range(len(data)), 150)
    for at in [*places, len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:])
        with pytest.raises(UserError) as error:
            verify(corpus)
        assert "\n" not in str(error.value) and "merge" in str(error.value)
    path.write_bytes(data)
    verify(corpus)


@pytest.mark.parametrize("edit", [
    lambda lines: [lines[1], lines[0], *lines[2:]], lambda lines: lines[:-1], lambda lines: [*lines, lines[0]],
    lambda lines: [*lines[:-1], lines[-1][:-1] + b" "], lambda lines: [*lines[:-1], lines[-1][:-1]],
    lambda lines: [], lambda lines: [b"\n", *lines],
    lambda lines: [lines[0].replace(b'"A', b'"Z').replace(b'"B', b'"Z'), *lines[1:]]])
@pytest.mark.parametrize("size_too", [False, True])
def test_rows_that_are_swapped_lost_doubled_or_respelled(corpus, edit, size_too):
    path, report = corpus / "merged.jsonl", json.loads((corpus / "merge.json").read_bytes())
    lines = path.read_bytes().splitlines(keepends=True)
    data = b"".join(edit(lines))
    assert data != b"".join(lines)
    path.write_bytes(data)
    if size_too:  # even where merge.json was made to agree with the file's size
        (corpus / "merge.json").write_text(json.dumps(report | {"bytes": len(data)}))
    with pytest.raises(UserError, match="merge"):
        verify(corpus)


@pytest.mark.parametrize("name", ["merged.jsonl", "index.parquet", "rejected.jsonl", "merge.json"])
def test_a_file_that_is_missing_or_cut_short(corpus, name):
    data = (corpus / name).read_bytes()
    for rest in (data[:-1], data[:len(data) // 2], b"", None):
        (corpus / name).write_bytes(rest) if rest is not None else (corpus / name).unlink()
        if name == "merge.json" and rest == data[:-1]:
            continue  # the line break after it
        with pytest.raises(UserError):
            verify(corpus)


@pytest.mark.parametrize(("column", "words"), [
    ("offset", "where the rows"), ("validation", "where the rows"), ("bytes", "where the rows"),
    ("tokens", "hold tokens"),
    ("supervised", "hold supervised"), ("teacher_positions", "hold teacher_positions"),
    ("truncated", "hold truncated_tokens"), ("copy", "hold copies"), ("xxh3", "merged.jsonl row 0 is not"),
    ("mask_xxh3", "merged.jsonl row 0 is not"), ("source", "hold records")])
def test_an_index_that_is_wrong_though_merge_json_vouches_for_it(corpus, column, words):
    index, report = pd.read_parquet(corpus / "index.parquet"), json.loads((corpus / "merge.json").read_bytes())
    value, *rest = index[column].tolist()
    other = {"validation": lambda: not value, "source": lambda: "A" if value == "B" else "B",
             "copy": lambda: 0 if value else 1, "xxh3": lambda: value[::-1], "mask_xxh3": lambda: value[::-1]}
    wrong = pd.Series([other.get(column, lambda: value + 1)(), *rest])
    index[column] = wrong.astype("category") if column == "source" else wrong.astype(index[column].dtype)
    index.to_parquet(corpus / "index.parquet", index=False)
    report["index_xxh3"] = xxh3_file(corpus / "index.parquet")
    (corpus / "merge.json").write_text(json.dumps(report))
    Corpus.open(corpus)
    with pytest.raises(UserError, match=words):
        verify(corpus)


def test_books_that_do_not_balance(corpus):
    report = json.loads((corpus / "merge.json").read_bytes())
    for name in ("records", "copies", "tokens", "truncated_records", "skipped"):
        value = report["sources"][1][name]
        wrong = report["sources"][1] | {name: {} if name == "skipped" else value + 1}
        (corpus / "merge.json").write_text(json.dumps(report | {"sources": [report["sources"][0], wrong]}))
        with pytest.raises(UserError, match=f"B: index.parquet and rejected.jsonl hold {name} "):
            verify(corpus)
