"""Files: where paths start, atomic writes, hashes.

A relative path means the same in JupyterLab (whose working folder is notebooks/), under papermill and on the command
line: it starts at the project's root. Whatever is written appears whole or not at all.
"""

import ctypes
import fcntl
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
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except OSError as error:
        if path.parent.is_dir():
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

    What a killed process left there is put right first. A folder in use is locked, which ends with its process, however
    that ends; a process number may belong to another by then.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear(path)
    folder = path.with_name(f"{path.name}.{os.getpid()}.partial")
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield folder
    finally:
        os.close(handle)
        if folder.is_dir():
            shutil.rmtree(folder)


def _clear(path: Path) -> None:
    """What ended processes left: `<name>.<pid>.partial` goes, an old folder set aside as `.replaced` is put back."""
    for left in list(path.parent.iterdir()):
        name, pid, kind = (left.name.rsplit(".", 2) + ["", ""])[:3]
        if name != path.name or not pid.isdigit() or kind not in ("partial", "replaced") or _in_use(left, int(pid)):
            continue
        if kind == "replaced" and not path.exists():
            os.rename(left, path)
        else:
            shutil.rmtree(left, ignore_errors=True)  # what its processes still do there ends in a moment


def _in_use(folder: Path, pid: int) -> bool:
    """By a process that lives; or it is no folder, and so nothing of ours; or it went while it was looked at. Without
    locks the process number decides."""
    if folder.is_symlink() or not folder.is_dir():
        return True
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        locked = _lock(handle)
    finally:
        os.close(handle)
    return not locked if locked is not None else pid != os.getpid() and psutil.pid_exists(pid)


def _lock(handle: int) -> bool | None:
    """True with the lock, False where another has it, None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def replace_folder(new: Path, path: Path, names: set[str]) -> None:
    """`new` takes the place of the folder `path` in one step (renameat2, RENAME_EXCHANGE), and the old one is removed.

    Whatever the old folder holds beside `names` stays: it is in both before they change places. Where the file system
    cannot exchange folders, the old one is set aside first, as `<name>.<pid>.replaced`, and for the moment between two
    renames there is none; the next fresh_folder puts it back.
    """
    new, path = Path(new), Path(os.path.realpath(path))
    old = new
    if not path.exists():
        sync_folder(new)
        os.rename(new, path)
    else:
        _keep_others(path, new, names)
        sync_folder(new)
        if not exchange(new, path):
            old = path.with_name(f"{path.name}.{os.getpid()}.replaced")
            os.rename(path, old)
            try:
                os.rename(new, path)
            except BaseException:
                os.rename(old, path)
                raise
    sync_folder(path.parent)
    if old.exists():
        _keep_others(old, path, names)  # what has come meanwhile
        shutil.rmtree(old)


def _keep_others(old: Path, new: Path, names: set[str]) -> None:
    """What `old` holds beside `names` into `new` too: hard links, or copies where the file system has none."""
    for other in old.iterdir():
        if other.name in names or os.path.lexists(new / other.name):
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, new / other.name, symlinks=True, copy_function=_link)
        else:
            _link(other, new / other.name)


def _link(file, copy) -> None:
    try:
        os.link(file, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, copy, follow_symlinks=False)


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
