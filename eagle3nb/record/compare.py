"""Runs beside one another: what was set otherwise, curves over each other, and the difference in acceptance length with
its paired interval, where two runs walked the same answers. Where they did not, the page says why and claims nothing.

    found = compare(["demo", "wider"])
    claim(found.pairs[0], found.runs[0])    demo → wider: 1.60 → 1.62, +0.02 [0.01, 0.03] on the same 55 …
"""

from dataclasses import dataclass

import pandas as pd

from eagle3nb.acceptance import comparison
from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.record import runs
from eagle3nb.record.declared import STAGES
from eagle3nb.record.runs import STEPS, Run, at
from eagle3nb.record.tables import number, size, span


@dataclass(frozen=True)
class Pair:
    """Another run against the first. `rows`: comparison.compare's of it, by source, none where `why` says why not.

    `notes`: what limits the pairing where there is one.
    """

    run: Run
    rows: dict[str, dict]
    why: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """`runs`: the first is the baseline. `steps`: drafted tokens of the headline, None where no run was evaluated."""

    runs: list[Run]
    steps: int | None
    pairs: list[Pair]
    warnings: list[str]


def compare(names: list[str]) -> Comparison:
    """UserError for fewer than two runs, one named twice, an unknown one (with the nearest name) or one without a stage
    that ended well."""
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UserError("compare wants two runs or more, each once: eagle3nb compare RUN RUN")
    found = [runs.run_named(name) for name in names]
    for run in found:
        if not any(twin["status"] == "ok" for twin in run.twins.values()):
            raise UserError(f"run {run.name} has no stage that ended well; see outputs/{run.name}")
    steps = common_steps(found)
    return Comparison(found, steps, [pair(found[0], run, steps) for run in found[1:]], warnings(found))


def common_steps(found: list[Run]) -> int | None:
    """STEPS where all evaluated runs have it, else the largest number of drafted tokens that they share."""
    known = [{row["steps"] for row in rows} for run in found if (rows := evaluated(run))]
    shared = set.intersection(*known) if known else set()
    return STEPS if STEPS in shared else max(shared, default=None)


def evaluated(run: Run) -> list[dict]:
    """The evaluation's rows {steps, source, tau, low, high, …} that hold a figure; [] without one that ended well."""
    twin = ended(run, "evaluation")
    rows = at(twin, "result.acceptance", list) or []
    return [r for r in rows if at(r, "steps", int) and at(r, "source", str) and at(r, "tau", float)]


def ended(run: Run, stage: str) -> dict | None:
    twin = run.twins.get(stage)
    return twin if twin and twin["status"] == "ok" else None


def warnings(found: list[Run]) -> list[str]:
    """What makes the runs unlike in kind: another target, other prompts, a stage that is not there."""
    said = []
    if len(targets := {run.name: runs.target(run) for run in found}) and len(set(targets.values())) > 1:
        listed = ", ".join(f"{name}: {target or 'not told'}" for name, target in targets.items())
        said.append(f"Different targets ({listed}): acceptance lengths are of different texts and no measure of "
                    "which drafter is better.")
    asked = {run.name: asked_of(run) for run in found if ended(run, "evaluation")}
    if len(set(asked.values())) > 1:
        said.append("Different prompts: " + "; ".join(f"{name}: {what}" for name, what in asked.items()) + ".")
    if sum(map(bool, map(evaluated, found))) > 1 and common_steps(found) is None:
        said.append("No number of drafted tokens was measured in all runs: no acceptance length to set side by side.")
    for run in found:
        for stage, loss in (("training", "no curve"), ("evaluation", "no acceptance length")):
            if not ended(run, stage):
                said.append(f"Run {run.name} has no {stage} that ended well: {loss} of it.")
        said += [f"Run {run.name}: {wrong}." for wrong in (*run.damaged.values(), *runs.outdated(run))]
    return said


