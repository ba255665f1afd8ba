"""Reclaiming the disk that old hidden states hold, while something else runs: what may go, and the start of it.

    listed = checked(["/vol/run3/states", "/vol/old_states = 924 GB"], protect=[data_root, corpus, states, …])
    reclaiming = start(listed, work / "reclaimed.json")      # returns at once
    …                                                        # the merge
    reclaiming.finish(timeout=5)                             # the report; what still runs goes on without us

A store of this project's is known by its manifest and named by its path alone. Anything else is foreign and needs its
size beside it, found equal within 1 %. Whatever is in doubt is refused, before anything is deleted.

An entry that is not there any more, in a folder that is, has nothing to free (a second run of the same parameters).
What an interrupted run left of an entry, <name>.<inode>.reclaiming, is taken up again.
"""

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, resolve, shown, write_json
from eagle3nb.parent import environment
from eagle3nb.states.deletion import FOLDER, SUFFIX, line_of, measure, renamed
from eagle3nb.states.layout import LOCK, MANIFEST, OWN, SCHEMA

UNITS = {"b": 1} | {f"{prefix}{unit}": base ** power for base, unit in ((1000, "b"), (1024, "ib"))
                    for power, prefix in enumerate("kmgtp", 1)}
SIZE = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*((?:[kmgtp]i?)?b)?", re.IGNORECASE)


@dataclass(frozen=True)
class Reclaim:
    """A directory to delete, as it was when it was checked. Sizes in bytes, of regular files."""

    path: Path
    kind: str  # "store" | "foreign" | "left over" (of an interrupted run) | "absent" (nothing to do)
    bytes: int = 0
    files: int = 0
    device: int = 0
    inode: int = 0

    def job(self) -> dict:
        return {"parent": str(self.path.parent), "name": self.path.name, "device": self.device, "inode": self.inode,
                "bytes": self.bytes, "files": self.files, "left_over": self.kind == "left over",
                "shown": shown(self.path)}


def checked(entries: list[str], *, protect: list[Path]) -> list[Reclaim]:
    """What the entries ("path" or "path = 924 GB") name, nothing deleted. UserError for the first that must not go.

    protect: paths that no entry may be, hold or lie in: the data, the corpus, the states, the drafter, the target. The
    root, the home, the working folder, the project and its outputs are never an entry either, nor inside one.
    """
    root = project_root()
    around = [Path("/"), Path.home(), Path.cwd(), root, root / "outputs", Path(__file__), Path(sys.prefix)]
    within = [*map(resolve, protect), *(root / name for name in (".git", "notebooks", "params"))]
    found, named = [], []
    for entry in entries:
        path, stated = parsed(entry)
        refuse_links(path)
        refuse_protected(path, around, within)
        refuse_nested(path, named)
        named.append(path)
        here = [*left_overs(path), *([looked_at(path, stated)] if os.path.lexists(path) else [])]
        if not here and not path.parent.is_dir():
            refuse(path, "does not exist, nor does its folder", "check its spelling, or take it off the list")
        found += here or [Reclaim(path, "absent")]
    return found


def table(listed: list[Reclaim]) -> list[dict]:
    """Rows for the record, before anything is deleted."""
    kinds = {"store": "states with a manifest of ours", "foreign": "not ours; its size is as stated",
             "left over": "left by an interrupted run", "absent": "not there: nothing to free"}
    return [{"directory": shown(item.path), "what it is": kinds[item.kind], "files": item.files,
             "GB": item.bytes / 1e9} for item in listed]


def sentence(report: list[dict]) -> str:
    """What came of it, for the record; `report` as from Reclaiming.report or finish."""
    if not report:
        return "nothing to reclaim"
    freed, held = (sum(line[name] for line in report) / 1e9 for name in ("freed", "bytes"))
    each = [f"{line['path']} {line['state']}" + (f" ({line['error']})" if line["error"] else "") for line in report]
    return f"{freed:,.2f} of {held:,.2f} GB freed: {', '.join(each)}"


def refuse(path: Path, what: str, remedy: str):
    raise UserError(f"reclaim: {shown(path)} {what}; {remedy}")


