"""Writing a store: any number of processes, on shards of their own, killed at any moment.

    with open_writer(folder, fingerprint, sizes) as writer:       # each process its own
        for first, last in ranges:
            with writer.claim(first, last) as mine:               # False: it stands, or a living process has it
                if mine:
                    writer.write(first, last, tensors)

A claim is a lock (flock) on `<shard>.claim`, which the system frees when its process ends, however it ends. A shard is
written beside its name, fsynced, renamed, and only then entered in the manifest; the manifest is read, added to and
replaced under a lock of its own, so it is the union of what all processes have finished. What lies there beside it, of
a process that died, belongs to whoever gets the claim next.
"""

import fcntl
import os
import re
import weakref
from contextlib import contextmanager
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import shown, sync_folder
from eagle3nb.progress import progress
from eagle3nb.states.manifest import (
    HEAD,
    LOCK,
    MANIFEST,
    OWN,
    SCHEMA,
    files_of,
    read_manifest,
    same,
    shard_name,
    write_manifest,
)
from eagle3nb.states.shard import as_stored, write_tensors


class ShardWriter:
    """A store that is being written, by this process among others. `manifest` and `done` are read from disk."""

    def __init__(self, folder: Path, dtype: str | None):
        self.folder, self.dtype = folder, dtype
        self.held = set()  # names of files that this writer has claimed
        self.close = lambda: None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def manifest(self) -> dict:
        return read_manifest(self.folder)

    @property
    def done(self) -> set[tuple[int, int]]:
        """The ranges whose shards stand, whoever made them."""
        return {(shard["first"], shard["last"]) for shard in self.manifest["shards"]}

    @contextmanager
    def claim(self, first: int, last: int):
        """Yields True where the shard is this writer's to make until the block ends; False where it stands already,
        or a living process is making it."""
        with self.claimed(shard_name(first, last)) as mine:
            yield mine and (first, last) not in self.done

    @contextmanager
    def claimed(self, name: str, wait: bool = False):
        """The claim on one file of the store, and with it what a dead process left of that file: it is removed."""
        with claimed(self.folder / name, wait) as mine:
            if mine:
                self.held.add(name)
                remove_partials(self.folder, name)
            try:
                yield mine
            finally:
                self.held.discard(name)

    def write_head(self, tensors: dict) -> None:
        """embedding, final_norm and, where it is not tied, lm_head: as the checkpoint has them. Once a store."""
        with self.claimed(HEAD, wait=True):
            if not self.manifest["head"]:
                entry = self.put(HEAD, tensors)
                self.enter(lambda manifest: manifest | {"head": entry})

    def write(self, first: int, last: int, tensors: dict) -> dict:
        """Finish one shard, within its claim (taken here where it is not held); its entry is returned."""
        name = shard_name(first, last)
        if name not in self.held:
            with self.claimed(name) as mine:
                if not mine:
                    raise UserError(f"another process is writing {shown(self.folder / name)}; wait for it")
                return self.write(first, last, tensors)
        joined(self.manifest["shards"], {"first": first, "last": last})
        stored = as_stored(tensors, first, last, self.dtype)
        entry = {"first": first, "last": last, "rows": last - first + 1, "tokens": len(tensors["input_ids"]),
                 "teacher": len(tensors["last_positions"])} | self.put(name, stored)
        self.enter(lambda manifest: manifest | {"shards": joined(manifest["shards"], entry)})
        return entry

    def put(self, name: str, tensors: dict) -> dict:
        """Write one safetensors file whole or not at all. A full disk is a UserError; what was finished stays."""
        path = self.folder / name
        partial = path.with_name(f"{name}.{os.getpid()}.partial")
        try:
            size, xxh3 = write_tensors(partial, tensors)
            os.replace(partial, path)
            sync_folder(self.folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {shown(path)}: {error.strerror or error}; free space and run the stage "
                            "again (what is finished is kept)") from error
        return {"file": name, "bytes": size, "xxh3": xxh3}

    def enter(self, change) -> None:
        """Replace the manifest by change(manifest), one process at a time."""
        with self.claimed(MANIFEST, wait=True):
            write_manifest(self.folder, change(read_manifest(self.folder)))


def joined(shards: list[dict], entry: dict) -> list[dict]:
    """The shards with this one, in its place if it was made before. ValueError where it overlaps another."""
    first, last = entry["first"], entry["last"]
    others = [shard for shard in shards if (shard["first"], shard["last"]) != (first, last)]
    for shard in others:
        if shard["first"] <= last and first <= shard["last"]:
            raise ValueError(f"rows {first} to {last} overlap the shard of rows {shard['first']} to {shard['last']}")
    return sorted([*others, entry], key=lambda shard: shard["first"])


# ---------------------------------------------------------------------------------------------------- opening


