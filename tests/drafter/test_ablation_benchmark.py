"""The ablation's own arithmetic and bookkeeping: intervals over prompts and seeds, runs that stand, time that ends."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
import yaml

from eagle3nb.drafter.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("ablation_benchmark", ROOT / "tests/benchmarks/ablation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(tau, first=0):
    """A run on 40 prompts of 30 verifies each: tau [40] or a figure, the prompts' numbers from `first`."""
    accepted = 30 * (np.broadcast_to(tau, 40) - 1)
    return {"prompts": list(range(first, first + 40)), "verifies": [30] * 40, "accepted": accepted.tolist(),
            "coverage": 0.97, "validation": 1.5, "wall_s": 60.0, "best_step": 8, "steps": 9}


def test_taus_are_ratios_of_sums(ablation):
    rng = np.random.default_rng(0)
    accepted, verifies = rng.integers(0, 40, (3, 7)), rng.integers(1, 30, (3, 7))
    drawn = rng.integers(7, size=(5, 7))
    found = ablation.taus(accepted.astype(float), verifies.astype(float), drawn)
    assert found.shape == (5, 3)
    for b in range(5):
        for s in range(3):
            sums = [sum(table[s, i] for i in drawn[b]) for table in (accepted, verifies)]
            assert found[b, s] == pytest.approx(1 + sums[0] / sums[1], rel=1e-12)


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_the_interval_of_seeds_alone_is_as_wide_as_it_should_be(ablation, seeds):
    """Prompts all alike: what is left is the noise of a mean over n seeds, σ/√n, which resampling alone would put at
    √((n − 1)/n) of it. Over 400 such experiments the mean variance is right to 15 % (its own error is
    √(2/(n−1)/400), 7 % at two seeds)."""
    rng = np.random.default_rng(seeds)
    variances = []
    for _ in range(400):
        per_seed = np.broadcast_to(0.05 * rng.standard_normal(seeds), (500, seeds))
        variances.append(ablation.resampled(per_seed, rng).var())
    assert np.mean(variances) == pytest.approx(0.05 ** 2 / seeds, rel=0.15)


def test_the_interval_over_prompts_is_that_of_the_evaluation(ablation):
    """One seed: the percentile interval of offline.interval, with the same draws."""
    from eagle3nb.acceptance import offline

    run = run_of(1.6 + 0.3 * np.random.default_rng(1).standard_normal(40))
    (row,) = ablation.figures({"demo": [run]}, bootstrap=500, seed=3)
    low, high = offline.interval(run["accepted"], run["verifies"], bootstrap=500, seed=3)
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-12)
    assert row["acceptance"] == pytest.approx(1 + np.sum(run["accepted"]) / 1200) and row["less base"] is None


def test_a_difference_is_paired_over_prompts_and_told_from_noise(ablation):
    """Prompts differ far more than the rows: unpaired, nothing would be seen. The smaller difference is noise, though
    one seed alone would call it worse, and the label says that there is but one."""
    easy = 0.3 * np.random.default_rng(2).standard_normal(40)
    tables = {name: [run_of(tau + easy + shift) for shift in noise * np.array([-1.0, 0.2, 0.8])]
              for name, tau, noise in (("demo", 1.6, 0.01), ("steps-1", 1.5, 0.01), ("fc-norm", 1.605, 0.02))}
    base, worse, same = ablation.figures(tables, bootstrap=1000)
    assert base["high"] - base["low"] > 0.12
    assert worse["verdict"] == "worse" and worse["less base"] == pytest.approx(-0.1) and worse["to"] < -0.05
    assert same["verdict"] == "noise" and same["from"] < 0.005 < same["to"]
    single = ablation.figures({name: runs[:1] for name, runs in tables.items()}, bootstrap=100)
    assert [row["verdict"] for row in single] == ["", "worse, one seed", "worse, one seed"]
    others = ablation.figures({"demo": tables["demo"], "fc-norm": [run_of(1.6, first=1)]}, bootstrap=100)
    assert others[1]["verdict"] == "", "other prompts are not compared"
    shown = ablation.shown_rows([base, worse, same])
    assert shown[1]["less demo"] == "-0.100" and shown[1]["best at"] == "8 of 9" and shown[0]["95 % of it"] == ""


class Maker:
    """Stands for a training: counts its calls, and runs out of time at the n-th."""

    def __init__(self, ends_at=None):
        self.calls, self.ends_at = [], ends_at

    def __call__(self, row, seed):
        self.calls.append((row, seed))
        if len(self.calls) == self.ends_at:
            raise TimeoutError
        return {"accepted": [1]}


def test_finished_runs_stand_and_the_next_call_goes_on(ablation, tmp_path):
    path, jobs = tmp_path / "ablation.json", [("a", 1), ("b", 1), ("a", 2)]

    def of(row, seed):
        return f"{row}{seed}"

    first, second, third = Maker(ends_at=2), Maker(), Maker()
    runs, done = ablation.carry_out(jobs, of, path, first, float("inf"))
    assert not done and list(runs) == ["a/1"] and first.calls == [("a", 1), ("b", 1)]
    assert json.loads(path.read_text())["spent"]["b/1"]["of"] == "b1"
    kept = json.loads(path.read_text())
    kept["spent"]["b/1"]["seconds"] = 1000.0
    path.write_text(json.dumps(kept))
    runs, done = ablation.carry_out(jobs, of, path, second, float("inf"))
    assert done and second.calls == [("b", 1), ("a", 2)] and 1000 <= runs["b/1"]["wall_s"] < 1900
    assert ablation.carry_out(jobs, of, path, third, float("inf"))[1] and not third.calls
    changed = Maker()
    ablation.carry_out(jobs, lambda row, seed: of(row, seed) + "!" * (row == "b"), path, changed, float("inf"))
    assert changed.calls == [("b", 1)], "what a run depends on has changed"
    assert ablation.carry_out([("c", 1)], of, path, third, 0.0) == (json.loads(path.read_text())["runs"], False)
    assert not third.calls


def test_every_row_is_a_training_that_differs_from_the_demo(ablation):
    parameters = {}
    for file in ("common", "training"):
        parameters |= yaml.safe_load((ROOT / "params/demo" / f"{file}.yml").read_text())

    def settings(changes):
        return Settings.of(parameters | changes, states="s", drafter="d", target="t", corpus="c")

    for name, changes in ablation.ROWS.items():
        assert (settings(changes) == settings({})) == (not set(changes) - {"draft_vocab_size"}), name
        assert all(parameters.get(key) != value for key, value in changes.items()), name
    assert set(ablation.QUICK) <= set(ablation.ROWS) and next(iter(ablation.ROWS)) == ablation.BASE


def test_options(ablation):
    assert ablation.parsed(["--row", "fc-norm"]).rows == ["fc-norm"]
    quick = ablation.parsed(["--quick"])
    assert (quick.rows, quick.seeds, quick.epochs, quick.json) == (list(ablation.QUICK), [1], 1,
                                                                  "outputs/ablation-quick.json")
    with pytest.raises(SystemExit):
        ablation.parsed(["--row", "nothing"])


def test_no_benchmark_hides_a_library():
    """A script's folder comes first on its path: a kernels.py there was taken by Transformers for Hugging Face's, which
    it looks for and need not be installed."""
    ours = {path.stem for path in (ROOT / "tests/benchmarks").glob("*.py")}
    looked_for = set(transformers.utils.import_utils.BACKENDS_MAPPING) | {"kernels"}
    assert not ours & (looked_for | set(importlib.metadata.packages_distributions()) | sys.stdlib_module_names)
