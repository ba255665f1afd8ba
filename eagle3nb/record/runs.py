"""What the records of the runs under outputs/ tell, read so that one damaged file costs one line and not the page.

A run is a folder of outputs/ that holds the JSON twin of at least one stage. Nothing here is computed anew: a figure
that is in no twin is not there.
"""

import fcntl
import json
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, shown, xxh3_file
from eagle3nb.record.declared import STAGES, USUAL, notebook_of, stem
from eagle3nb.record.params import declarations, load, nearest
from eagle3nb.record.provenance import locate, shareable
from eagle3nb.record.tables import number, size

MOST = 1e18  # seconds or bytes that a stage costs
STEPS = 3  # drafted tokens of the acceptance length by which runs are listed


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# The figures of a stage for people: what it is called, where it stands in the result, how it is written.
FIGURES = {
    "synthesis": (("records", "records", number), ("tokens", "tokens", number),
                  ("of them generated", "supervised", number)),
    "audit": (("records", "forecast.records", number), ("tokens", "forecast.tokens", number),
              ("hidden states would take", "disk.needed", size), ("findings", "findings", number)),
    "merge": (("records", "merge.records", number), ("tokens", "merge.tokens", number),
              ("of them generated", "merge.supervised", number), ("records cut", "merge.truncated_records", number)),
    "extraction": (("tokens", "store.tokens", number), ("hidden states on disk", "store.bytes", size),
                   ("tokens a second", "store.tokens_per_s", number)),
    "training": (("held-out acceptance length", "best.acceptance", number),
                 ("first drafts right", "best.accuracy.0", percent), ("tokens seen", "last.tokens", number),
                 ("tokens a second", "tokens_per_s", number),
                 ("text the draft vocabulary covers", "coverage", percent)),
}


@dataclass(frozen=True)
class Run:
    """One folder of outputs/. `twins`: by stage, those that can be read. `damaged`: by stage, what is wrong."""

    folder: Path
    twins: dict[str, dict]
    damaged: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def latest(self) -> dict:
        """The twin of the stage that was started last."""
        return max(self.twins.values(), key=lambda twin: at(twin, "provenance.started", str) or "", default={})

    @property
    def origin(self) -> str:
        """The run's name in its records, where the folder has another: a copy that is kept, as a specimen."""
        told = at(self.latest, "parameters.run", str)
        return told if told and told != self.name else ""


def outputs() -> Path:
    return project_root() / "outputs"


def at(value, path: str, kind: type | tuple = object):
    """The value under `path`, keys and list places joined by dots; None where there is none of that type."""
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool) else None


def state_folder(folder: Path) -> Path:
    """Where the runner keeps lock, progress and logs: in the run's own folder, whatever work_dir says; not in git."""
    return folder / "work" / ".runner"


def held(folder: Path) -> bool:
    """Whether a runner holds the run of this folder. Asked with a shared lock, given back at once."""
    try:
        with open(state_folder(folder) / "lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_twin(path: Path, stage: str) -> tuple[dict, str]:
    """(the twin of a stage, "") or ({}, what is wrong with it)."""
    try:
        twin = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number)
        json.dumps(twin, ensure_ascii=False).encode()  # half a character, as JSON can spell it, stands on no page
    except OSError as error:
        return {}, f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return {}, f"{path.name} is not valid JSON"
    parts = ("parameters", "provenance", "result", "cost")
    if not isinstance(twin, dict) or not all(isinstance(twin.get(part), dict) for part in parts):
        return {}, f"{path.name} is no record of a stage"
    if twin.get("status") not in ("ok", "failed") or twin.get("stage") != stage:
        return {}, f"{path.name} has no stage or status that is known"
    texts, times = (twin.get("error", ""), twin["result"].get("verdict", "")), (0, *twin["cost"].values())
    if not all(isinstance(t, str) for t in texts) or not all(type(t) in (int, float) and abs(t) < MOST for t in times):
        return {}, f"{path.name} has a verdict or a cost that is none"
    files = [twin.get(kind, []) for kind in ("inputs", "outputs")]
    if not all(isinstance(listed, list) and all(map(is_entry, listed)) for listed in files):
        return {}, f"{path.name} names a file that is none"
    return twin, ""


def is_entry(value) -> bool:
    return bool(at(value, "path", str) and at(value, "xxh3", str))


def no_number(word: str):
    """Of NaN and infinities, which Python reads and JSON has not."""
    raise ValueError(word)


def read_run(folder: Path) -> Run:
    twins, damaged = {}, {}
    for stage in STAGES:
        path = folder / f"{stem(stage)}.json"
        if path.exists():
            twin, wrong = read_twin(path, stage)
            twins |= {} if wrong else {stage: twin}
            damaged |= {stage: wrong} if wrong else {}
    return Run(folder, twins, damaged)