def asked_of(run: Run) -> str:
    """The prompts of an evaluation in words, with the beginning of each file's hash."""
    twin = run.twins["evaluation"]
    sets = [f"{name} {hashed[:8]}".strip() for name, hashed in prompt_files(twin).items()]
    limit, longest = at(twin, "parameters.limit", int), at(twin, "parameters.max_new_tokens", int)
    return ", ".join(filter(None, [*sets, f"limit {limit}" if limit else "",
                                   f"answers of at most {longest:,} tokens" if longest else ""]))


def prompt_files(twin: dict) -> dict[str, str]:
    """{name of a prompts file or set: xxh3, "" of a set} as the evaluation's record has them."""
    names = at(twin, "parameters.prompts", (list, str)) or []
    hashes = {at(e, "path", str): at(e, "xxh3", str) for e in at(twin, "inputs", list) or []}
    return {str(name): hashes.get(name) or "" for name in ([names] if isinstance(names, str) else names)}


# ------------------------------------------------------------------------------------------ pairs


def pair(first: Run, other: Run, steps: int | None) -> Pair:
    """Paired differences of `other` less `first` on the prompts that both walked, or why there are none."""
    why = unlike(first, other) if steps else "they share no number of drafted tokens"
    counts = {}
    for run in () if why else (first, other):
        path, missing = runs.work_file(run, "evaluation", "evaluation/acceptance.json")
        rows = at(read_json(path), "prompts", list) if path else None
        if not rows:
            why = f"the counts of each prompt of run {run.name} are not at hand: {missing or 'an older record'}"
            break
        counts[run.name] = pd.DataFrame(rows)
    if why:
        return Pair(other, {}, why, ())
    counts, left = on_common_prompts(counts)
    asked = at(first.twins["evaluation"], "parameters", dict)
    resamples, seed = at(asked, "bootstrap", int) or 1000, at(asked, "seed", int) or 0
    try:
        rows = comparison.compare(counts, first.name, steps, bootstrap=resamples, seed=seed)
    except UserError as refused:  # other prompts, or other answers
        return Pair(other, {}, str(refused).partition(";")[0], ())
    return Pair(other, {row["source"]: row for row in rows if row["drafter"] == other.name}, "",
                tuple(filter(None, [left, by_length(counts)])))


def unlike(first: Run, other: Run) -> str:
    """Why the two cannot have walked the same answers; "" where the records do not say so."""
    for run in (first, other):
        if not evaluated(run):
            return f"run {run.name} has no acceptance length"
    one, two = (identity(run) for run in (first, other))
    if differ := [name for name in one if name in two and one[name] != two[name]]:
        return f"their targets differ ({', '.join(differ)}), and so do the answers"
    lengths = [at(run.twins["evaluation"], "parameters.max_new_tokens", int) for run in (first, other)]
    if lengths[0] != lengths[1]:
        return f"their answers end at {lengths[0]} and {lengths[1]} tokens (max_new_tokens)"
    files = [prompt_files(run.twins["evaluation"]) for run in (first, other)]
    for name in files[0].keys() & files[1].keys():
        if files[0][name] != files[1][name]:
            return f"{name} was another file in each"
    return ""


def identity(run: Run) -> dict[str, str]:
    """What the records tell of the target: hashes of its config, weights and tokenizer, and its name."""
    told = at(run.twins.get("extraction"), "result.fingerprint", dict) or {}
    hashes = {key: told[key] for key in ("target config", "target weights", "tokenizer") if at(told, key, str)}
    return {"name": runs.target(run), **hashes}


def on_common_prompts(counts: dict[str, pd.DataFrame]) -> tuple[dict[str, pd.DataFrame], str]:
    """The rows of the prompts that all have, and a note where that leaves some out; all where they share none."""
    keys = {name: pd.MultiIndex.from_frame(table[["source", "id"]]) for name, table in counts.items()}
    first, *others = keys.values()
    shared = first[first.isin(others[0])]
    sizes = {name: key.nunique() for name, key in keys.items()}
    if not len(shared) or set(sizes.values()) == {shared.nunique()}:
        return counts, ""
    listed = " and ".join(f"{count} of {name}" for name, count in sizes.items())
    return ({name: counts[name][keys[name].isin(shared)] for name in counts},
            f"Paired on the {shared.nunique()} prompts that both walked, of {listed}.")


