"""Extraction's refusals, its batches, and the plan of the disk."""

import numpy as np
import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.states import extract as extraction
from eagle3nb.states import plan
from eagle3nb.states.extract import batches, extract
from eagle3nb.states.store import Store
from eagle3nb.states.target import TargetFacts

SETTINGS = {"dtype": "bf16", "batch_tokens": 512, "shard_tokens": 600}
KIMI = TargetFacts("Kimi", 7168, 61, 64, 64, 128, 18432, 163840, 1e-5, 262144, (163586,), False, {"theta": 5e4})


def test_batches_are_bounded_sorted_and_complete():
    lengths = [3, 50, 7, 20, 20, 1, 9]
    made = batches(lengths, 40)
    assert sorted(i for batch in made for i in batch) == list(range(7))
    assert made[0] == [1]  # longer than the bound: alone
    assert all(len(batch) * max(lengths[i] for i in batch) <= 40 for batch in made[1:])
    flat = [lengths[i] for batch in made for i in batch]
    assert flat == sorted(lengths, reverse=True)


def test_content_depends_little_on_the_batches_and_not_on_the_shards(corpus, target, tmp_path):
    extract(corpus, target, tmp_path / "a", dtype="fp32", batch_tokens=1, shard_tokens=10**6)
    extract(corpus, target, tmp_path / "b", dtype="fp32", batch_tokens=1, shard_tokens=200)
    extract(corpus, target, tmp_path / "c", dtype="fp32", batch_tokens=2000, shard_tokens=900)
    a, b, c = (Store.open(tmp_path / name) for name in "abc")
    assert len(a.shards) == 1 and len(b.shards) > 10
    assert a.content_hash() == b.content_hash()
    for i in range(len(a)):
        one, other = a.row(i), c.row(i)
        assert (one.aux - other.aux).norm() < 1e-5 * one.aux.norm() and np.array_equal(one.ids, other.ids)


def test_a_finished_store_costs_nothing_to_ask_for_again(corpus, target, tmp_path, monkeypatch):
    first = extract(corpus, target, tmp_path, **SETTINGS)
    monkeypatch.setattr(target, "capture", lambda rows: pytest.fail("extracted again"))
    again = extract(corpus, target, tmp_path, **SETTINGS)
    assert first["extracted_tokens"] == corpus.tokens and again["extracted_tokens"] == 0
    assert again["shards_kept"] == first["shards"] and again["bytes"] == first["bytes"]
    assert again["teacher_positions"] == corpus.index["teacher_positions"].sum()


def test_a_shard_whose_bytes_changed_is_made_again(corpus, target, tmp_path):
    """Same size, other bytes: sizes alone would keep it, and the probe looks at the target, not at the store."""
    extract(corpus, target, tmp_path, **SETTINGS)
    before, victim = Store.open(tmp_path).content_hash(), Store.open(tmp_path).shards[1]
    path = tmp_path / victim["file"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-200] + b"XXXXXXXX" + whole[-192:])
    again = extract(corpus, target, tmp_path, **SETTINGS)
    assert again["extracted_tokens"] == victim["tokens"] and path.read_bytes() == whole
    assert Store.open(tmp_path).content_hash() == before


def test_limit_takes_the_first_rows(corpus, target, tmp_path):
    assert extract(corpus, target, tmp_path, **SETTINGS, limit=5)["rows"] == 5
    assert len(Store.open(tmp_path)) == 5


def test_a_disk_too_small_is_said_before_anything_is_computed(corpus, target, tmp_path, monkeypatch):
    monkeypatch.setattr(extraction, "disk_free", lambda _: 1000)
    monkeypatch.setattr(target, "capture", lambda rows: pytest.fail("computed"))
    with pytest.raises(UserError, match="0.00 GB are free"):
        extract(corpus, target, tmp_path, **SETTINGS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_named(corpus, target, tmp_path, monkeypatch, value):
    capture = target.capture

    def broken(rows):
        states = [(aux.clone(), last) for aux, last in capture(rows)]
        for ids, (aux, _) in zip(rows, states, strict=True):
            if np.array_equal(ids, corpus.row(7)[0]):
                aux[4, 64 + 9] = value  # the second captured layer
        return states

    monkeypatch.setattr(target, "capture", broken)
    with pytest.raises(UserError, match="row 7, token 4: layer 4 is not finite"):
        extract(corpus, target, tmp_path, **SETTINGS)


def test_rows_that_the_target_cannot_take_are_named(corpus, target, tmp_path, monkeypatch):
    longest = int(corpus.index["tokens"].argmax())
    short = {**vars(target.facts), "max_positions": 100}
    monkeypatch.setattr(target, "facts", TargetFacts(**short))
    with pytest.raises(UserError, match=f"row {longest} of the corpus has 128 tokens, the target takes 100"):
        extract(corpus, target, tmp_path, **SETTINGS)
    monkeypatch.setattr(target, "facts", TargetFacts(**{**short, "max_positions": 512, "vocab": 200}))
    with pytest.raises(UserError, match="vocabulary of 256, the target's is 200"):
        extract(corpus, target, tmp_path, **SETTINGS)
    with pytest.raises(UserError, match="row 12 of the corpus holds id 300"):
        extraction.check_ids(torch.tensor([5, 6, 300]), 256, 11, np.array([0, 2, 3]))


def test_the_plan_tells_the_bytes_that_a_store_takes(corpus, target, tmp_path):
    teacher = int(corpus.index["teacher_positions"].sum())
    for dtype in ("bf16", "fp32"):
        extract(corpus, target, tmp_path / dtype, **{**SETTINGS, "dtype": dtype})
        told = plan.disk_plan(target.facts, corpus.tokens, teacher, tmp_path / dtype, dtype)
        # The tiny checkpoint's head is float32, the plan says bf16; headers and offsets are what is left.
        head = 2 * 2 * 256 * 64
        assert 0 < told["standing"] - told["needed"] - head < 30_000
        assert not told["short"] and told["needed"] == told["bytes"][dtype]


def test_the_reference_runs_disk():
    """57,344 bytes a token in bf16 where every position needs a teacher (RESEARCH 2.5), half of it in fp8."""
    sizes = {dtype: plan.states_bytes(KIMI, 10**6, 10**6, dtype) - plan.states_bytes(KIMI, 0, 0, dtype)
             for dtype in ("bf16", "fp32", "fp8_e4m3")}
    assert sizes["bf16"] == 10**6 * (57344 + 5 + 12)
    assert 0.5 < sizes["fp8_e4m3"] / sizes["bf16"] < 0.501 and 1.99 < sizes["fp32"] / sizes["bf16"] < 2


def test_a_disk_is_short_only_beyond_what_stands(tmp_path, monkeypatch):
    (tmp_path / "old").write_bytes(b"x" * 1000)
    need = plan.states_bytes(KIMI, 100, 50, "bf16")
    for free, short in ((need - 1001, True), (need - 1000, False)):
        monkeypatch.setattr(plan, "disk_free", lambda _, free=free: free)
        told = plan.disk_plan(KIMI, 100, 50, tmp_path)
        assert told["short"] is short and told["standing"] == 1000 and told["free"] == free
    with pytest.raises(UserError, match="'int4' is unknown"):
        plan.disk_plan(KIMI, 1, 1, tmp_path, "int4")
    assert plan.disk_plan(KIMI, 1, 1, tmp_path / "not" / "there")["standing"] == 0
