"""The page of a comparison: what can be claimed first, then curves, sources, settings, data, time and size."""

import math
from html import escape
from pathlib import Path
from urllib.parse import quote

from eagle3nb.drafter import curves
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, resolve, shown
from eagle3nb.record import charts, compare, index, page, runs, tables
from eagle3nb.record.charts import Series
from eagle3nb.record.compare import Comparison, claim, evaluated
from eagle3nb.record.runs import Run, at

STYLE = charts.STYLE + """
.claims li { margin: .4rem 0; } .claims .no { opacity: .85; }
"""


def main(names: list[str], out: str = "") -> None:
    """`eagle3nb compare`: the page, by default in outputs/, and what it claims on the console."""
    found = compare.compare(names)
    path = resolve(out) if out else runs.outputs() / compare.file_name(found)
    if path.suffix != ".html" or path.is_dir():
        raise UserError(f"--out {shown(path)}: give the name of an .html file")
    if path.name == "index.html" or runs.read_run(path.parent).twins:
        raise UserError(f"--out {shown(path)}: a record may stand there; choose another name or folder")
    write(found, path)
    for line in (*found.warnings, *(claim(pair, found.runs[0]) for pair in found.pairs if found.steps)):
        print(line)
    index.write_runs(runs.outputs())
    print(f"Open {shown(path)}")


def write(found: Comparison, path: Path) -> Path:
    with atomic_write(path) as handle:
        handle.write(html(found, inside=path.parent == runs.outputs()))
    return path


def html(found: Comparison, inside: bool = True) -> str:
    """`inside`: the page lies in outputs/, so that its links to the runs hold."""
    names = [run.name for run in found.runs]
    title = " against ".join([names[0], ", ".join(names[1:])])
    body = f"<h1>{escape(title)}</h1>{head(found, inside)}"
    body += f"<h2>Acceptance length</h2>{acceptance(found)}" if found.steps else ""
    body += training(found)
    body += settings(found)
    for heading, rows, caption, none in (
            ("What they ran with", compare.surroundings(found), "Commit, versions and machine, where they differ",
             "Commit, versions and machine are the same."),
            ("Data", compare.data(found), "Merged corpus by source", "No run has merged a corpus."),
            ("Time and size", compare.costs(found), "Wall time of the stages as last run, memory, sizes, rates", "")):
        body += f"<h2>{heading}</h2>" + (table(rows, caption) if rows else f"<p>{none}</p>")
    links = [("index.html", "all runs")] if inside else []
    return index.styled(f"{title} · eagle3nb", links, body).replace("</style>", STYLE + "</style>", 1)


def table(rows: list[dict], caption: str) -> str:
    return page.strip(tables.table(rows, caption))


def settings(found: Comparison) -> str:
    """What differs; apart, folded, what one of the notebooks did not have: a later version's defaults."""
    rows = compare.settings(found)
    one_sided = [row for row in rows if compare.LACKS in row.values()]
    both = [row for row in rows if compare.LACKS not in row.values()]
    body = "<h2>Settings</h2>" + (table(both, "Parameters that differ") if both else
                                  "<p>Every parameter that the notebooks of both had has the same value.</p>")
    if one_sided:
        body += (f"<details><summary>{len(one_sided)} parameters that not every run’s notebooks had</summary>"
                 f'{table(one_sided, "Parameters of other versions of the notebooks")}</details>')
    return body


def head(found: Comparison, inside: bool) -> str:
    """Which line is which run, what was found, and what makes them unlike in kind."""
    items = "".join(f'<li class="{"" if pair.rows else "no"}">{escape(claim(pair, found.runs[0]))}</li>'
                    for pair in found.pairs) if found.steps else ""
    notes = [*found.warnings, *(f"{pair.run.name}: {note}" for pair in found.pairs for note in pair.notes)]
    body = charts.legend([run.name for run in found.runs])
    if inside:
        links = (f'<a href="{quote(run.name)}/index.html">{escape(run.name)}</a> ({escape(runs.started(run))})'
                 for run in found.runs if (run.folder / "index.html").exists())
        body += f"<p>Records: {', '.join(links)}</p>"
    body += f'<ul class="claims">{items}</ul>' if items else ""
    return body + "".join(f"<p>⚠ {escape(note)}</p>" for note in notes)


