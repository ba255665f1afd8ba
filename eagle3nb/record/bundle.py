"""`eagle3nb bundle RUN`: a run's record as one .zip to hand on. What goes in is listed here by name; data and weights
are not. Nothing is written while a file in it tells of this machine, its user or a key.

The same record gives the same bytes: names in order, times fixed.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

import xxhash
import yaml

import eagle3nb
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, resolve, shown
from eagle3nb.record import index, runs
from eagle3nb.record.declared import declared, notebook_of, source_of, stem
from eagle3nb.record.leaks import Seeker
from eagle3nb.record.runs import Run
from eagle3nb.record.tables import size

RECORDS = (".ipynb", ".html", ".json")
# Of the work: the drafter's card, and the counts and curves by which `compare` sets a run beside others.
WORK = (("evaluation", "export/README.md"), ("evaluation", "evaluation/acceptance.json"),
        ("training", "drafter/metrics.jsonl"))
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can tell
SHOWN = 20  # finds that are listed


def bundle(name: str, out: str = "", allow=()) -> int:
    """Writes outputs/<run>.zip, or `out`; returns the exit code: 1 where something must not leave the machine.

    `allow`: finds that are harmless, by their exact text; a key never is. UserError for an unknown run, one that is
    under way, one whose records are damaged.
    """
    run = whole(runs.run_named(name))
    path = resolve(out) if out else runs.outputs() / f"{run.name}.zip"
    if path.is_dir() or path.suffix != ".zip":
        raise UserError(f"--out {shown(path)}: give the name of a .zip file")
    files, lacking = contents(run)
    seeker = Seeker.of(run, allow)
    leaks = [leak for file, content in files.items() for leak in seeker.leaks(f"{run.name}/{file}", content)]
    if leaks:
        print(f"eagle3nb: {shown(path)} is not written, {len(leaks)} finds must not leave this machine:",
              file=sys.stderr)
        for leak in leaks[:SHOWN]:
            print(f"  {leak.file}, {leak.place}: {leak.what}", file=sys.stderr)
        more = f"  and {len(leaks) - SHOWN} more\n" if len(leaks) > SHOWN else ""
        print(f"{more}eagle3nb: run the stage again without them; of a path or name that is harmless say --allow TEXT",
              file=sys.stderr)
        return 1
    write(path, run.name, files)
    print(f"{shown(path)}: {len(files)} files, {size(path.stat().st_size)}; no path, name or key found in it")
    print("".join(f"left out: {why}\n" for why in lacking), end="")
    return 0


def whole(run: Run) -> Run:
    """The run; UserError where its record may change at any moment, or cannot be read."""
    if runs.held(run.folder):
        raise UserError(f"run {run.name} is under way; wait until it has ended (eagle3nb status {run.name})")
    if run.damaged:
        raise UserError(f"run {run.name}: {'; '.join(run.damaged.values())}; delete it and run the stage again")
    return run


def contents(run: Run) -> tuple[dict[str, bytes], list[str]]:
    """({name in the bundle: bytes} in order, what is not there and why)."""
    files, lacking = {}, []
    for stage in run.twins:
        names = [stem(stage) + ending for ending in RECORDS]
        files |= {name: (run.folder / name).read_bytes() for name in names if (run.folder / name).is_file()}
        lacking += [f"{name} is not there" for name in names if name not in files]
        files[f"params/{stage}.yml"] = parameters(run, stage).encode()
    for stage, ending in WORK:
        path, why = runs.work_file(run, stage, ending)
        files |= {f"work/{ending}": path.read_bytes()} if path else {}
        lacking += [f"{ending}: {why}"] if not path and stage in run.twins else []
    files["index.html"] = index.run_page(run, home=False, card=index.CARD if index.CARD in files else "").encode()
    files["MANIFEST.json"] = manifest(run, files)
    return dict(sorted(files.items())), lacking


def manifest(run: Run, files: dict[str, bytes]) -> bytes:
    """What the bundle holds, by hash, and of which code."""
    told = {"schema": 1, "run": run.name, "eagle3nb": eagle3nb.__version__, "commits": runs.commits(run),
            "stages": {stage: twin["status"] for stage, twin in run.twins.items()},
            "files": [{"path": name, "bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
                      for name, content in sorted(files.items())]}
    return (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode()


def parameters(run: Run, stage: str) -> str:
    """params/<stage>.yml: what was given to the stage, as a profile's file that `eagle3nb run` takes."""
    twin = run.twins[stage]
    values = {name: twin["parameters"][name] for name in given(run, stage) if name in twin["parameters"]}
    commit = runs.at(twin, "provenance.commit", str) or "none told"
    head = f"# Stage {stage} of run {run.name} as given, commit {commit[:10]}; the rest are the notebook's defaults.\n"
    if hidden := [name for name, value in values.items() if "…/" in json.dumps(value, ensure_ascii=False)]:
        head += f"# Set anew, since a record hides folders outside the project: {', '.join(hidden)}.\n"
    return head + (yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110) if values else "")


def given(run: Run, stage: str) -> list[str]:
    """Names of the parameters that papermill was given, from the executed notebook; of one that ran in Lab or is not
    there, those whose value is not the default."""
    path = run.folder / f"{stem(stage)}.ipynb"
    book = read_json(path) if path.is_file() else {"cells": []}
    cells = [c for c in book["cells"] if "injected-parameters" in c.get("metadata", {}).get("tags", [])]
    if cells:
        body = ast.parse(source_of(cells[-1])).body
        return [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
    known = declared(path if book["cells"] else notebook_of(stage))
    normal = {name: parameter.default for name, parameter in known.items()}
    return [name for name, value in run.twins[stage]["parameters"].items() if normal.get(name) != value]


def write(path: Path, folder: str, files: dict[str, bytes]) -> None:
    """The .zip, whole or not at all; all files below one folder of the run's name."""
    with atomic_write(path, "wb") as handle, zipfile.ZipFile(handle, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(f"{folder}/{name}", EPOCH)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o644 << 16, 3
            archive.writestr(entry, content)
