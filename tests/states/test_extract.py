"""Extraction's refusals, its batches, its pipeline, and the plan of the disk."""

import concurrent.futures
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.states import extract as extraction
from eagle3nb.states import forward, plan, writing
from eagle3nb.states.extract import batches, extract
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.quantise import encode
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


def test_batches_cost_the_least_that_any_cut_costs():
    """Padding and 1/32 of the bound a batch, against every way to cut the sorted rows."""
    rng = np.random.default_rng(0)
    for bound in (1, 20, 64, 300):
        for _ in range(12):
            lengths = rng.integers(1, 90, int(rng.integers(1, 9))).tolist()
            rows = sorted(lengths, reverse=True)
            costs = []
            for cuts in itertools.product([False, True], repeat=len(rows) - 1):
                ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(rows)]
                parts = [rows[a:b] for a, b in zip([0, *ends], ends, strict=False)]
                if all(len(part) == 1 or len(part) * part[0] <= bound for part in parts):
                    costs.append(sum(len(part) * part[0] + bound / 32 for part in parts))
            made = batches(lengths, bound)
            assert sorted(i for batch in made for i in batch) == list(range(len(rows)))
            assert sum(len(b) * max(lengths[i] for i in b) + bound / 32 for b in made) == pytest.approx(min(costs))
    assert batches([], 10) == []


def test_a_shard_is_what_its_rows_are_one_by_one(target):
    """Rows of one token, rows without a teacher's position, a shard without any."""
    rng = np.random.default_rng(1)
    rows = [(rng.integers(3, 90, n).astype(np.int32), (rng.random(n) < p).astype(np.uint8))
            for n, p in ((1, 1), (40, 0.7), (2, 1), (7, 0), (1, 0), (40, 1), (25, 0.5), (3, 1))]
    corpus, clock, counts = SimpleNamespace(row=lambda i: rows[i]), {}, []
    bar = SimpleNamespace(advance=counts.append)
    for first, last in ((0, 7), (1, 2), (3, 4)):
        made = extraction.shard(corpus, target, first, last, torch.float32, 100, clock, bar)
        aux, final, argmax, lse, at, offsets, last_offsets = [], [], [], [], [], [0], [0]
        for ids, mask in rows[first : last + 1]:
            positions = [p for p in range(len(ids) - 1) if mask[p] and mask[p + 1]]
            a, f = target.capture([ids])[0]
            logits = target.logits(f[positions]).double()
            aux.append(a)
            final.append(f[positions])
            argmax += logits.argmax(-1).tolist()
            lse += logits.exp().sum(-1).log().tolist()
            at += positions
            offsets.append(offsets[-1] + len(ids))
            last_offsets.append(last_offsets[-1] + len(positions))
        for name, right in (("aux", torch.cat(aux)), ("last", torch.cat(final))):
            assert made[name].shape == right.shape and torch.allclose(made[name], right, rtol=1e-4, atol=1e-4)
        assert made["teacher_argmax"].tolist() == argmax and made["last_positions"].tolist() == at
        assert np.allclose(made["teacher_lse"].numpy(), lse, atol=1e-5)
        assert made["row_offsets"].tolist() == offsets and made["last_offsets"].tolist() == last_offsets
        assert made["input_ids"].tolist() == [i for ids, _ in rows[first : last + 1] for i in ids.tolist()]
        assert made["rows"].tolist() == list(range(first, last + 1))
        assert sum(counts) == offsets[-1]
        counts.clear()
    assert clock["forward_s"] > 0 and clock["teacher_s"] > 0 and clock["gather_s"] > 0


def test_logits_are_computed_where_a_teacher_is_needed_alone_and_in_chunks(corpus, target, tmp_path, monkeypatch):
    real, asked = target.logits, []
    monkeypatch.setattr(target, "logits", lambda last: asked.append(len(last)) or real(last))
    monkeypatch.setattr(forward, "LOGITS_BYTES", 7 * 4 * 256)
    extract(corpus, target, tmp_path, **SETTINGS)
    assert sum(asked) == corpus.index["teacher_positions"].sum() and max(asked) == 7
    assert target.kept == {}


