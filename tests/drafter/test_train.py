"""Training on the synthetic chain: it learns, it resumes exactly, it refuses what it cannot use."""

import json
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.metrics import TeacherPrefix
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.packing import Plan, make_pack, pack_rows, split
from eagle3nb.drafter.run import chain_tables
from eagle3nb.drafter.settings import Settings, learning_rate, warmup_steps
from eagle3nb.drafter.train import train
from eagle3nb.drafter.ttt import chain, loss_scales, pack_loss
from eagle3nb.errors import UserError
from eagle3nb.files import write_json, xxh3_file


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

    start.store, start.folder = store, tmp_path
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
            for key in set(one) - {"kind", "seconds", "tokens_per_s", "waited_s"}:
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


def only_one_supervised(rows):
    """No chain can stand anywhere."""
    for row in rows:
        row.mask[:] = 0
        row.mask[3] = 1
        row.last, row.last_positions = row.last[:0], row.last_positions[:0]
        row.teacher_argmax = row.teacher_argmax[:0]


def test_rows_without_a_counted_slot(run, synthetic_store):
    """Some are trained on with no loss; where no row has one, nothing is begun."""
    store = synthetic_store(rows=6, seed=4)
    only_one_supervised(store.rows[:-1])
    done = run("some", store=store, epochs=1, pack_tokens=1, accumulate=1, validation_share=0.0)
    lines = of(done.metrics, "train")
    assert len(lines) == 6 and lines[-1]["loss"] > 0
    assert all(line["loss"] == 0 and line["loss_k"] == [0, 0, 0] for line in lines[:-1])
    only_one_supervised(store.rows)
    with pytest.raises(UserError, match="none of 5 training rows has two supervised tokens in a row"):
        run("empty", store=store)
    assert not (done.folder.parent / "empty" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("ids", "message"), [
    ([0, 5, 97], "token 97 lies outside the target's vocabulary of 97, so it is of another target"),
    ([-1, 5], "token -1 lies outside"), ([0, 5, 5, 9], "5 follows 5"), ([], "no list of token ids"),
    (["a"], "no list of token ids"), ([1.0, 2.0], "no list of token ids"),
])
def test_a_vocabulary_that_is_none(run, ids, message):
    before = run("kept", epochs=1)
    with pytest.raises(UserError, match=message):
        run("kept", vocabulary=ids, epochs=1)
    assert read_metrics(before.folder / "metrics.jsonl") == before.metrics


def test_a_vocabulary_of_another_corpus(run, synthetic_store):
    """Ids that the target never prefers: no slot bears loss."""
    store = synthetic_store(rows=20, seed=4)
    preferred = set(np.concatenate([row.teacher_argmax for row in store.rows]).tolist())
    with pytest.raises(UserError, match="vocabulary.json is of another corpus or target"):
        run("foreign", store=store, vocabulary=sorted(set(range(97)) - preferred))