def by_length(counts: dict[str, pd.DataFrame]) -> str:
    if all("text" in table for table in counts.values()):
        return ""
    return ("An older record holds no hash of its answers: that they are the same is known of the prompts, the target "
            "and each answer's length alone.")


def claim(pair: Pair, first: Run, source: str = "all") -> str:
    """The pair in a sentence: the difference and whether it is more than these prompts let expect, or why none."""
    row = pair.rows.get(source)
    if row is None or row["difference"] is None:
        return f"{first.name} and {pair.run.name}: not paired, since {pair.why or 'nothing was verified'}."
    low, high = row["difference_low"], row["difference_high"]
    word = ("one prompt tells no interval" if low is None else "better" if low > 0 else "worse" if high < 0 else
            "equal in every resample" if low == high == 0 else "no difference that these prompts could show")
    return f"{first.name} → {pair.run.name}: {comparison.sentence(row)}: {word}."


# ------------------------------------------------------------------------------------------ tables


LACKS = "not declared"  # the notebook of that time had no such parameter


def settings(found: Comparison) -> list[dict]:
    """Rows {stage, parameter, <run>: value} of what differs; a parameter of several stages stands once where it has the
    same values in all. LACKS where a run's notebook did not have it."""
    rows = {}
    for stage in STAGES:
        given = {run.name: run.twins[stage]["parameters"] for run in found.runs if stage in run.twins}
        for name in dict.fromkeys(key for values in given.values() for key in values):
            values = {run: values.get(name, LACKS) for run, values in given.items()}
            if name == "run" or len(given) < 2 or all(v == next(iter(values.values())) for v in values.values()):
                continue
            shown = {run.name: text(values[run.name]) if run.name in values else "–" for run in found.runs}
            if len(set(shown.values())) > 1:
                row = rows.setdefault((name, *shown.values()), {"stages": [], "parameter": name, **shown})
                row["stages"].append(stage)
    return [{"stage": ", ".join(row.pop("stages")), **row} for row in rows.values()]


def text(value) -> str:
    return "“”" if value == "" else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def surroundings(found: Comparison) -> list[dict]:
    """Rows {what, <run>} of commit, versions and machine, where they differ."""
    told = {}
    for run in found.runs:
        facts = at(run.latest, "provenance", dict) or {}
        ram = at(facts, "ram_bytes", int)
        told[run.name] = {"commit": ", ".join(runs.commits(run)),
                          **{f"{k} version": str(v) for k, v in (at(facts, "versions", dict) or {}).items()},
                          "machine": f"{facts.get('system', '')}, {facts.get('cores', '?')} cores"
                          + (f", {size(ram)} RAM" if ram else ""),
                          "GPUs": ", ".join(map(str, at(facts, "gpus", list) or [])) or "none"}
    names = dict.fromkeys(name for facts in told.values() for name in facts)
    rows = [{"what": name, **{run: facts.get(name) or "–" for run, facts in told.items()}} for name in names]
    return [row for row in rows if len(set(list(row.values())[1:])) > 1]


def sources(found: Comparison) -> list[dict]:
    """Rows {source, <run>: acceptance length, …, <run> less <first>: difference} at the headline's drafted tokens."""
    table = {run.name: {row["source"]: row for row in evaluated(run) if row["steps"] == found.steps}
             for run in found.runs}
    names = dict.fromkeys(name for rows in table.values() for name in rows)
    rows = []
    for name in sorted(names, key=lambda name: (name != "all", name)):
        row = {"source": name, **{run: whole(runs.length(known.get(name))) for run, known in table.items()}}
        for pair in found.pairs:
            if pair.rows:
                row[f"{pair.run.name} less {found.runs[0].name}"] = difference(pair.rows.get(name))
        rows.append(row)
    return rows