def open_writer(folder: str | Path, fingerprint: dict, sizes: dict) -> ShardWriter:
    """Begin a store, or go on with the one that stands if it is the same by fingerprint.

    sizes: {"hidden", "vocab", "rows", "tokens"}. Files of ours that no manifest knows and no living process writes are
    removed; a shard whose file is gone, cut short or not what was written is forgotten, so it is made again. For that
    the checksums of all are read, at the disk's speed, unless others are writing the store: the first of them has done
    it. `.lock` is held (shared) until the writer is closed, in a `with` or by close(), or its process ends.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {shown(folder)}: {error.strerror}; choose another work_dir") from error
    writer = ShardWriter(folder, fingerprint.get("dtype"))
    alone, handle = joined_others(folder / LOCK)
    writer.close = weakref.finalize(writer, os.close, handle)
    with claimed(folder / MANIFEST, wait=True):
        remove_partials(folder, MANIFEST)
        if (folder / MANIFEST).exists():
            same_store(folder, read_manifest(folder)["fingerprint"], fingerprint)
        else:
            write_manifest(folder, {"schema": SCHEMA, "fingerprint": fingerprint, **sizes, "head": None, "shards": []})
    if alone:
        check_standing(writer)
    share(handle)
    remove_unknown(writer)
    return writer


def joined_others(path: Path) -> tuple[bool, int]:
    """(whether no other writer has this lock, the open file with it).

    The first writer has it alone until what stands is checked, then all share it; what deletes stores (reclaim) wants
    it alone. Where it cannot even be shared, another is still checking, or our caller keeps all others out.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {shown(path)}: {error.strerror}; make its folder writable") from error
    try:
        return lock(handle, path, fcntl.LOCK_EX | fcntl.LOCK_NB) or not share(handle), handle
    except BaseException:
        os.close(handle)
        raise


def share(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_standing(writer: ShardWriter) -> None:
    """Forget what is not what was written. Each file is checked within its claim, so processes that begin together
    share the work, and none forgets what another has just made again."""
    entries = files_of(writer.manifest)
    if not entries:
        return
    with progress(sum(entry["bytes"] for entry in entries), "checksums of what stands", "bytes") as bar:
        for entry in entries:
            with writer.claimed(entry["file"]) as mine:
                if mine and not same(writer.folder, entry, bar.advance) and entry in files_of(writer.manifest):
                    forget(writer, [entry["file"]])


def forget(writer: ShardWriter, names: list[str]) -> None:
    """Take files out of the manifest: they are to be made again, or not needed any more."""
    writer.enter(lambda manifest: manifest | {
        "shards": [shard for shard in manifest["shards"] if shard["file"] not in names],
        "head": manifest["head"] if manifest["head"] and manifest["head"]["file"] not in names else None})


def remove_unknown(writer: ShardWriter) -> None:
    """Files of ours that no manifest knows, where their claim can be had: what dead processes left."""
    files = [match for file in writer.folder.iterdir() if (match := OWN.fullmatch(file.name))]
    for name in sorted({match[1] for match in files} - {MANIFEST}):
        known = {entry["file"] for entry in files_of(writer.manifest)}
        if name in known and not any(match[1] == name and match[2] for match in files):
            continue
        with writer.claimed(name) as mine:  # which removes what is partial
            if mine and name not in {entry["file"] for entry in files_of(writer.manifest)}:
                (writer.folder / name).unlink(missing_ok=True)


def remove_partials(folder: Path, name: str) -> None:
    """What is left of `name`, whose claim the caller holds: nobody else writes it."""
    for file in folder.iterdir():
        if file.name.startswith(f"{name}.") and OWN.fullmatch(file.name) and file.name.endswith(".partial"):
            file.unlink(missing_ok=True)


def same_store(folder: Path, standing: dict, wanted: dict) -> None:
    """Raises UserError naming what differs between the store that stands and the one that is wanted."""
    different = [key for key in {**wanted, **standing} if standing.get(key) != wanted.get(key)]
    if different:
        names = ", ".join(f"{key} ({brief(standing.get(key))} there, {brief(wanted.get(key))} wanted)"
                          for key in different)
        raise UserError(f"{shown(folder)} holds states of another {names}; delete it or choose another work_dir")


def brief(value) -> str:
    text = str(value)
    return text[:8] if re.fullmatch(r"[0-9a-f]{16,}", text) else text


# ---------------------------------------------------------------------------------------------------- claims


@contextmanager
def claimed(path: Path, wait: bool = False):
    """Yields True while this holder alone has `<path>.claim`, False where another has it (never with `wait`).

    The file is removed before it is unlocked, so one that was opened in between is no claim any more: its inode tells,
    and the next is tried. A process that is killed leaves the file without a lock, as good as none.
    """
    claim = path.with_name(f"{path.name}.claim")
    while True:
        try:
            handle = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {shown(claim)}: {error.strerror}; free space, or make its folder writable"
                            ) from error
        try:
            locked = lock(handle, claim, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if locked and not current(handle, claim):
                continue
            try:
                yield locked
            finally:
                if locked:
                    claim.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def lock(handle: int, path: Path, how: int) -> bool:
    """False where another has it and `how` does not wait."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be locked ({error.strerror}): mount its file system with locks, or "
                        "choose another work_dir") from error
    return True


def current(handle: int, path: Path) -> bool:
    """The open file is the one that has this name now."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)