def all_runs() -> list[Run]:
    """Newest first, by the start of the last stage; runs that tell no time come last."""
    folders = [f for f in sorted(outputs().iterdir()) if f.is_dir()] if outputs().is_dir() else []
    found = [run for run in map(read_run, folders) if run.twins or run.damaged]
    return sorted(found, key=lambda run: at(run.latest, "provenance.started", str) or "", reverse=True)


def run_named(name: str) -> Run:
    """UserError with the nearest name where there is no such run."""
    found = {run.name: run for run in all_runs()}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UserError(f"no run {name!r} in outputs/{nearest(name, found)} (runs: {known})")
    return found[name]


# ------------------------------------------------------------------------------------------ what a run tells


def status(run: Run) -> str:
    """The worst of its stages: failed, running, ok; a stage that has not ended runs while a runner holds the run."""
    unfinished = [twin for twin in run.twins.values() if twin["status"] == "failed"]
    under_way = [twin for twin in unfinished if twin.get("error") == "did not finish"]
    if run.damaged or len(unfinished) > len(under_way):
        return "failed"
    if under_way:
        return "running" if held(run.folder) else "failed"
    return "ok"


def outdated(run: Run) -> list[str]:
    """`evaluation is of an earlier training`: stages that read what another stage of the run has written anew since."""
    made = {at(e, "path", str): (stage, at(e, "xxh3", str)) for stage, twin in run.twins.items()
            for e in at(twin, "outputs", list) or []}
    return list(dict.fromkeys(
        f"{stage} is of an earlier {made[path][0]}" for stage, twin in run.twins.items()
        for e in at(twin, "inputs", list) or []
        if (path := at(e, "path", str)) in made and path is not None and made[path][1] != at(e, "xxh3", str)))


def verdict(run: Run) -> str:
    """The stages that ran, or what went wrong; and which of them was not run again after what it builds on."""
    failed = [(stage, twin.get("error")) for stage, twin in run.twins.items() if twin["status"] == "failed"]
    if run.damaged:
        return "; ".join(run.damaged.values()) + "; delete it and run the stage again"
    if failed:
        stage, error = failed[-1]
        return f"{stage}: {error or 'did not finish'}"
    ran = [stage for stage in USUAL if stage in run.twins]
    words = f"all {len(USUAL)} stages" if len(ran) == len(USUAL) else ", ".join(ran)
    words = " after ".join(filter(None, [words, "synthesis" if "synthesis" in run.twins else ""]))
    return "; ".join([words, *outdated(run)])


def started(run: Run) -> str:
    """2026-11-30 01:26 (UTC), the start of the last stage; "" where no stage came so far."""
    told = at(run.latest, "provenance.started", str) or ""
    try:
        return datetime.fromisoformat(told).astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""


def seconds(run: Run) -> float:
    """Wall time of all stages, each as last run."""
    costs = [twin["cost"] for twin in run.twins.values()]
    return sum(at(cost, "total_s", (int, float)) or at(cost, "wall_s", (int, float)) or 0 for cost in costs)


def target(run: Run) -> str:
    """The target's name: the last part of its folder, two where the last is no name; the embedded one's own."""
    told = at(run.latest, "parameters.target", str) or ""
    parts = [part for part in told.split("/") if part not in ("", "…", ".", "..")]
    if told == "embedded":
        return "SmolLM2-135M-Instruct (embedded)"
    return "/".join(parts[-2:] if parts[-1:] in (["target"], ["model"]) else parts[-1:])


def commits(run: Run) -> list[str]:
    """Each commit once, the last stage's first: `858fd1f2c0 with local changes`."""
    order = sorted(run.twins.values(), key=lambda twin: at(twin, "provenance.started", str) or "", reverse=True)
    told = [(at(twin, "provenance.commit", str), at(twin, "provenance.dirty", bool)) for twin in order]
    return list(dict.fromkeys(commit[:10] + " with local changes" * bool(dirty) for commit, dirty in told if commit))


def data(run: Run) -> dict:
    """{"root", "records", "tokens", "sources": [{name, records, tokens, supervised}], "left out"} of the merge, else of
    the audit's forecast, else what synthesis made; None, [] and "" for what is not told."""
    places = (("merge", "result.merge"), ("audit", "result.forecast"), ("synthesis", "result"))
    merged = next(filter(None, (at(run.twins.get(stage), place, dict) for stage, place in places)), None)
    sources = [row for row in at(merged, "sources", list) or [] if at(row, "name", str)]
    out = at(merged, "exclude", list) or at(run.latest, "parameters.exclude", list) or []
    return {"root": at(run.latest, "parameters.data_root", str) or "", "records": at(merged, "records", int),
            "tokens": at(merged, "tokens", int), "sources": sources, "left out": ", ".join(map(str, out))}


