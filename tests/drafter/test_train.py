"""Training on the synthetic chain: it learns, it resumes exactly, it refuses what it cannot use."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.packing import Plan, make_pack, pack_rows, split
from eagle3nb.drafter.settings import Settings, learning_rate, warmup_steps
from eagle3nb.drafter.train import train
from eagle3nb.drafter.ttt import chain
from eagle3nb.errors import UserError
from eagle3nb.files import write_json


@pytest.fixture
def run(tmp_path, tiny_facts, synthetic_store):
    """run(name, **settings) trains in tmp_path/name; stop_after=n interrupts after n optimiser steps."""
    store = synthetic_store(rows=40, seed=2)
    norm = {"norm.weight": torch.ones(32)}

    def start(name="run", stop_after=None, store=store, vocabulary=range(0, 97, 1), **changes):
        folder = tmp_path / name
        write_json(folder / "vocabulary.json", {"ids": list(vocabulary)})
        settings = Settings(**{"states": "", "drafter": str(folder), "target": "", "epochs": 3, "pack_tokens": 96,
                               "accumulate": 2, "learning_rate": 3e-3, "validation_share": 0.15, **changes})
        calls = iter(range(1, 10_000))
        best = train(settings, store, tiny_facts(), lambda: norm, stop=lambda: next(calls) == stop_after)
        return SimpleNamespace(best=best, folder=folder, metrics=read_metrics(folder / "metrics.jsonl"))

    start.store = store
    return start


def of(metrics, kind):
    return [line for line in metrics if line["kind"] == kind]


def test_learns_and_keeps_the_best(run):
    done = run(epochs=6)
    curve = of(done.metrics, "validation")
    assert done.metrics[0]["kind"] == "start" and done.metrics[-1]["kind"] == "end"
    assert done.best["acceptance"] == max(line["acceptance"] for line in curve)
    assert curve[-1]["loss"] < 0.8 * curve[0]["loss"]
    assert done.best["acceptance"] > 1.5 > curve[0]["acceptance"]    # the chain is nine tenths deterministic
    model = DraftModel.load(done.folder, run.store.embedding())
    assert json.loads((done.folder / "config.json").read_text())["provenance"]["best"] == done.best
    assert model.lm_head.weight.shape == (97, 32)


def test_the_saved_drafter_takes_the_states_as_they_come(run, synthetic_store):
    """Training scales the captured layers' columns; what is saved must not need that. Chains of the reloaded drafter
    over the held-out rows, counted by hand, give the accuracies that training wrote; the deep layer is 50 times larger.
    """
    store = synthetic_store(rows=40, seed=2)
    for row in store.rows:
        row.aux[:, 64:] *= 50
    done = run("scaled", store=store, epochs=2)
    model = DraftModel.load(done.folder, store.embedding())
    hits, counted = np.zeros(3), np.zeros(3)
    for i in split(store, 0.15)[1]:
        row = store.row(int(i))
        drafts = chain(model, row.ids, row.aux, 3)
        argmax = dict(zip(row.last_positions, row.teacher_argmax, strict=True))
        for k in range(3):
            for t in range(len(row.ids) - 2 - k):
                if row.mask[t + 1:t + 3 + k].all():        # every token lies in D here
                    counted[k] += 1
                    hits[k] += drafts[k, t] == argmax[t + 1 + k]
    assert counted.tolist() == done.best["counted"]
    np.testing.assert_allclose(hits / counted, done.best["accuracy"], atol=1e-6)


@pytest.mark.parametrize("stop_after", [3, 7, 11])
def test_resumes_to_the_same_curve(run, stop_after):
    whole = run("whole", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        run("halved", stop_after=stop_after, checkpoint_every=2)
    with open(next((whole.folder.parent / "halved").glob("metrics.jsonl")), "a") as handle:
        handle.write('{"kind": "train", "step": 999, "torn')        # a line that a kill cut off
    resumed = run("halved", checkpoint_every=2)
    for kind in ("train", "validation"):
        ours, theirs = of(resumed.metrics, kind), of(whole.metrics, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for key in set(one) - {"kind", "seconds", "tokens_per_s"}:
                np.testing.assert_allclose(one[key], other[key], rtol=1e-6, err_msg=f"{kind} {one['step']} {key}")
    a, b = (DraftModel.load(r.folder, run.store.embedding()).state_dict() for r in (whole, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_torn_checkpoint_is_passed_over(run, capsys):
    whole = run("whole", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        run("torn", stop_after=8, checkpoint_every=2)
    folder = whole.folder.parent / "torn" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000006", "step-000008"]
    with open(folder / "step-000008" / "tensors.safetensors", "r+b") as handle:
        handle.seek(-3, 2)
        handle.write(b"xyz")
    resumed = run("torn", checkpoint_every=2)
    assert "step-000008 is torn" in capsys.readouterr().out
    ours, theirs = (of(r.metrics, "validation")[-1]["loss"] for r in (resumed, whole))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_finished_run_is_not_run_again_and_another_one_starts_anew(run):
    first = run()
    again = run()
    assert of(again.metrics, "train") == of(first.metrics, "train") and len(of(again.metrics, "end")) == 1
    other = run(learning_rate=1e-3)
    assert of(other.metrics, "train")[0]["learning_rate"] != of(first.metrics, "train")[0]["learning_rate"]
    assert of(other.metrics, "train")[0]["step"] == 1


def test_rows_without_a_counted_slot(run, synthetic_store):
    store = synthetic_store(rows=6, seed=4)
    for row in store.rows:                       # one supervised token each: no chain can stand anywhere
        row.mask[:] = 0
        row.mask[3] = 1
        row.last, row.last_positions = row.last[:0], row.last_positions[:0]
        row.teacher_argmax = row.teacher_argmax[:0]
    done = run("empty", store=store, epochs=1)
    assert all(line["loss"] == 0 and line["loss_k"] == [0, 0, 0] for line in of(done.metrics, "train"))


def test_gradients_that_are_not_finite_end_the_run(run, synthetic_store):
    store = synthetic_store(rows=40, seed=2)
    for row in store.rows:
        row.aux = torch.full_like(row.aux, float("nan"))
    with pytest.raises(UserError, match="not finite"):
        run("nan", store=store, epochs=6)


def test_split_never_parts_duplicates(synthetic_store):
    store = synthetic_store(rows=60, seed=1)
    store.rows = store.rows + store.rows[:30]
    training, held = split(store, 0.3)
    contents = [row.ids.tobytes() for row in store.rows]
    assert not {contents[i] for i in training} & {contents[i] for i in held}
    assert 12 <= len({contents[i] for i in held}) <= 19
    assert len(training) + len(held) == 90 and len(split(store, 0.0)[1]) == 0
    with pytest.raises(UserError, match="leaves none"):
        split(store, 0.9999)


def test_plan_visits_every_row_once_an_epoch_and_packs_within_bounds():
    lengths = np.random.default_rng(0).integers(5, 60, size=50)
    rows = np.arange(0, 50, 2)
    plan = Plan.make(rows, lengths, epochs=3, seed=7, pack_tokens=100, accumulate=2)
    for epoch in range(3):
        visited = [pack for step, e in zip(plan.steps, plan.epoch_of, strict=True) if e == epoch for pack in step]
        assert sorted(np.concatenate(visited)) == rows.tolist()
        assert all(lengths[pack].sum() <= 100 for pack in visited)
        assert (np.concatenate(visited).tolist() == rows.tolist()) == (epoch == 0)
    assert plan.tokens == 3 * lengths[rows].sum()
    assert [pack.tolist() for pack in pack_rows([0, 1, 2], np.array([300, 10, 10]), 100)] == [[0], [1, 2]]


def test_pack_counts_as_the_design_says():
    """l = [0,0,1,1,1,0]: teacher at p = 2, 3; step 0 counts at t = 1, 2, step 1 at t = 1 if x[3] is in D."""
    row = SimpleNamespace(ids=np.array([5, 6, 7, 8, 9, 4], np.int32), mask=np.array([0, 0, 1, 1, 1, 0], np.uint8),
                          aux=torch.zeros(6, 3), last=torch.zeros(2, 1), last_positions=np.array([2, 3], np.int32),
                          teacher_argmax=np.array([8, 3], np.int32))
    t2d = np.ones(10, bool)
    t2d[3] = False
    pack = make_pack([row, row], t2d, 3)
    assert [at.tolist() for at in pack.slots] == [[1, 2, 7, 8], [1, 7], []]
    assert [at.tolist() for at in pack.rows] == [[0, 1, 2, 3], [1, 3], []]
    assert pack.label.tolist() == [7, -1, 7, -1] and pack.on_argmax.tolist() == [True, False, True, False]
    t2d[8] = False
    assert [at.tolist() for at in make_pack([row], t2d, 3).slots] == [[1, 2], [], []]


def test_schedule():
    settings = Settings("", "", "", learning_rate=1.0, warmup_share=0.1)
    rates = [learning_rate(settings, step, 100, warmup_steps(settings, 100)) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 1e-3


@pytest.mark.parametrize(("change", "message"), [
    ({"learning_rte": 1.0}, "unknown keys"), ({"learning_rate": "1e-4"}, "must be float"),
    ({"epochs": True}, "must be int"), ({"loss_average": "row"}, "slot or document"),
    ({"ttt_steps": 0}, "1 or more"), ({"validation_share": 1.0}, "0 … 1"),
    ({"verify_states": "sometimes"}, "all, each, first, never"),
])
def test_settings_are_strict(change, message):
    good = asdict(Settings("a", "b", "c"))
    assert Settings.from_json(good) == Settings("a", "b", "c")
    with pytest.raises(UserError, match=message):
        Settings.from_json(good | change)


def test_minutes_cut_the_schedule_to_what_fits(run, monkeypatch):
    """A clock that goes one second a look: the run is cut after its warm-up, ends with a small learning rate and an
    evaluation, and a resumed run keeps the cut that was made."""
    clock = iter(range(1, 1_000_000))
    monkeypatch.setattr("eagle3nb.drafter.train.time.monotonic", lambda: float(next(clock)))
    whole = run("whole", epochs=30)
    cut = run("cut", epochs=30, minutes=2.0)
    (line,) = of(cut.metrics, "shortened")
    steps = of(cut.metrics, "train")
    assert len(steps) == line["steps"] == cut.metrics[-1]["step"] < len(of(whole.metrics, "train"))
    assert steps[-1]["tokens"] == line["total_tokens"] and cut.metrics[-2]["kind"] == "validation"
    assert steps[-1]["learning_rate"] < 0.05 * max(step["learning_rate"] for step in steps)
    assert cut.metrics[-1]["seconds"] == pytest.approx(120, rel=0.25)    # evaluations look at the clock too
    with pytest.raises(KeyboardInterrupt):
        run("again", epochs=30, minutes=2.0, stop_after=line["step"] + 2)
    again = run("again", epochs=30, minutes=2.0)
    (same,) = of(again.metrics, "shortened")
    assert same["steps"] == of(again.metrics, "train")[-1]["step"]


def test_minutes_that_suffice_cut_nothing(run):
    assert run("short", minutes=60.0).metrics[-1]["step"] == len(of(run("all").metrics, "train"))