def difference(row: dict | None) -> str:
    if row is None or row["difference"] is None:
        return "–"
    low, high = row["difference_low"], row["difference_high"]
    between = "" if low is None else f" [{low:+.2f}, {high:+.2f}]"
    return whole(f"{row['difference']:+.2f}{between}".replace("-", "−"))


def whole(text: str) -> str:
    """Not broken over lines, in whatever narrow column it stands."""
    return text.replace(" ", "\u00a0")


def by_steps(found: Comparison) -> list[dict]:
    """Rows {drafted tokens, <run>: acceptance length} over all sources."""
    table = {run.name: {row["steps"]: row for row in evaluated(run) if row["source"] == "all"} for run in found.runs}
    return [{"drafted tokens": steps, **{run: whole(runs.length(rows.get(steps))) for run, rows in table.items()}}
            for steps in sorted({steps for rows in table.values() for steps in rows})]


def data(found: Comparison) -> list[dict]:
    """Rows {source, <run>: records, tokens} of the merged corpora, their totals first."""
    told = {run.name: runs.data(run) for run in found.runs}
    totals = {run: {"records": d["records"], "tokens": d["tokens"]} for run, d in told.items()}
    parts = {run: {row["name"]: row for row in d["sources"]} for run, d in told.items()}
    names = sorted({name for rows in parts.values() for name in rows})
    rows = [{"source": name, **{run: amount(totals[run] if name == "all" else parts[run].get(name)) for run in told}}
            for name in ("all", *names)]
    return rows if any(d["tokens"] is not None for d in told.values()) else []


def amount(row: dict | None) -> str:
    records, tokens = at(row, "records", int), at(row, "tokens", int)
    return "–" if tokens is None else f"{number(records)} records, {number(tokens)} tokens"


SIZES = (  # what, stage, place in the result, how it is written
    ("hidden states on disk", "extraction", "store.bytes", size),
    ("their dtype", "extraction", "store.dtype", str), ("extraction, tokens a second", "extraction",
                                                       "store.tokens_per_s", number),
    ("parameters trained", "training", "parameters_trained", number),
    ("draft vocabulary", "training", "draft_vocab_size", number),
    ("text it covers", "training", "coverage", runs.percent), ("tokens seen", "training", "last.tokens", number),
    ("optimiser steps", "training", "last.step", number), ("training, tokens a second", "training", "tokens_per_s",
                                                           number))


def costs(found: Comparison) -> list[dict]:
    """Rows {what, <run>} of time by stage, peak memory, sizes and rates."""
    rows = []
    for stage in STAGES:
        spent = {run.name: at(run.twins.get(stage), "cost.total_s", (int, float)) for run in found.runs}
        rows.append({"what": f"{stage}, time", **{run: span(s) if s else "–" for run, s in spent.items()}})
    rows.append({"what": "all stages, time", **{run.name: span(runs.seconds(run)) for run in found.runs}})
    peaks = {run.name: [at(twin, "cost.peak_rss_bytes", int) or 0 for twin in run.twins.values()] for run in found.runs}
    rows.append({"what": "peak memory", **{run: size(max(values)) if any(values) else "–"
                                           for run, values in peaks.items()}})
    for what, stage, place, form in SIZES:
        kind = str if form is str else (int, float)
        values = {run.name: at(run.twins.get(stage), f"result.{place}", kind) for run in found.runs}
        rows.append({"what": what, **{run: "–" if v is None else form(v) for run, v in values.items()}})
    return [row for row in rows if set(list(row.values())[1:]) != {"–"}]


def file_name(found: Comparison) -> str:
    return f"compare-{'-'.join(run.name for run in found.runs)}"[:120] + ".html"
