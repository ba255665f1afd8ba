"""Profiles: params/<name>/common.yml and one <stage>.yml a stage, checked against what the notebooks declare.

papermill only warns about an unknown name and takes YAML's word for the type, so that `learning_rat: 1e-4` trains with
the default and `learning_rate: 1e-4` passes a text. Here both end in one line that names the file and the right name.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, resolve, shown
from eagle3nb.record.declared import STAGES, USUAL, Loader, coerce, declared, notebook_of
from eagle3nb.record.keys import refuse_keys


@dataclass(frozen=True)
class Settings:
    """What one stage runs with: `given` goes to papermill, `full` has the notebook's defaults besides."""

    given: dict
    full: dict


def nearest(name: str, names) -> str:
    """`; did you mean x?` or nothing."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def profile_folder(profile: str) -> Path:
    """The folder of a profile: params/<profile>, or a path. UserError with the nearest name otherwise."""
    for folder in (project_root() / "params" / profile, Path(profile).expanduser().absolute(), resolve(profile)):
        if profile and folder.is_dir():
            return folder
    params = project_root() / "params"
    known = sorted(p.name for p in params.iterdir() if p.is_dir()) if params.is_dir() else []
    raise UserError(f"no profile {profile!r}: neither a folder of params/ nor a path{nearest(profile, known)} "
                    f"(profiles: {', '.join(known) or 'none'})")


def read_yaml(path: Path) -> dict:
    """The file's mapping; an empty or missing file is {}. UserError for anything else."""
    if not path.exists():
        return {}
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{shown(path)} is not valid YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(k, str) for k in found):
        raise UserError(f"{shown(path)} must hold lines `name: value`, not a {type(found).__name__}")
    return found


def declarations() -> dict[str, dict]:
    """{stage: its declared parameters} of the notebooks that are there."""
    return {stage: declared(notebook_of(stage)) for stage in STAGES if notebook_of(stage).exists()}


def load(profile: str, stages=USUAL, overrides=(), run: str = "") -> dict[str, Settings]:
    """{stage: Settings} of the chosen stages. `overrides`: (name, text) pairs of the command line, which win.

    The run's name is `run`, else the profile's, else the profile folder's. UserError for an unknown file, stage, name,
    or a value that does not fit.
    """
    folder, known = profile_folder(profile), declarations()
    for stage in stages:
        if stage not in known:
            raise UserError(f"{shown(notebook_of(stage))} does not exist")
    check_files(folder)
    common = read_yaml(folder / "common.yml")
    check_common(common, known, shown(folder / "common.yml"))
    overrides = [*overrides, *([("run", run)] if run else [])]
    everywhere = {name for parameters in known.values() for name in parameters}
    for name, _ in overrides:
        if not any(name in known[stage] for stage in stages):
            others = [s for s in known if name in known[s]]
            hint = f"; {', '.join(others)} has it, which is not run" if others else nearest(name, everywhere)
            raise UserError(f"-p {name}: no parameter of that name{hint}")
    settings = {}
    for stage in STAGES:  # those of stages that are left out are checked too
        if stage in known:
            settings[stage] = settle(stage, known, folder, common, overrides)
    return {stage: settings[stage] for stage in stages}


def settle(stage: str, known: dict, folder: Path, common: dict, overrides) -> Settings:
    """One stage's values: the notebook's defaults, then common.yml, <stage>.yml, the command line."""
    parameters, own = known[stage], folder / f"{stage}.yml"
    given = {"run": folder.name} if "run" in parameters else {}
    layers = ((shown(folder / "common.yml"), common), (shown(own), read_yaml(own)),
              ("command line", {k: v for k, v in overrides if k in parameters}))
    for origin, values in layers:
        refuse_keys(values, origin)
        for name, value in values.items():
            if name not in parameters:
                others = [s for s in known if name in known[s]]
                hint = f"; {', '.join(others)} has it" if others else nearest(name, parameters)
                raise UserError(f"{origin}: {shown(notebook_of(stage))} has no parameter {name!r}{hint}")
            try:
                given[name] = coerce(parameters[name], value)
            except UserError as error:
                raise UserError(f"{origin}: {error}") from None
    return Settings(given, {name: p.default for name, p in parameters.items()} | given)


def check_files(folder: Path) -> None:
    names = ["common", *STAGES]
    for path in sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")]):
        if path.stem not in names or path.suffix != ".yml":
            raise UserError(f"{shown(path)} belongs to no stage{nearest(path.stem, names)} (common.yml, <stage>.yml)")


def check_common(common: dict, known: dict, origin: str) -> None:
    """What common.yml sets must be known to every notebook: plain papermill passes it to each."""
    for name in common:
        lacking = [stage for stage in known if name not in known[stage]]
        if len(lacking) == len(known):
            everywhere = {n for parameters in known.values() for n in parameters}
            raise UserError(f"{origin}: no notebook has a parameter {name!r}{nearest(name, everywhere)}")
        if lacking:
            raise UserError(f"{origin}: {name!r} is unknown to {', '.join(lacking)}; "
                            "move it to the files of the stages that have it")


def chosen_stages(text: str) -> tuple[str, ...]:
    """`audit,merge` → the stages in their order; for an empty text all but synthesis, which has to be named."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STAGES:
            raise UserError(f"--stages: no stage {name!r}{nearest(name, STAGES)} (stages: {', '.join(STAGES)})")
    return tuple(s for s in STAGES if s in names) if names else USUAL
