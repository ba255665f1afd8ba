"""Deletes directories that reclaim.py has checked, in a process of its own: python -m eagle3nb.states.deletion LOG

Line 1 of stdin is the job, a JSON list of {"parent", "name", "device", "inode", "bytes", "files", "left_over", "shown"}
(reclaim.Reclaim.job). A second line ("go on") lets it outlive the one that started it; if stdin ends without that, or
that process is gone, it stops after the file at hand. LOG is replaced once a second by the report (reclaim.Reclaiming).

A directory is first renamed to <name>.<inode>.reclaiming, so a half-deleted store is never taken for a whole one, and a
later run knows what an earlier one left. Everything happens relative to open directories and follows no link: whatever
is swapped in between, nothing outside the directory that was checked is touched.
"""

import errno
import json
import os
import stat
import sys
import threading
import time
from dataclasses import dataclass

from eagle3nb.errors import UserError
from eagle3nb.files import write_json
from eagle3nb.states.layout import MANIFEST

SUFFIX = ".reclaiming"
PATIENCE = 10.0  # seconds for the parent's last word; a fork of it that holds the pipe open would keep it for ever
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StoppedError(Exception):
    """The one that started this process is gone."""


@dataclass(frozen=True)
class Contents:
    """What lies below a directory: regular files and their bytes; `locked`: a folder that cannot be emptied, or ""."""

    bytes: int
    files: int
    locked: str


def renamed(name: str, inode: int) -> str:
    """The name while it is being deleted: the inode in it tells ours from a directory that merely is called so."""
    return f"{name}.{inode}{SUFFIX}"


def measure(top: str, dir_fd: int | None = None) -> Contents:
    """Count below `top`, following no link. OSError where something cannot be read or lies on another file system."""
    size = files = 0
    locked, device = "", os.stat(top, dir_fd=dir_fd, follow_symlinks=False).st_dev
    for folder, _, names, fd in os.fwalk(top, onerror=unreadable, dir_fd=dir_fd):
        same_device(fd, device)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd):
            locked = locked or folder
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                size, files = size + status.st_size, files + 1
    return Contents(size, files, locked)


def unreadable(error: OSError):
    raise error


def same_device(fd: int, device: int) -> None:
    if os.fstat(fd).st_dev != device:
        raise OSError(errno.EXDEV, "another file system is mounted in it")


def open_folder(path: str) -> int:
    """A descriptor of the absolute `path`, opened component by component; OSError where one of them is a link."""
    fd = os.open("/", FOLDER)
    for part in path.split("/"):
        if part:
            above, fd = fd, os.open(part, FOLDER, dir_fd=fd)
            os.close(above)
    return fd


def remove(entry: dict, tell, stopped) -> None:
    """Delete a directory of the job; tell(bytes) after each file. OSError, or StoppedError where stopped() is true."""
    parent = open_folder(entry["parent"])
    try:
        name = entry["name"]
        same_folder(os.stat(name, dir_fd=parent, follow_symlinks=False), entry)
        if not entry["left_over"]:
            name = set_aside(parent, entry)
        fd = os.open(name, FOLDER, dir_fd=parent)
        try:
            same_folder(os.fstat(fd), entry)
            if MANIFEST in os.listdir(fd):
                unlink(MANIFEST, fd, tell)
            empty(fd, entry["device"], tell, stopped)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
        os.fsync(parent)
    finally:
        os.close(parent)


def set_aside(parent: int, entry: dict) -> str:
    """Rename; what turns out not to be what was checked gets its name back, untouched, and OSError is raised."""
    aside = renamed(entry["name"], entry["inode"])
    os.rename(entry["name"], aside, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        same_folder(os.stat(aside, dir_fd=parent, follow_symlinks=False), entry)
        held = measure(aside, parent)
        if (held.bytes, held.files) != (entry["bytes"], entry["files"]):
            raise OSError(errno.EBUSY, "its contents changed after they were checked")
    except OSError:
        os.rename(aside, entry["name"], src_dir_fd=parent, dst_dir_fd=parent)
        raise
    os.fsync(parent)
    return aside


def same_folder(status: os.stat_result, entry: dict) -> None:
    if not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) != (entry["device"], entry["inode"]):
        raise OSError(errno.ENOTDIR, "it is not the directory that was checked")


def empty(fd: int, device: int, tell, stopped) -> None:
    """Everything below the open directory, the deepest first; links go as links."""
    for _, folders, names, inside in os.fwalk(".", topdown=False, onerror=unreadable, dir_fd=fd):
        same_device(inside, device)
        for name in names:
            if stopped():
                raise StoppedError
            unlink(name, inside, tell)
        for name in folders:  # fwalk lists a link to a directory here, too
            if stat.S_ISLNK(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
                unlink(name, inside, tell)
            else:
                os.rmdir(name, dir_fd=inside)


def unlink(name: str, fd: int, tell) -> None:
    """One file or link. Bytes are freed by the last name of a file alone."""
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    os.unlink(name, dir_fd=fd)
    tell(status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else 0)


# ---------------------------------------------------------------------------------------------------- the process


class Log:
    """The report as it stands, written at most once a second."""

    def __init__(self, path: str, lines: list[dict]):
        self.path, self.lines, self.told = path, lines, time.monotonic()

    def freed(self, line: dict, size: int) -> None:
        line["freed"] += size
        if time.monotonic() - self.told > 1.0:
            self.write()

    def write(self) -> None:
        self.told = time.monotonic()
        try:
            write_json(self.path, self.lines)
        except UserError:  # a full disk: the very reason to go on deleting
            return


def main(path: str) -> int:
    os.nice(19)  # of the disk's time, too, where its scheduler knows priorities
    parent, job = os.getppid(), json.loads(sys.stdin.readline())
    ended, released = threading.Event(), threading.Event()
    reader = threading.Thread(target=lambda: (released if sys.stdin.readline() else ended).set(), daemon=True)
    reader.start()

    def stopped() -> bool:
        orphan = os.getppid() != parent
        if orphan:
            reader.join(PATIENCE)  # what the parent said before it ended may not have been read yet
        return not released.is_set() and (orphan or ended.is_set())

    log = Log(path, [line_of(entry, "running") for entry in job])
    for entry, line in zip(job, log.lines, strict=True):
        try:
            remove(entry, lambda size, line=line: log.freed(line, size), stopped)
            line["state"] = "freed"
        except OSError as error:
            line |= {"state": "failed", "error": error.strerror or str(error)}
        except StoppedError:
            break
        log.write()
    for line in log.lines:
        if line["state"] == "running":
            line |= {"state": "failed", "error": "stopped with the notebook; run the stage again to go on"}
    log.write()
    return 0


def line_of(entry: dict, state: str) -> dict:
    """A line of the report: {"path", "bytes", "files", "state", "freed", "error"}, path as a record may show it."""
    return {"path": entry["shown"], "bytes": entry["bytes"], "files": entry["files"], "state": state, "freed": 0,
            "error": ""}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
