"""Paired intervals against their normal approximation and against a loop, and every answer that is not the same."""

import numpy as np
import pandas as pd
import pytest

from eagle3nb.acceptance import comparison, offline
from eagle3nb.errors import UserError


def counts(accepted, verifies=None, sources=None, steps=3, tokens=None) -> pd.DataFrame:
    n = len(accepted)
    verifies = np.full(n, 1) if verifies is None else verifies
    sources = ["chat"] * n if sources is None else sources
    tokens = np.full(n, 9) if tokens is None else tokens
    return pd.DataFrame({"id": [f"p{i}" for i in range(n)], "source": sources, "looping": False, "steps": steps,
                         "tokens": tokens, "verifies": verifies, "accepted": accepted, "delivered": 8})


def test_the_interval_of_a_difference_is_paired():
    """One verify a prompt: the difference is a mean of 500 differences, ± 1.96 σ / √500; unpaired, 7 × that."""
    rng = np.random.default_rng(0)
    old = rng.normal(20, 5, 500)
    gain = rng.normal(1, 1, 500)
    base, other = comparison.compare({"old": counts(old), "new": counts(old + gain)}, "old", 3, bootstrap=8000,
                                     seed=1)[:2]
    half = 1.96 * gain.std() / np.sqrt(500)
    assert other["difference"] == pytest.approx(gain.mean())
    assert other["difference_low"] == pytest.approx(gain.mean() - half, abs=0.008)
    assert other["difference_high"] == pytest.approx(gain.mean() + half, abs=0.008)
    assert other["better_share"] == np.mean(gain > 0)
    assert other["tau"] == pytest.approx(1 + (old + gain).mean()) and other["prompts"] == 500
    assert other["high"] - other["low"] > 5 * (other["difference_high"] - other["difference_low"])
    names = ("difference", "difference_low", "difference_high", "better_share")
    assert base["drafter"] == "old" and all(base[name] is None for name in names)


def test_against_a_loop_with_unequal_verifies():
    rng = np.random.default_rng(3)
    sources = ["b", "a"] * 10
    tables = {name: counts(rng.integers(0, 20, 20), rng.integers(5, 12, 20), sources) for name in ("x", "y", "z")}
    tables["z"] = tables["z"].sample(frac=1, random_state=1)  # in another order
    rows = comparison.compare(tables, "y", 3, bootstrap=400, seed=5)
    assert [(r["source"], r["drafter"]) for r in rows] == [(s, d) for s in ("all", "a", "b") for d in "xyz"]
    for row in rows:
        one, two = (tables[name].set_index("id") for name in (row["drafter"], "y"))
        ids = [f"p{i}" for i in range(20) if row["source"] in ("all", sources[i])]
        drawn = np.random.default_rng(5).integers(len(ids), size=(400, len(ids)))
        taus, gains = [], []
        for draw in drawn:
            tau, other = (1 + sum(t["accepted"][ids[j]] for j in draw) / sum(t["verifies"][ids[j]] for j in draw)
                          for t in (one, two))
            taus.append(tau)
            gains.append(tau - other)
        assert (row["low"], row["high"]) == pytest.approx(tuple(np.quantile(taus, [0.025, 0.975])))
        if row["drafter"] == "y":
            continue
        found = row["difference_low"], row["difference_high"]
        assert found == pytest.approx(tuple(np.quantile(gains, [0.025, 0.975])))
        rates = [t["accepted"][ids] / t["verifies"][ids] for t in (one, two)]
        better = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(*rates, strict=True)]
        assert row["better_share"] == pytest.approx(np.mean(better))


def test_its_figures_are_those_of_the_acceptance_table():
    rng = np.random.default_rng(4)
    tables = {name: counts(rng.integers(0, 20, 12), rng.integers(5, 12, 12), ["a", "b", "c"] * 4) for name in "xy"}
    rows = {(r["source"], r["drafter"]): r for r in comparison.compare(tables, "x", 3, bootstrap=100, seed=2)}
    for name, table in tables.items():
        for row in offline.acceptance(table, bootstrap=100, seed=2):
            assert {key: row[key] for key in ("tau", "low", "high", "prompts")}.items() <= (
                rows[row["source"], name].items())