def test_the_whole_logits_of_a_batch_are_nowhere(tmp_path, monkeypatch):
    """Nor does a forward keep what it need not: the body alone runs, without a cache and all layers' states, even
    where the checkpoint's config asks for them."""
    import tiny

    target = TransformersTarget(tiny.make_target(tmp_path, output_hidden_states=True), torch.float32, "cpu")
    monkeypatch.setattr(target.head, "forward", lambda *_: pytest.fail("the head ran"))
    seen, real = [], target.body.forward

    def body(**given):
        seen.append(real(**given))
        return seen[-1]

    monkeypatch.setattr(target.body, "forward", body)
    target.capture([[5, 6, 7]])
    assert seen[0].past_key_values is None and seen[0].get("hidden_states") is None


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_sees_what_isfinite_sees(dtype):
    rng = torch.Generator().manual_seed(0)
    for value in (float("nan"), float("inf"), float("-inf"), 6e4):
        for shape in ((1, 1), (3, 40), (50, 7)):
            states = torch.randn(shape, generator=rng).to(dtype)
            assert forward.finite(states)
            states[int(torch.randint(shape[0], (), generator=rng)), -1] = value
            assert forward.finite(states) == bool(states.isfinite().all()) == (value == 6e4)
    assert forward.finite(torch.empty(0, 4, dtype=dtype))


@pytest.mark.parametrize("name", ["aux", "last"])
def test_an_engine_that_gives_fewer_states_than_tokens(corpus, target, tmp_path, monkeypatch, name):
    """One state for a row would otherwise be spread over all of its tokens."""
    capture = target.capture

    def cut(rows):
        states = capture(rows)
        return [(aux[-1:] if name == "aux" else aux, last[-1:] if name == "last" else last) for aux, last in states]

    monkeypatch.setattr(target, "capture", cut)
    with pytest.raises(UserError, match=r"row \d+ has \d+ tokens, the engine gave .* states"):
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


# ---------------------------------------------------------------------------------------------------- the pipeline


def test_the_next_forward_runs_while_a_shard_is_written(corpus, target, tmp_path, monkeypatch):
    capture, write = target.capture, writing.ShardWriter.write
    begun, forwards, overlapped = threading.Event(), threading.Event(), []

    def held(self, first, last, tensors):
        if first == 0:
            begun.set()
            overlapped.append(forwards.wait(300))
        assert threading.current_thread() is not threading.main_thread()
        return write(self, first, last, tensors)

    monkeypatch.setattr(writing.ShardWriter, "write", held)
    monkeypatch.setattr(target, "capture", lambda rows: (begun.is_set() and forwards.set()) or capture(rows))
    made = extract(corpus, target, tmp_path, **SETTINGS)
    assert overlapped == [True] and made["shards_made"] == made["shards"] > 2


def test_a_batch_is_begun_before_the_states_of_the_one_before_are_brought_in(corpus, target, monkeypatch):
    """On a GPU, which runs behind, the next forward then hides the copying."""
    order, capture = [], target.capture
    monkeypatch.setattr(target, "capture", lambda rows: order.append("begun") or capture(rows))
    bar = SimpleNamespace(advance=lambda count: order.append("in"))
    extraction.shard(corpus, target, 0, 9, torch.float32, 1, {}, bar)
    assert order == ["begun", *(["begun", "in"] * 9), "in"]


def test_two_shards_at_most_are_in_memory(corpus, target, tmp_path, monkeypatch):
    """The writer is slow: the forward waits for it, the time is told, and no shard takes the other's place.

    On a machine that stands still for a while that is no part of the whole: then once more, with a slower writer.
    """
    extract(corpus, target, tmp_path / "whole", **SETTINGS)
    shard, write, count, most = extraction.shard, writing.ShardWriter.write, [0], [0]

    def made(*arguments):
        count[0] += 1
        most[0] = max(most[0], count[0])
        return shard(*arguments)

    def slow(*arguments):
        time.sleep(pause)
        count[0] -= 1
        return write(*arguments)

    monkeypatch.setattr(extraction, "shard", made)
    monkeypatch.setattr(writing.ShardWriter, "write", slow)
    for pause in (0.05, 0.2, 0.8, 3.2):
        folder = tmp_path / f"slow-{pause}"
        found = extract(corpus, target, folder, **SETTINGS)
        assert Store.open(folder).content_hash() == Store.open(tmp_path / "whole").content_hash()
        assert most[0] <= 2 and count[0] == 0 and found["write_s"] > pause * found["shards"]
        parts = sum(found[f"{name}_s"] for name in ("forward", "teacher", "gather", "wait", "others"))
        assert parts <= found["seconds"]
        if most[0] == 2 and found["wait_s"] > 0.6 * pause and parts > 0.5 * found["seconds"]:
            break
    assert most[0] == 2 and found["wait_s"] > 0.6 * pause and parts > 0.5 * found["seconds"]