def parsed(entry: str) -> tuple[Path, int | None]:
    """(absolute path, stated bytes or None). An "=" belongs to the path where a path of that name exists."""
    text, stated = entry.strip(), None
    if not text:
        raise UserError("reclaim: an entry is empty; name a directory")
    before, equals, after = text.rpartition("=")
    if equals and not os.path.lexists(absolute(text)):
        if number := SIZE.fullmatch(after.strip()):
            text, stated = before.strip(), round(float(number[1]) * UNITS[(number[2] or "b").lower()])
        elif before.endswith(" ") or os.path.lexists(absolute(before)):
            raise UserError(f"reclaim: the size in {shown(before.strip())} = {after.strip()!r} cannot be read; write "
                            "it as 924 GB, 860.5 GiB or plain bytes")
    if not text:
        raise UserError("reclaim: an entry has a size and no path; name a directory")
    return absolute(text), stated


def absolute(text: str) -> Path:
    """As files.resolve, without ".."; a name like ~nobody stays a name."""
    return Path(os.path.abspath(project_root() / os.path.expanduser(text)))


def refuse_links(path: Path) -> None:
    for part in (path, *path.parents):
        if part.is_symlink():
            what = "is a link" if part == path else f"is reached through a link, {shown(part)}"
            refuse(path, what, "name the directory itself")


def refuse_protected(path: Path, around: list[Path], within: list[Path]) -> None:
    """By identity, so that a second mount or a link to a protected path does not hide it."""
    itself = identities(path)[:1] if path.exists() else [path]
    for guarded in (*around, *within):
        chain = identities(guarded) + [*guarded.parents, guarded]
        if itself[0] in chain or path in chain:
            refuse(path, f"is or holds {shown(guarded)}", "take it off the list")
    above = {*identities(path), *path.parents}
    for guarded in within:
        if guarded in above or (guarded.exists() and identities(guarded)[0] in above):
            refuse(path, f"lies in {shown(guarded)}, which this run needs", "take it off the list")


def identities(path: Path) -> list:
    """(device, inode) of the real path and of every folder above it, those that exist."""
    real = Path(os.path.realpath(path))
    return [(status.st_dev, status.st_ino) for status in (p.stat() for p in (real, *real.parents) if p.exists())]


def refuse_nested(path: Path, named: list[Path]) -> None:
    for other in named:
        if path == other:
            refuse(path, "is named twice", "name it once")
        if path in other.parents or other in path.parents:
            refuse(path, f"and {shown(other)} lie in one another", "name the outer one alone, with its size")


def left_overs(path: Path) -> list[Reclaim]:
    """What an interrupted deletion of this path left: known by the inode in its name."""
    if not path.parent.is_dir():
        return []
    found = []
    for other in sorted(path.parent.iterdir()):
        if other.name.startswith(f"{path.name}.") and other.name.endswith(SUFFIX):
            status = other.lstat()
            if stat.S_ISDIR(status.st_mode) and other.name == renamed(path.name, status.st_ino):
                held = contents(other)
                found.append(Reclaim(other, "left over", held.bytes, held.files, status.st_dev, status.st_ino))
    return found


def looked_at(path: Path, stated: int | None) -> Reclaim:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        refuse(path, "is no directory", "name the directory that holds the states")
    held, manifest = contents(path), manifest_of(path)
    if manifest:
        refuse_strangers(path)
        refuse_busy(path)
    elif stated is None:
        refuse(path, f"holds no manifest of this project's ({size(held.bytes)} in {held.files:,} files)",
               f'if it may go, state its size beside it: "{shown(path)} = …"')
    if stated is not None and abs(held.bytes - stated) * 100 > stated:
        refuse(path, f"holds {size(held.bytes)}, not the stated {size(stated)} (1 % is allowed)",
               "look into it; it may be another directory than you think")
    return Reclaim(path, "store" if manifest else "foreign", held.bytes, held.files, status.st_dev, status.st_ino)


