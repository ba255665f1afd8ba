"""The merge's books: what was read, kept, copied and skipped, by source; the index; tables for the record."""

from collections import Counter
from pathlib import Path

import numpy as np

from eagle3nb.corpus.decision import Tally, accounting_lines
from eagle3nb.corpus.rows import Rows
from eagle3nb.corpus.selection import Selection
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, xxh3_file

__all__ = ["Tally", "account", "accounting_lines", "against_forecast", "draw", "fill", "mix", "skipped", "totals",
           "validation", "xxh3_file"]
COUNTS = {"tokens": "tokens", "supervised": "supervised", "teacher_positions": "teachers"}


def fill(tallies: list[Tally], rows: Rows, chosen: Selection) -> None:
    """What is written and what the selection took out, into the tallies, which hold already what the first pass did."""
    for reason, which in chosen.removed:
        for source, count in zip(*np.unique(rows.columns["source"][which], return_counts=True), strict=True):
            tallies[source].skipped[reason] += int(count)
    source = rows.columns["source"][chosen.rows]
    for number, tally in enumerate(tallies):
        mine = chosen.rows[source == number]
        tally.records = len(mine)
        tally.copies = int((chosen.copy[source == number] > 0).sum())
        for name, column in COUNTS.items():
            setattr(tally, name, int(rows.columns[column][mine].sum()))
        truncated = rows.columns["truncated"][mine]
        tally.truncated_records, tally.truncated_tokens = int((truncated > 0).sum()), int(truncated.sum())


def totals(tallies: list[Tally]) -> dict:
    skipped = sum((tally.skipped for tally in tallies), Counter())
    masks = sum((tally.masks for tally in tallies), Counter())
    names = ("records", "copies", *COUNTS, "truncated_records", "truncated_tokens")
    return {**{name: sum(getattr(tally, name) for tally in tallies) for name in names},
            "skipped": dict(sorted(skipped.items())), "provenance": dict(sorted(masks.items()))}


def validation(rows: Rows, chosen: Selection) -> dict:
    """{records, tokens, first_row} of the validation part, which ends merged.jsonl."""
    held = chosen.rows[len(chosen.rows) - chosen.held:]
    return {"records": chosen.held, "tokens": int(rows.columns["tokens"][held].sum()),
            "first_row": len(chosen.rows) - chosen.held}


def account(report: dict) -> list[dict]:
    """A row a source, for a table: lines read = distinct rows kept + skipped; copies are counted apart."""
    return [{"source": source["name"], "lines read": source["lines"],
             "distinct rows": source["records"] - source["copies"], "skipped": sum(source["skipped"].values()),
             "copies": source["copies"], "records": source["records"], "tokens": source["tokens"],
             "supervised": source["supervised"], "rows cut": source["truncated_records"],
             "tokens cut off": source["truncated_tokens"]} for source in report["sources"]]


def skipped(report: dict) -> list[dict]:
    """A row a source and reason, for a table."""
    found = [{"source": source["name"], "reason": reason, "rows": count}
             for source in report["sources"] for reason, count in source["skipped"].items()]
    return found or [{"source": "all", "reason": "no row was skipped", "rows": 0}]


def draw(ax, report: dict) -> None:
    """Stacked bars, a dataset each: percent of its lines that stay whole, are cut, or are skipped, by reason."""
    sources = [source for source in report["sources"] if source["lines"]]
    names, lines = [source["name"] for source in sources], np.array([source["lines"] for source in sources])
    kept = np.array([source["records"] - source["copies"] for source in sources])
    cut = np.minimum([source["truncated_records"] for source in sources], kept)  # copies of cut rows count there too
    parts = {"kept whole": kept - cut, "kept, cut": cut} | {
        reason: np.array([source["skipped"].get(reason, 0) for source in sources]) for reason in report["skipped"]}
    left = np.zeros(len(sources))
    for i, (name, rows) in enumerate(parts.items()):
        ax.barh(names, 100 * rows / lines, left=left, label=name, hatch="" if i < 7 else "//", edgecolor="white")
        left += 100 * rows / lines
    ax.invert_yaxis()


def mix(index, slices: int = 20):
    """A DataFrame: percent of the tokens by source (columns) in each slice of the training order (index: its middle, in
    percent)."""
    slices = max(1, min(slices, len(index) // 50))  # fewer rows a slice would show chance, not the shuffle
    slice_of = np.arange(len(index)) * slices // len(index)
    tokens = index.groupby([slice_of, index["source"]], observed=False)["tokens"].sum().unstack(fill_value=0)
    tokens.index = (tokens.index + 0.5) * 100 / slices
    return 100 * tokens.div(tokens.sum(axis=1), axis=0)


def against_forecast(report: dict, plan_path: str | Path) -> str:
    """A sentence on how the merge compares with the audit's forecast in plan.json.

    Raises UserError where the audit looked at the same sources under the same rules and yet foretold other counts.
    """
    forecast = (read_json(plan_path) if Path(plan_path).is_file() else {}).get("forecast")
    if not forecast:
        return "The audit has left no forecast to compare with."
    for name, value in forecast["settings"].items():
        if report[name] != value:
            return f"The audit's forecast was made with another {name}; there is nothing to compare."
    if forecast["sources"] != report["sources"]:
        pairs = zip(forecast["lines"], accounting_lines(report["sources"]), strict=False)
        told, found = next((pair for pair in pairs if pair[0] != pair[1]), ("other skips or masks", "these"))
        raise UserError(f"the merge is not what the audit foretold: {told.strip()!r}, but {found.strip()!r}; "
                        "the data changed in between: run the audit again")
    return "Every line is as the audit foretold."
