"""The extraction's benchmark: the floor runs the very same batches, a missed bound is named and fails the command."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3nb.states import extract as extraction


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "extraction.py"
    spec = importlib.util.spec_from_file_location("extraction_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_floor_runs_the_batches_of_the_extraction(benchmark, corpus, target, tmp_path, monkeypatch):
    rows = benchmark.Rows([corpus.row(i) for i in range(len(corpus))], target.facts.vocab)
    o = SimpleNamespace(shard_tokens=600, batch_tokens=300)
    capture, seen = target.capture, []
    monkeypatch.setattr(target, "capture", lambda batch: seen.append(batch) or capture(batch))
    extraction.extract(rows, target, tmp_path, dtype="bf16", batch_tokens=300, shard_tokens=600)
    made = benchmark.padded_batches(rows, o)
    assert len(made) == len(seen) > 5
    for ids, batch in zip(made, seen, strict=True):
        assert ids.shape == (len(batch), max(map(len, batch))) and ids.dtype == torch.long
        for line, row in zip(ids, batch, strict=True):
            assert line[: len(row)].tolist() == row.tolist() and not line[len(row):].any()


def segment(floor: float, forward: float, teacher: float) -> dict:
    parts = dict.fromkeys(("forward", "gather", "wait", "write"), 0.1)
    return {"tokens": 1000, "batches": 3, "floor": {"wall": floor, "cpu": floor},
            "extraction": {"wall": forward + teacher, "cpu": forward + teacher, "teacher": teacher,
                           "teacher cpu": teacher, **parts}}


@pytest.mark.parametrize("forward, ours, missed", [(1.04, 1.9, []), (1.06, 1.9, ["extraction without"]),
                                                   (1.04, 2.1, ["the writer alone"])])
def test_a_missed_bound_is_named(benchmark, monkeypatch, capsys, tmp_path, forward, ours, missed):
    """The median counts, the teacher's time does not."""
    segments = [segment(1.0, 5.0, 0.3), segment(1.0, forward, 0.3), segment(2.0, 2 * forward, 9.0),
                segment(1.0, forward, 0.3), segment(3.0, 1.0, 0.1)]
    writers = [{"dtype": "bf16", "bytes": 10**8, "files": 2, "ours": [ours, 9.0, ours], "plain": [1.0, 1.0, 1.0]}]
    monkeypatch.setattr(benchmark, "forwards", lambda *_: segments)
    monkeypatch.setattr(benchmark, "writer", lambda *_: writers)
    monkeypatch.setattr(benchmark, "Meter", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    told = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["extraction.py", "--folder", str(tmp_path), "--json", str(told)])
    if missed:
        with pytest.raises(SystemExit, match=f"missed: {missed[0]}"):  # a message: exit code 1
            benchmark.main()
    else:
        benchmark.main()
    out = capsys.readouterr().out
    assert out.count("MISSED") == len(missed) and "floor: bare forwards" in out and told.is_file()
    monkeypatch.setattr(sys, "argv", ["extraction.py", "--folder", str(tmp_path), "--no-gate"])
    benchmark.main()
