"""Files: where paths start, atomic writes, hashes.

A relative path means the same in JupyterLab (whose working folder is notebooks/), under papermill and on the command
line: it starts at the project's root. Whatever is written appears whole or not at all.
"""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import xxhash

from eagle3nb.errors import UserError


def project_root() -> Path:
    """The folder that holds notebooks/ and params/: the nearest one above the working folder, else the package's."""
    here = Path.cwd().resolve()
    package = Path(__file__).resolve().parent.parent
    for folder in (here, *here.parents, package):
        if (folder / "notebooks").is_dir() and (folder / "params").is_dir():
            return folder
    return here


def resolve(path: str | Path) -> Path:
    """An absolute path; a relative one starts at the project's root."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else project_root() / path


def shown(path: str | Path) -> str:
    """The path as a record may show it: relative to the project's root; outside it, only the last two parts."""
    path = Path(os.path.abspath(resolve(path)))
    root = project_root()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else "…/" + "/".join(path.parts[-2:])


@contextmanager
def atomic_write(path: str | Path, mode: str = "w"):
    """A file handle whose contents replace `path` when the block ends well; after an error the old file stands.

    Written beside its name as `<name>.<pid>.partial`, fsynced, renamed, and the folder fsynced: a power cut leaves the
    old file or the new one. A full disk raises UserError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        why = error.strerror or error
        raise UserError(f"cannot write {shown(path)}: {why}; free space or choose another work_dir") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync of a directory, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str | Path, value) -> None:
    """Atomic, indented, keys in the order given. Raises ValueError for NaN and infinities, which JSON has not."""
    with atomic_write(path) as handle:
        json.dump(value, handle, indent=1, ensure_ascii=False, allow_nan=False)
        handle.write("\n")


def read_json(path: str | Path):
    """The parsed file. Raises UserError where it is missing or broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{shown(path)} does not exist; run the stage that writes it first") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{shown(path)} is not valid JSON ({error}); delete it and run its stage again") from None


def xxh3_file(path: str | Path, block: int = 1 << 22) -> str:
    """xxh3-128 of a file's bytes, in hex."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while chunk := handle.read(block):
            digest.update(chunk)
    return digest.hexdigest()


def disk_free(path: str | Path) -> int:
    """Free bytes on the disk that holds `path` (or the nearest folder above it that exists)."""
    path = resolve(path)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
