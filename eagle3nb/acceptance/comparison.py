"""Several drafters on the same answers: one table with paired intervals, so that "2.1 → 2.95" is a claim with an error
bar. Every resample draws the same prompts for all drafters: what makes a prompt easy for one makes it easy for others,
so a difference is known far better than either figure."""

import numpy as np
import pandas as pd

from eagle3nb.acceptance import offline
from eagle3nb.errors import UserError


def compare(counts_by_name: dict[str, pd.DataFrame], baseline: str, steps: int, *, bootstrap: int,
            seed: int) -> list[dict]:
    """Rows {source, drafter, tau, low, high, difference, difference_low, difference_high, better_share, prompts}.

    `counts_by_name`: offline.counts (or sampled.counts) of each drafter. Source "all" first, then each by name; in each
    the drafters in their order. difference: τ less the baseline's, with its paired 95 % interval. better_share: of the
    prompts that were verified, those where more drafts a verify were accepted than by the baseline, equal ones by half.
    None where there is nothing to tell: of the baseline itself, without a verify, intervals of one prompt.

    Raises UserError for an unknown baseline or number of steps and where the prompts or answers differ.
    """
    if baseline not in counts_by_name:
        raise UserError(f"baseline {baseline!r} is none of the drafters {', '.join(counts_by_name)}")
    tables = {name: _of_steps(name, counts, steps) for name, counts in counts_by_name.items()}
    tables = {name: _aligned(name, table, baseline, tables[baseline]) for name, table in tables.items()}
    rows = []
    for source in ("all", *sorted(tables[baseline]["source"].unique())):
        parts = {name: table if source == "all" else table[table["source"] == source]
                 for name, table in tables.items()}
        drawn = offline.resamples(len(parts[baseline]), bootstrap, seed)
        for name, part in parts.items():
            base = None if name == baseline else parts[baseline]
            rows.append({"source": source, "drafter": name, **_figures(part, base, drawn)})
    return rows


def _of_steps(name: str, counts: pd.DataFrame, steps: int) -> pd.DataFrame:
    table = counts[counts["steps"] == steps]
    if table.empty:
        raise UserError(f"drafter {name}: no counts for {steps} drafted tokens, only for "
                        f"{sorted(counts['steps'].unique().tolist())}")
    return table.set_index(["source", "id"], drop=False, verify_integrity=True)


def _aligned(name: str, table: pd.DataFrame, baseline: str, other: pd.DataFrame) -> pd.DataFrame:
    """The table in the baseline's order. Raises UserError unless both are of the same answers."""
    if different := table.index.symmetric_difference(other.index).tolist():
        source, prompt = different[0]
        raise UserError(f"drafters {baseline} and {name} were not evaluated on the same prompts ({len(different)} "
                        f"stand in one of them alone, as {source}/{prompt}); evaluate both with the same settings")
    table = table.loc[other.index]
    if (unequal := table["tokens"] != other["tokens"]).any():
        source, prompt = table.index[unequal.to_numpy()][0]
        raise UserError(f"drafters {baseline} and {name} saw different answers to {source}/{prompt} "
                        f"({other['tokens'][source, prompt]} and {table['tokens'][source, prompt]} tokens); evaluate "
                        "both with the same target and settings")
    if "text" in table and "text" in other and (unequal := table["text"] != other["text"]).any():
        source, prompt = table.index[unequal.to_numpy()][0]
        raise UserError(f"drafters {baseline} and {name} saw different answers to {source}/{prompt} of as many tokens; "
                        "evaluate both with the same target and settings")
    return table


def _figures(part: pd.DataFrame, base: pd.DataFrame | None, drawn: np.ndarray) -> dict:
    names = ("tau", "low", "high", "difference", "difference_low", "difference_high", "better_share")
    figures, verified = dict.fromkeys(names), part["verifies"].to_numpy() > 0
    if verified.any():
        figures["tau"] = _tau(part)
        figures["difference"] = None if base is None else figures["tau"] - _tau(base)
        figures["better_share"] = None if base is None else _better(part[verified], base[verified])
    if verified.sum() > 1:
        taus = offline.resampled(part["accepted"], part["verifies"], drawn)
        figures["low"], figures["high"] = offline.ends(taus)
        if base is not None:
            gains = taus - offline.resampled(base["accepted"], base["verifies"], drawn)
            figures["difference_low"], figures["difference_high"] = offline.ends(gains)
    return {**figures, "prompts": len(part)}


def _tau(part: pd.DataFrame) -> float:
    return 1 + float(part["accepted"].sum() / part["verifies"].sum())


def _better(part: pd.DataFrame, base: pd.DataFrame) -> float:
    gains = part["accepted"] / part["verifies"] - base["accepted"] / base["verifies"]
    return float(((gains > 0) + 0.5 * (gains == 0)).mean())


def sentence(row: dict) -> str:
    """A row of another drafter than the baseline: "2.10 → 2.95, +0.85 [0.70, 1.00] on the same 80 prompts"."""
    if row["difference"] is None:
        raise ValueError(f"no difference to tell of {row['drafter']} in {row['source']}")
    before = row["tau"] - row["difference"]
    between = (f" [{row['difference_low']:.2f}, {row['difference_high']:.2f}]" if row["difference_low"] is not None
               else "")
    return (f"{before:.2f} → {row['tau']:.2f}, {row['difference']:+.2f}{between} on the same {row['prompts']} "
            f"{'prompt' if row['prompts'] == 1 else 'prompts'}")


def table(rows: list[dict], source: str = "all") -> pd.DataFrame:
    """The rows of one source as floats, ready to plot: `below` and `above` are the lengths of τ's error bars, and
    `difference_below`, `difference_above` those of the difference."""
    figures = offline.select(rows, source=source)
    names = [name for name in figures if name not in ("source", "drafter", "prompts")]
    figures = figures.astype(dict.fromkeys(names, "float64"))
    return figures.assign(below=figures["tau"] - figures["low"], above=figures["high"] - figures["tau"],
                          difference_below=figures["difference"] - figures["difference_low"],
                          difference_above=figures["difference_high"] - figures["difference"])