def contents(path: Path):
    """deletion.Contents; UserError where something is mounted in it, or cannot be read or deleted."""
    for mounted in mounts():
        if mounted == path or path in mounted.parents:
            refuse(path, f"is or holds a mount ({shown(mounted)})", "unmount it first, or take it off the list")
    try:
        held = measure(str(path))
    except OSError as error:
        refuse(path, f"cannot be counted: {error.strerror}", "make it readable, or take it off the list")
    if locked := held.locked or ("" if os.access(path.parent, os.W_OK | os.X_OK) else str(path.parent)):
        refuse(path, f"cannot be deleted: {shown(locked)} is not writable", "change its permissions")
    return held


def mounts() -> list[Path]:
    """Mount points as Linux lists them (spaces come as octal escapes); elsewhere the device numbers alone tell."""
    table = Path("/proc/self/mountinfo")
    lines = table.read_text().splitlines() if table.is_file() else []
    return [Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])) for line in lines]


def manifest_of(path: Path) -> dict | None:
    """The manifest of a store of ours; None where there is none, or one of something else, or a link."""
    try:
        folder = os.open(path, FOLDER)
        try:
            fd = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        with open(fd, encoding="utf-8") as handle:
            value = json.load(handle)
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(value, dict) and type(value.get("schema")) is int and 1 <= value["schema"] <= SCHEMA
    return value if known and isinstance(value.get("shards"), list) and "fingerprint" in value else None


def refuse_strangers(path: Path) -> None:
    """A store of ours holds its own files alone (or links of their names, which go as links)."""
    strangers = sorted(entry.name for entry in os.scandir(path)
                       if entry.is_dir(follow_symlinks=False) or not (OWN.fullmatch(entry.name) or entry.name == LOCK))
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        refuse(path, f"holds what no store of ours does: {', '.join(strangers[:3])}{more}", "move that elsewhere first")


def refuse_busy(path: Path) -> None:
    """An extraction that is writing the store holds its lock."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(path, "is being written by an extraction", "wait for it, or take it off the list")
    finally:
        os.close(handle)


def size(count: int) -> str:
    """Bytes in the largest decimal unit that fits, three digits behind the point, and exactly."""
    unit, scale = next(((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if count >= s), ("", 1))
    return f"{count / scale:,.3f} {unit} ({count:,} bytes)" if unit else f"{count:,} bytes"


# ---------------------------------------------------------------------------------------------------- doing it


class Reclaiming:
    """Deletions that run beside us."""

    def __init__(self, listed: list[Reclaim], process: subprocess.Popen | None, log: Path):
        self.process, self.log = process, log
        self.absent = [line_of(item.job(), "absent") for item in listed if item.kind == "absent"]

    def report(self) -> list[dict]:
        """At once: [{"path", "bytes", "files", "state", "freed", "error"}]; state freed, running, failed or absent."""
        ended = self.process is None or self.process.poll() is not None  # before reading: the log is then final
        lines = read_json(self.log)
        for line in lines:
            if ended and line["state"] == "running":
                why = f"its process ended early ({self.process.returncode}); run the stage again to go on"
                line |= {"state": "failed", "error": why}
        return [*lines, *self.absent]

    def finish(self, timeout: float) -> list[dict]:
        """The report, after at most `timeout` seconds. What still runs then outlives this process, told in the log."""
        until = time.monotonic() + timeout
        while self.process and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if self.process and not self.process.stdin.closed:
            try:
                self.process.stdin.write(b"go on\n")
                self.process.stdin.close()
            except BrokenPipeError:  # it has ended
                pass
        return self.report()


def start(listed: list[Reclaim], log: str | Path) -> Reclaiming:
    """Begin deleting in a process of low priority and return at once; `log` is a JSON file that always has the report.

    That process ends after the file at hand when this one dies before `finish`; a later start goes on with the rest.
    """
    log, job = resolve(log), [item.job() for item in listed if item.kind != "absent"]
    write_json(log, [line_of(entry, "running") for entry in job])
    if not job:
        return Reclaiming(listed, None, log)
    process = subprocess.Popen([sys.executable, "-m", "eagle3nb.states.deletion", str(log)], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               env=environment())
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()
    return Reclaiming(listed, process, log)