def acceptance(found: Comparison) -> str:
    """By drafted tokens and by source: figures, then tables; intervals are 95 % bootstraps over prompts."""
    rows = {run.name: evaluated(run) for run in found.runs}
    by_steps, last = [], []
    for place, (name, known) in enumerate(rows.items()):
        total = sorted((r for r in known if r["source"] == "all"), key=lambda r: r["steps"])
        by_steps.append(series(name, place, total, [r["steps"] for r in total]))
        last += [f"{name} {total[-1]['tau']:.2f} with {total[-1]['steps']}"] if total else []
    names = sorted({r["source"] for known in rows.values() for r in known if r["source"] != "all"})
    by_source = []
    for place, (name, known) in enumerate(rows.items()):
        there = {r["source"]: r for r in known if r["steps"] == found.steps}
        by_source.append(series(name, place, [there.get(source, {}) for source in names], []))
    steps = found.steps
    figures = charts.lines(by_steps, "drafted tokens a verify", "acceptance length (tokens a verify)",
                           f"Acceptance length by drafted tokens, bars are 95 % intervals: {'; '.join(last)}.")
    figures += charts.dots(names, by_source, "acceptance length (tokens a verify)",
                           f"Acceptance length by source with {steps} drafted tokens, bars are 95 % intervals.")
    body = f'<div class="charts">{figures}</div>'
    body += table(compare.sources(found), f"By source, {steps} drafted tokens; in brackets 95 % intervals over prompts"
                                          + ", of differences paired ones" * any(pair.rows for pair in found.pairs))
    return body + table(compare.by_steps(found), "All sources, by drafted tokens a verify")


def series(name: str, place: int, rows: list[dict], x: list[float]) -> Series:
    return Series(name, x, [at(r, "tau", float) or math.nan for r in rows], place,
                  [at(r, "low", float) for r in rows], [at(r, "high", float) for r in rows])


def training(found: Comparison) -> str:
    """Loss and held-out acceptance against tokens seen, from each run's own metrics.jsonl; and which lacks one."""
    lines, lacking = {}, []
    for run in found.runs:
        path, why = runs.work_file(run, "training", "drafter/metrics.jsonl")
        lines[run.name] = curves.read_metrics(path) if path else []
        lacking += [] if path else [f"No curve of {run.name}: {why}."]
    trained = [curves.of_kind(known, "train") for known in lines.values()]
    held_out = [curves.of_kind(known, "validation") for known in lines.values()]
    unit, name = scale_of([*trained, *held_out])
    losses = [Series(run, seen(known, unit), curves.smooth(curves.mean_loss(known)).tolist(), place)
              for place, (run, known) in enumerate(zip(lines, trained, strict=True)) if known]
    tested = [Series(run, seen(known, unit), curves.mean_loss(known).tolist(), place)
              for place, (run, known) in enumerate(zip(lines, held_out, strict=True)) if known]
    lengths = [Series(one.name, one.x, [row["acceptance"] for row in held_out[one.place]], one.place) for one in tested]
    figures = charts.lines(losses, name, "training loss (nats)", "Training loss a slot, mean of the steps, smoothed; "
                           f"at the end {ends(losses)}.", markers=False)
    figures += charts.lines(tested, name, "held-out loss (nats)", "Loss on held-out rows, mean of the steps; at the "
                            f"end {ends(tested)}.")
    figures += charts.lines(lengths, name, "held-out acceptance (tokens)", "Acceptance length on held-out rows, joint "
                            f"prefix against the teacher's argmax; at the end {ends(lengths)}.")
    body = f'<div class="charts">{figures}</div>' if figures else ""
    body += "".join(f'<p class="quiet">{escape(said)}</p>' for said in lacking)
    return f"<h2>Training</h2>{body}" if any(ended_training(run) for run in found.runs) else ""


def ended_training(run: Run) -> bool:
    return compare.ended(run, "training") is not None


def scale_of(lines: list[list[dict]]) -> tuple[float, str]:
    most = max((row["tokens"] for known in lines for row in known), default=0)
    return (1e6, "tokens seen (millions)") if most > 5e6 else (1e3, "tokens seen (thousands)")


def seen(lines: list[dict], unit: float) -> list[float]:
    return [row["tokens"] / unit for row in lines]


def ends(drawn: list[Series]) -> str:
    return ", ".join(f"{one.name} {one.y[-1]:.2f}" for one in drawn)