@pytest.mark.parametrize("error, told", [(UserError("cannot write manifest.json: No space left"), "cannot write"),
                                         (ZeroDivisionError("a bug"), "a bug")])
def test_what_goes_wrong_in_the_writer_is_told_at_once_with_the_shards_name(corpus, target, tmp_path, monkeypatch,
                                                                           error, told):
    settings = {**SETTINGS, "batch_tokens": 1, "shard_tokens": 800}  # one row a batch
    ranges = extraction.stores.shard_ranges(corpus.lengths, 800)
    capture, write, hand = target.capture, writing.ShardWriter.write, extraction.Background.hand
    background, failing, later = [], threading.Event(), []

    def broken(self, first, last, tensors):
        if first == 0:
            return write(self, first, last, tensors)
        assert failing.wait(300)
        raise error

    def handed(self, first, *rest):
        hand(self, first, *rest)
        if first == ranges[1][0]:
            background.append(self)

    def slow(rows):
        """In the midst of the third shard the second's writing fails, and has when the next batch is begun."""
        if background:
            later.append(len(rows))
        if len(later) == 3:
            failing.set()
            assert concurrent.futures.wait([background[0].writing], 300).done
        return capture(rows)

    monkeypatch.setattr(writing.ShardWriter, "write", broken)
    monkeypatch.setattr(extraction.Background, "hand", handed)
    monkeypatch.setattr(target, "capture", slow)
    with pytest.raises(type(error), match=told) as caught:
        extract(corpus, target, tmp_path, **settings)
    name = extraction.stores.shard_name(*ranges[1])
    assert name in str(caught.value) or name in caught.value.__notes__[0]
    assert 3 <= len(later) <= 4 < ranges[2][1] - ranges[2][0]  # not the whole shard that was in the target
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".lock", "head.safetensors", "manifest.json", extraction.stores.shard_name(*ranges[0])]  # no claim, no part
    monkeypatch.undo()
    assert extract(corpus, target, tmp_path, **settings)["shards_kept"] == 1


def test_a_shard_that_is_being_written_is_finished_when_the_next_one_fails(corpus, target, tmp_path, monkeypatch):
    shard, write, failed = extraction.shard, writing.ShardWriter.write, threading.Event()

    def failing(*arguments):
        if arguments[2] > 0:
            failed.set()
            raise KeyboardInterrupt
        return shard(*arguments)

    def slow(*arguments):
        assert failed.wait(300)
        time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(extraction, "shard", failing)
    monkeypatch.setattr(writing.ShardWriter, "write", slow)
    with pytest.raises(KeyboardInterrupt):
        extract(corpus, target, tmp_path, **SETTINGS)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.claim"))
    assert extract(corpus, target, tmp_path, **SETTINGS)["shards_kept"] == 1


def test_states_for_fp8_are_gathered_in_the_targets_own_dtype(corpus, tiny_target, tmp_path, monkeypatch):
    """A bfloat16 target's in bfloat16: half the memory, and the same eight bits."""
    shard, seen, target = extraction.shard, [], TransformersTarget(tiny_target, torch.bfloat16, "cpu")
    monkeypatch.setattr(extraction, "shard", lambda *arguments: seen.append(arguments[4]) or shard(*arguments))
    extract(corpus, target, tmp_path, **{**SETTINGS, "dtype": "fp8_e4m3"}, limit=4)
    assert set(seen) == {torch.bfloat16}
    store = Store.open(tmp_path)
    for i, entry in enumerate(store.shards):
        wide = shard(corpus, target, entry["first"], entry["last"], torch.float32, 512, {},
                     SimpleNamespace(advance=lambda count: None))
        values, scale = encode(wide["aux"], 3)
        assert torch.equal(store.tensors(i)["aux"].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(store.tensors(i)["aux_scale"], scale)


# ---------------------------------------------------------------------------------------------------- the disk


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