def test_checkpoints_of_another_target_are_not_deleted(run, synthetic_store):
    """Other parameters begin anew in the same folder; another target does not."""
    theirs, ours = synthetic_store(rows=40, seed=2), synthetic_store(rows=40, seed=3)
    theirs.fingerprint = {"target weights": "a", "layers": [2, 4, 5], "corpus": "x"}
    ours.fingerprint = theirs.fingerprint | {"target weights": "b"}
    done = run("shared", store=theirs, epochs=1)
    files = {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"holds checkpoints of another target \(other target weights\)"):
        run("shared", store=ours, epochs=1)
    assert files == {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    theirs.fingerprint = theirs.fingerprint | {"corpus": "y"}
    assert run("shared", store=theirs, epochs=2).metrics[-1]["step"] > done.metrics[-1]["step"]


def test_a_checkpoint_of_another_drafter(run):
    """Its record names this run, its tensors do not fit: one line, and both stay."""
    with pytest.raises(KeyboardInterrupt):
        run("swapped", stop_after=4, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        run("other", stop_after=4, checkpoint_every=2, vocabulary=range(50))
    ours, theirs = (run.folder / name / "checkpoints" / "step-000004" for name in ("swapped", "other"))
    state = json.loads((theirs / "state.json").read_text()) | {
        "identity": json.loads((ours / "state.json").read_text())["identity"]}
    write_json(theirs / "state.json", state)
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"checkpoint's lm_head.weight is \(50, 32\), the drafter's \(97, 32\)"):
        run("swapped", checkpoint_every=2)
    assert (ours / "tensors.safetensors").is_file()


def test_gradients_that_are_not_finite_end_the_run(run, synthetic_store, monkeypatch):
    """One bad row is skipped an epoch, and kept as a batch; where every one is bad, the run ends, its drafter stays.

    Not looked at before training: the states past the first so many tokens.
    """
    monkeypatch.setattr("eagle3nb.drafter.train.SCALED", 50)
    store = synthetic_store(rows=40, seed=2)
    bad = int(split(store, 0.15)[0][7])
    store.rows[bad].last = torch.full_like(store.rows[bad].last, float("nan"))
    with pytest.raises(UserError, match="initialise: fitted gives weights that are not finite"):
        run("fitted", store=store)
    done = run("one", store=store, epochs=3, initialise="head")
    skipped = [line["step"] for line in of(done.metrics, "train") if line["skipped"]]
    assert len(skipped) == 3 and len(of(done.metrics, "train")) > 15
    files = sorted((done.folder / "skipped").iterdir())
    assert [path.name for path in files] == [f"step-{step:06d}.json" for step in skipped]
    kept = json.loads(files[0].read_text())
    rows = {row["row"]: row["ids"] for pack in kept["packs"] for row in pack}
    assert rows[bad] == store.rows[bad].ids.tolist() and kept["loss"] is None
    for i in split(store, 0.15)[0][6:]:
        store.rows[i].last = torch.full_like(store.rows[i].last, float("nan"))
    with pytest.raises(UserError, match=r"^11 steps in a row .*\(.*/skipped/step-00000.*.json has the first"):
        run("nan", store=store, epochs=9, pack_tokens=500, accumulate=1, initialise="head")
    assert len(list((run.folder / "nan" / "skipped").iterdir())) == 3
    assert (run.folder / "nan" / "model.safetensors").is_file()


def test_states_that_are_no_numbers_are_named_before_training(run, synthetic_store):
    store = synthetic_store(rows=40, seed=2)
    bad = int(split(store, 0.15)[0][7])
    store.rows[bad].aux[3, 5] = float("inf")
    with pytest.raises(UserError, match=f"the states of row {bad} are not finite"):
        run("infinite", store=store)


def test_patience_ends_the_run_and_a_resumed_one_alike(run):
    """A learning rate that ruins the start: the first evaluation stays the best, so two more end it."""
    settings = {"epochs": 20, "learning_rate": 30.0, "warmup_share": 0.0, "initialise": "head", "evaluate_every": 3,
                "checkpoint_every": 1}
    whole = run("whole", patience=2, **settings)
    curve, end = of(whole.metrics, "validation"), whole.metrics[-1]
    best = max(range(len(curve)), key=lambda i: curve[i]["acceptance"])
    assert len(curve) == best + 3 and end["step"] == curve[-1]["step"] < whole.metrics[0]["steps"]
    assert end["early"] and end["total_tokens"] == end["tokens"] and end["best"] == curve[best] == whole.best
    with pytest.raises(KeyboardInterrupt):
        run("halved", patience=2, stop_after=end["step"] - 2, **settings)
    resumed = run("halved", patience=2, **settings)
    assert resumed.metrics[-1]["step"] == end["step"] and resumed.metrics[-1]["early"]
    again = run("halved", patience=2, **settings)               # which had ended: nothing is trained on
    assert len(again.metrics) == len(resumed.metrics)
    assert "early" not in run("patient", epochs=2, patience=50, learning_rate=1e-3).metrics[-1]


def test_evaluations_tell_sources_apart(run, tmp_path, synthetic_store):
    """Rows of two datasets; what each one's figures are, by a run on that one alone."""
    store = synthetic_store(rows=40, seed=2)
    held = split(store, 0.3)[1]
    of_row = np.array(["A2_chat" if i % 2 else "B1_tools" for i in range(40)])
    index = pd.DataFrame({"source": pd.Categorical(of_row), "tokens": store.lengths, "supervised": 1, "offset": 0,
                          "bytes": 1})
    folder = tmp_path / "corpus"
    folder.mkdir()
    index.to_parquet(folder / "index.parquet")
    (folder / "merged.jsonl").write_bytes(b"x")
    write_json(folder / "merge.json", {"bytes": 1, "index_xxh3": xxh3_file(folder / "index.parquet"), "vocab_size": 97,
                                       "corpus_hash": "synthetic"})
    settings = {"store": store, "epochs": 1, "validation_share": 0.3}
    plain, told = run("plain", **settings), run("told", corpus=str(folder), **settings)
    for ours, theirs in zip(of(told.metrics, "validation"), of(plain.metrics, "validation"), strict=True):
        sources = ours.pop("sources")
        assert set(sources) == {"A2_chat", "B1_tools"} and "sources" not in theirs
        for key in set(ours) - {"kind", "seconds"}:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5, err_msg=key)
        assert sum(source["counted"] for source in sources.values()) == ours["counted"][0]
    model = DraftModel.load(told.folder, store.embedding())
    for name, found in told.best["sources"].items():           # the chosen drafter, over that source's rows alone
        prefix, counts = TeacherPrefix(3), None
        for i in held[of_row[held] == name]:
            pack = make_pack([store.row(int(i))], np.ones(97, bool), 3)
            (scales,) = loss_scales([pack], 1.0, "slot")
            with torch.no_grad():
                _, one, hits = pack_loss(model, pack, store.lm_head_rows(range(97)), scales)
            counts = one if counts is None else counts + one
            prefix.add(*chain_tables(pack, hits))
        loss = float((0.8 ** np.arange(3) * counts.mean_loss).sum())
        assert found == {"loss": pytest.approx(loss, rel=1e-4), "acceptance": pytest.approx(prefix.length, abs=1e-4),
                         "counted": counts.counted[0]}
    write_json(folder / "merge.json", json.loads((folder / "merge.json").read_text()) | {"corpus_hash": "another"})
    assert "sources" not in run("other", corpus=str(folder), **settings).metrics[1]


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