def test_the_same_drafter_twice():
    rng = np.random.default_rng(1)
    table = counts(rng.integers(0, 9, 30), rng.integers(3, 9, 30))
    _, again = comparison.compare({"a": table, "b": table}, "a", 3, bootstrap=50, seed=1)[:2]
    assert again["difference"] == again["difference_low"] == again["difference_high"] == 0
    assert again["better_share"] == 0.5


def test_one_prompt_and_none_verified():
    sources = ["chat", "chat", "code", "none"]
    a, b = (counts([1, 2, n, 0], [1, 1, 2, 0], sources, tokens=[9, 9, 9, 1]) for n in (1, 3))
    rows = {r["source"]: r for r in comparison.compare({"a": a, "b": b}, "a", 3, bootstrap=50, seed=1)
            if r["drafter"] == "b"}
    assert rows["code"]["difference"] == 1.0 and rows["code"]["difference_low"] is None and rows["code"]["low"] is None
    assert rows["none"]["tau"] is None and rows["none"]["difference"] is None and rows["none"]["prompts"] == 1
    assert rows["chat"]["difference_low"] == rows["chat"]["difference_high"] == 0
    assert comparison.sentence(rows["code"]) == "1.50 → 2.50, +1.00 on the same 1 prompt"
    with pytest.raises(ValueError, match="no difference"):
        comparison.sentence(rows["none"])


def test_a_sentence_and_a_table():
    row = {"source": "all", "drafter": "new", "tau": 2.95, "low": 2.8, "high": 3.1, "difference": 0.85,
           "difference_low": 0.70, "difference_high": 1.00, "better_share": 0.9, "prompts": 80}
    assert comparison.sentence(row) == "2.10 → 2.95, +0.85 [0.70, 1.00] on the same 80 prompts"
    base = {**row, "drafter": "old", "tau": 2.1, **dict.fromkeys(("difference", "difference_low", "difference_high"))}
    table = comparison.table([base, row, {**row, "source": "chat"}])
    assert table["drafter"].tolist() == ["old", "new"]
    assert set(map(str, table.dtypes[["tau", "difference", "below"]])) == {"float64"}
    assert table["below"].iloc[1] == pytest.approx(0.15) and table["difference_above"].iloc[1] == pytest.approx(0.15)
    assert np.isnan(table["difference_below"].iloc[0])


def test_other_prompts_are_refused():
    table = counts([1, 2, 3])
    with pytest.raises(UserError, match="baseline 'c' is none of the drafters a, b"):
        comparison.compare({"a": table, "b": table}, "c", 3, bootstrap=9, seed=1)
    with pytest.raises(UserError, match=r"drafter a: no counts for 5 drafted tokens, only for \[3\]"):
        comparison.compare({"a": table}, "a", 5, bootstrap=9, seed=1)
    with pytest.raises(UserError, match="a and b were not evaluated on the same prompts .*chat/p2"):
        comparison.compare({"a": table, "b": counts([1, 2])}, "a", 3, bootstrap=9, seed=1)
    with pytest.raises(UserError, match="not evaluated on the same prompts"):
        comparison.compare({"a": table, "b": table.assign(source="code")}, "a", 3, bootstrap=9, seed=1)
    texts = table.assign(text=["x", "y", "z"])
    assert len(comparison.compare({"a": texts, "b": texts, "c": table}, "a", 3, bootstrap=9, seed=1)) == 6
    with pytest.raises(UserError, match="a and b saw different answers to chat/p2 of as many tokens"):
        comparison.compare({"a": texts, "b": texts.assign(text=["x", "y", "w"])}, "a", 3, bootstrap=9, seed=1)
    with pytest.raises(UserError, match=r"different answers to chat/p1 \(9 and 8 tokens\)"):
        comparison.compare({"a": table, "b": counts([1, 2, 3], tokens=[9, 8, 9])}, "a", 3, bootstrap=9, seed=1)
