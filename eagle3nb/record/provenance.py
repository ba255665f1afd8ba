"""What a record says of where it comes from: commit, code, versions, machine; files by hash; paths made shareable.

No host, user or absolute path enters a record. A file under a parameter's folder outside the project is called
`<data_root>/A2/part-000.jsonl`: shareable, and still found again by whoever holds the parameters.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path

import psutil
import xxhash

import eagle3nb
from eagle3nb.errors import UserError
from eagle3nb.files import project_root, resolve, shown, xxh3_file

PACKAGES = ("torch", "transformers", "numpy", "papermill", "ipykernel", "sglang", "triton")
# The layers that each stage computes with, and the modules under all of them: a change elsewhere (a new figure in the
# evaluation, this record layer) changes no result of it, and does not cost another ten hours of training.
BASE = ("errors.py", "files.py", "progress.py", "lock.py")
LAYERS = {"synthesis": ("corpus", "states", "acceptance", "synthesis"),
          "audit": ("corpus", "states", "drafter", "acceptance"), "merge": ("corpus", "states", "acceptance"),
          "extraction": ("corpus", "states"), "training": ("corpus", "states", "drafter"),
          "evaluation": ("corpus", "states", "drafter", "acceptance")}


def code_hash(stage: str) -> str:
    """xxh3-128 over the package's sources that the stage computes with."""
    package = Path(eagle3nb.__file__).parent
    digest = xxhash.xxh3_128()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] in (*BASE, *LAYERS[stage]):
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def git(*arguments: str) -> str | None:
    """What git answers in the project, or None where there is no git, no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=project_root(), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "eagle3nb": eagle3nb.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def provenance(stage: str) -> dict:
    """Commit, code hash, versions and the machine's size."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "code_xxh3": code_hash(stage),
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Names of the GPUs in use; asks torch only where the stage has loaded it (importing it costs seconds)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def path_parameters(parameters: dict) -> dict[str, Path]:
    """Parameters whose value is an absolute path outside the project."""
    given = {k: Path(v).expanduser() for k, v in parameters.items() if isinstance(v, str) and v.startswith(("/", "~/"))}
    return {k: v for k, v in given.items() if v.is_absolute() and not v.is_relative_to(project_root())}


def label(path: Path, parameters: dict) -> str:
    """The path as the record has it; `locate` finds it again."""
    path = Path(os.path.abspath(resolve(path)))
    holders = {k: v for k, v in path_parameters(parameters).items() if path.is_relative_to(v)}
    if path.is_relative_to(project_root()) or not holders:
        return shown(path)
    name = max(holders, key=lambda k: len(holders[k].parts))
    return f"<{name}>/{path.relative_to(holders[name]).as_posix()}"


def locate(name: str, parameters: dict) -> Path | None:
    """The path behind a label; None for one outside the project and outside every parameter."""
    if found := re.fullmatch(r"<(\w+)>/(.*)", name):
        return resolve(parameters[found[1]]) / found[2] if found[1] in parameters else None
    return None if name.startswith("…/") else resolve(name)


def entries(paths, parameters: dict) -> list[dict]:
    """[{path, bytes, xxh3}] of the files, folders expanded. Raises UserError for one that is missing."""
    found = {}
    for file in (f for path in paths for f in files_in(resolve(path))):
        name = label(file, parameters)
        found[name] = {"path": name, "bytes": file.stat().st_size, "xxh3": xxh3_file(file)}
    return list(found.values())


def files_in(path: Path) -> list[Path]:
    """The file itself, or all files of a folder in order."""
    if not path.exists():
        raise UserError(f"{shown(path)} does not exist; the stage was to read or write it")
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def shareable(parameters: dict) -> dict:
    """The parameters as a record shows them: no absolute path."""
    def share(value):
        if isinstance(value, list):
            return [share(item) for item in value]
        return shown(value) if isinstance(value, str) and value.startswith(("/", "~/")) else value
    return {name: share(value) for name, value in plain(parameters).items()}


def parameters_hash(parameters: dict) -> str:
    """xxh3-128 of the true values, which `shareable` may hide."""
    return xxhash.xxh3_128_hexdigest(json.dumps(plain(parameters), sort_keys=True).encode())


def plain(value):
    """JSON without NaN: numbers, arrays, frames, dataclasses and paths as plain values; NaN and inf as null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, Path):
        return shown(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a DataFrame
        return plain(value.to_dict(orient="records"))
    if hasattr(value, "tolist"):  # numpy or torch, scalar or array
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def places(parameters: dict) -> dict[str, str]:
    """{absolute path of this machine: what a record shows in its place}."""
    known = {str(v): f"<{k}>" for k, v in path_parameters(parameters).items()}
    known |= {str(project_root()): "", sys.prefix: "<env>", sys.base_prefix: "<python>", str(Path.home()): "~"}
    return known | {str(Path(eagle3nb.__file__).parent.parent): "", tempfile.gettempdir(): "<tmp>"}


def scrubber(parameters: dict):
    """A function text → text that takes absolute paths of this machine out of what a stage printed."""
    known = places(parameters)
    order = sorted((p for p in known if len(p) > 2), key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(p)}(/|(?![\w-]))" for p in order))

    def scrub(text: str) -> str:
        return pattern.sub(lambda m: replaced(m[0]), text)

    def replaced(found: str) -> str:
        name = known[found.rstrip("/")]
        return name + "/" if name and found.endswith("/") else name or ("" if found.endswith("/") else ".")

    return scrub


def scrubbed(value, scrub):
    """The value with every text in it scrubbed; pictures are left as they are."""
    if isinstance(value, dict):
        return {k: v if str(k).startswith("image/") else scrubbed(v, scrub) for k, v in value.items()}
    if isinstance(value, list):
        return [scrubbed(v, scrub) for v in value]
    return scrub(value) if isinstance(value, str) else value
