"""Whether a finished stage may be kept: one reason to run it, in words, or none."""

from pathlib import Path

from eagle3nb.files import read_json, resolve, xxh3_file
from eagle3nb.record.declared import notebook_hash, notebook_of, stem
from eagle3nb.record.provenance import code_hash, files_in, label, locate, parameters_hash, shareable
from eagle3nb.record.runs import at, read_twin
from eagle3nb.record.stage import Paths


def why_run(stage: str, parameters: dict, paths: Paths) -> str:
    """"" if the stage finished and nothing it depends on, or made, has changed since."""
    twin_path = paths.run / f"{stem(stage)}.json"
    if not twin_path.exists():
        return "not run yet"
    twin, wrong = read_twin(twin_path, stage)
    if wrong:
        return "its JSON twin is broken"
    if twin.get("status") != "ok":
        return f"failed before: {twin.get('error', '')}"
    partial = paths.run / f"{stem(stage)}.ipynb.partial"
    records = [paths.run / (stem(stage) + suffix) for suffix in (".ipynb", ".html")]
    if partial.exists() or not all(r.exists() for r in records):
        return "its record is not complete"
    facts = twin["provenance"]
    if facts.get("parameters_xxh3") != parameters_hash(parameters):
        return f"{changed_parameter(twin['parameters'], shareable(parameters))} changed"
    if facts.get("notebook_xxh3") != notebook_hash(notebook_of(stage)):
        return "the notebook changed"
    if facts.get("code_xxh3") != code_hash(stage):
        return "the package's code changed"
    if twin["result"].get("planned") and resolve(parameters["data_root"]).exists():
        return "the data that it planned for is there now"
    if twin["result"].get("incomplete"):
        return "it was left incomplete"
    return changed_file(twin, parameters)


def changed_parameter(before: dict, now: dict) -> str:
    return next((f"parameter {k}" for k in now if before.get(k) != now[k]), "a parameter")


def changed_file(twin: dict, parameters: dict) -> str:
    """The first input or output that is missing, altered or new."""
    for kind in ("inputs", "outputs"):
        known = {entry["path"]: entry for entry in twin.get(kind, [])}
        for folder in filter(None, at(twin, f"provenance.folders.{kind}", list) or []):
            place = locate(folder, parameters)
            present = files_in(place) if place and place.exists() else []
            if new := [name for name in (label(f, parameters) for f in present) if name not in known]:
                return f"{kind[:-1]} {new[0]} is new"
        for name, entry in known.items():
            path = locate(name, parameters)
            if path is None or not path.exists():
                return f"{kind[:-1]} {name} is missing"
            if path.stat().st_size != entry.get("bytes") or xxh3_file(path) != entry["xxh3"]:
                return f"{kind[:-1]} {name} changed"
            if path.name == "manifest.json" and (shard := missing_shard(path)):
                return f"{kind[:-1]} {shard} is missing or cut"
    return ""


def missing_shard(manifest: Path) -> str:
    """The first shard of a store that is not there with the size its manifest tells; its bytes may be terabytes."""
    told = read_json(manifest)
    for shard in [*told.get("shards", []), *filter(None, [told.get("head")])]:
        path = manifest.parent / shard["file"]
        if not path.exists() or path.stat().st_size != shard["bytes"]:
            return shard["file"]
    return ""