def acceptance(run: Run, steps: int = STEPS, source: str = "all") -> dict | None:
    """The evaluation's row {tau, low, high, prompts, …} of a number of drafted tokens; None where there is none."""
    rows = at(run.twins.get("evaluation"), "result.acceptance", list) or []
    found = [row for row in rows if at(row, "steps", int) == steps and at(row, "source", str) == source]
    return found[0] if found and at(found[0], "tau", float) else None


def length(row: dict | None) -> str:
    """`1.60 [1.54, 1.68]`, of a row of `acceptance`; – where there is none."""
    if row is None:
        return "–"
    low, high = at(row, "low", float), at(row, "high", float)
    return f"{row['tau']:.2f}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


def key_figures(run: Run, stage: str) -> list[tuple[str, str]]:
    """(what, value) of a stage in words; of a stage that FIGURES has not, the first numbers of its result."""
    result = run.twins[stage]["result"]
    if stage == "evaluation" and (row := acceptance(run, at(run.twins[stage], "parameters.steps", int) or STEPS)):
        decoded, of = at(result, "decode.equal", int), at(result, "decode.prompts", int)
        return [(f"acceptance length with {row['steps']} drafted tokens", length(row)),
                ("accepted in verifies", f"{number(row.get('accepted'))} in {number(row.get('verifies'))}"),
                ("prompts", number(row.get("prompts"))), *([("real decode equal", f"{decoded} of {of}")] if of else [])]
    told = [(what, form(value)) for what, path, form in FIGURES.get(stage, ())
            if (value := at(result, path, (int, float))) is not None]
    plain = [(k.replace("_", " "), number(v)) for k, v in result.items() if at(result, k, (int, float)) is not None]
    return told or plain[:5]


# ------------------------------------------------------------------------------------------ parameters


def usual(profile: str) -> dict[str, dict]:
    """{stage: {parameter: value}} of a profile as it stands now; of the notebooks' defaults where it cannot be read."""
    try:
        stages = tuple(stage for stage in STAGES if notebook_of(stage).exists())
        return {stage: shareable(settings.full) for stage, settings in load(profile, stages).items()}
    except (UserError, SyntaxError):  # gone since, or being edited
        return defaults()


def defaults() -> dict[str, dict]:
    try:
        return {stage: shareable({name: p.default for name, p in known.items()})
                for stage, known in declarations().items()}
    except (UserError, SyntaxError):
        return {}


def profile(twin: dict) -> str:
    """The profile that its command names, "" where the stage was not started by the runner."""
    try:
        words = shlex.split(at(twin, "provenance.command", str) or "")
    except ValueError:
        return ""
    return words[2].removeprefix("params/").rstrip("/") if words[:2] == ["eagle3nb", "run"] and len(words) > 2 else ""


def changed(run: Run, normal: dict[str, dict]) -> dict[str, object]:
    """Parameters whose value is another than their profile's, or than the notebook's default; the run's name aside.

    `normal`: `usual` of every profile that a twin of the run names.
    """
    found = {}
    for twin in run.twins.values():
        known = normal[profile(twin)].get(twin["stage"], {})
        found |= {name: value for name, value in twin["parameters"].items()
                  if name in known and known[name] != value and name != "run"}
    return found


def normals(found: list[Run]) -> dict[str, dict]:
    """`usual` of every profile that these runs name, each read once."""
    return {name: usual(name) for name in {profile(twin) for run in found for twin in run.twins.values()}}


# ------------------------------------------------------------------------------------------ files of the work


def work_file(run: Run, stage: str, ending: str) -> tuple[Path | None, str]:
    """(the file that the stage wrote, "") or (None, why not): it must be the very one of the record, by its hash.

    `ending`: as `evaluation/acceptance.json`. Looked for in the run's own folder and where the record says it was.
    """
    twin = run.twins.get(stage)
    named = [e for e in at(twin, "outputs", list) or [] if (at(e, "path", str) or "").endswith("/" + ending)]
    if not named:
        return None, f"the record of its {stage} names no {ending.rsplit('/', 1)[-1]}" if twin else f"it has no {stage}"
    entry = named[0]
    places = [run.folder / "work" / ending, work_folder(run) / ending, locate(entry["path"], twin["parameters"])]
    there = [place for place in places if place and place.is_file()]
    for place in there:
        if place.stat().st_size == entry.get("bytes") and xxh3_file(place) == entry.get("xxh3"):
            return place, ""
    if there:
        return None, f"{shown(there[0])} is not the file that its record tells of"
    return None, f"{ending} is not here"


def work_folder(run: Run) -> Path:
    """Where the runner says that this run's work lies; records hide folders outside the project."""
    try:
        return Path(json.loads((state_folder(run.folder) / "status.json").read_text(encoding="utf-8"))["work"])
    except (OSError, ValueError, KeyError, TypeError):
        return run.folder / "work"
