"""Files: where paths start, atomic writes, hashes.

A relative path means the same in JupyterLab (whose working folder is notebooks/), under papermill and on the command
line: it starts at the project's root. Whatever is written appears whole or not at all.
"""

import ctypes
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import psutil
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


@contextmanager
def fresh_folder(path: Path):
    """A new empty folder beside `path`, `<name>.<pid>.partial`: gone after the block unless it took the other's place.

    What a killed process left there under such a name is removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.*.partial"):
        pid = left.name[len(path.name) + 1:-len(".partial")]
        if pid.isdigit() and left.is_dir() and not left.is_symlink() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left)
    folder = path.with_name(f"{path.name}.{os.getpid()}.partial")
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        if folder.is_dir():
            shutil.rmtree(folder)


def replace_folder(new: Path, path: Path, names: set[str]) -> None:
    """`new` takes the place of the folder `path` in one step (renameat2, RENAME_EXCHANGE), and the old one is removed.

    Files of the old folder other than `names` stay: they are in both for a moment. Where the file system cannot
    exchange folders, the files are renamed one by one, the newest last.
    """
    new, path = Path(new), Path(path)
    sync_folder(new)
    if not path.exists():
        os.rename(new, path)
    else:
        for other in path.iterdir():
            if other.name not in names and other.is_file() and not (new / other.name).exists():
                os.link(other, new / other.name)
        if exchange(new, path):
            for other in new.iterdir():  # the old one now
                if other.is_dir() and not (path / other.name).exists():
                    os.rename(other, path / other.name)
            shutil.rmtree(new)
        else:
            for file in sorted(new.iterdir(), key=lambda file: file.stat().st_mtime_ns):
                os.replace(file, path / file.name)
            new.rmdir()
    sync_folder(path.parent)


def exchange(a: Path, b: Path) -> bool:
    """Two paths change places in one step; False where this system or file system has no such call (Linux's man page
    renameat2(2); AT_FDCWD is −100, RENAME_EXCHANGE 2)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0


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
