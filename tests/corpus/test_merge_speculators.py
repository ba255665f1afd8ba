"""merged.jsonl as the tokenised rows that speculators trains on: its loader (0.9.0) reads a JSON Lines file with
`datasets`, that is with Arrow's reader, and takes rows whose columns hold `input_ids` and `loss_mask` as they are."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.json
import pytest

from eagle3nb.corpus.masks import find_markers
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.selection import Mix


@pytest.fixture
def corpus(tmp_path, write, chatml):
    """Rows of every kind that the merge takes: bare, with text, of text alone, in two parts, with true and false."""
    rng = random.Random(0)
    rows = []
    for i in range(60):
        ids = [rng.randrange(300) for _ in range(rng.randint(4, 60))]
        mask = [0, 0] + [1] * (len(ids) - 2)
        text = [{"role": "user", "content": f"the question {i}"}, {"role": "assistant", "content": "owls sing"}]
        rows.append(rng.choice([
            {"id": f"r{i}", "input_ids": ids, "loss_mask": mask}, {"loss_mask": mask, "input_ids": ids, "score": 0.5},
            {"id": f"r{i}", "input_ids": ids, "loss_mask": mask, "messages": text}, {"id": f"r{i}", "messages": text},
            {"prompt_ids": ids[:2], "response_ids": ids[2:]},
            {"input_ids": ids, "loss_mask": [bool(bit) for bit in mask]}]))
    write(tmp_path / "in/A/rows.jsonl", rows[:40])
    write(tmp_path / "in/B/rows.jsonl.gz", rows[40:])
    report = merge(find_sources(tmp_path / "in"), tmp_path / "corpus", max_seq_len=40, seed=1, vocab_size=500,
                   markers=find_markers(chatml), tokenizer=chatml, mix=Mix(weights={"B": 2}))
    assert report["truncated_records"] > 5 and report["copies"] > 5 and len(report["provenance"]) > 3
    return tmp_path / "corpus"


def expected(corpus) -> list:
    rows = Corpus.open(corpus)
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(rows.row, range(len(rows)))]


def test_every_row_has_the_columns_types_and_lengths_that_it_asks_for(corpus):
    for line, (ids, mask) in zip((corpus / "merged.jsonl").read_text().split("\n"), expected(corpus), strict=False):
        row = json.loads(line)
        assert type(row) is dict and row["input_ids"] == ids and row["loss_mask"] == mask
        assert {type(value) for value in row["input_ids"] + row["loss_mask"]} == {int}  # true and false are none
        assert 0 < len(row["input_ids"]) == len(row["loss_mask"]) <= 40
        assert set(row["loss_mask"]) <= {0, 1} and sum(row["loss_mask"]) >= 1 and min(row["input_ids"]) >= 0


def test_arrow_reads_it_as_lists_of_integers(corpus):
    table = pyarrow.json.read_json(corpus / "merged.jsonl", pyarrow.json.ReadOptions(block_size=1 << 14))
    assert {"input_ids", "loss_mask"} <= set(table.column_names)
    for name, which in (("input_ids", 0), ("loss_mask", 1)):
        column = table.column(name)
        assert column.type == pa.list_(pa.int64()) and column.null_count == 0
        assert column.to_pylist() == [row[which] for row in expected(corpus)]


def test_speculators_itself_reads_it(corpus, tmp_path, monkeypatch):
    """Runs where speculators and datasets are installed; neither is needed here."""
    pytest.importorskip("datasets")
    preprocessing = pytest.importorskip("speculators.data_generation.preprocessing")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    raw, _ = preprocessing.load_raw_dataset(str(corpus / "merged.jsonl"))
    made = preprocessing.build_speculator_training_dataset(raw, object(), max_length=100, num_proc=1)
    assert len(made) == len(expected(corpus))
    for row, (ids, mask) in zip(made, expected(corpus), strict=True):
        assert np.array_equal(row["input_ids"], ids) and np.array_equal(row["loss_mask"], mask)
        assert row["seq_len"] == len(ids)
