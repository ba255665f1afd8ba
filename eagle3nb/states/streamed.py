"""States that stream (stream.py), on training's side: what it uses of a Store, and the orders that the feeder gets."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash

from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, disk_free, read_json, shown, write_json
from eagle3nb.lock import only_one
from eagle3nb.parent import environment
from eagle3nb.states import store as stores
from eagle3nb.states.shard import Shard, StoredRow, map_file
from eagle3nb.states.stream import (
    AHEAD,
    FEED,
    FEEDER_LOCK,
    KEPT,
    LOG,
    ORDER,
    POLL,
    STREAM,
    STREAM_LOCK,
    Part,
    check_fits,
    shard_bytes,
)
from eagle3nb.states.target import facts_of
from eagle3nb.states.writing import forget

PATIENCE = 30.0  # seconds that a feeder has to end


class Starved(UserError):  # noqa: N818 (what training is then)
    """The feeder ended before the states that training waits for were made."""


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop while it waited."""


class Stream:
    """What training uses of a Store, over states that come while it runs. Close it, or use it in a `with`: a block that
    ends well removes what is ahead.

    .lengths int64 [R], .teacher int64 [R], .fingerprint, .waited: seconds spent in waiting for states so far.
    """

    def __init__(self, folder: Path, corpus: Corpus, target: Path):
        self.folder, self.corpus, self.target, self.facts = Path(folder), corpus, target, facts_of(target)
        self.manifest, self.how = stores.read_manifest(self.folder), read_json(self.folder / STREAM)
        if self.manifest["fingerprint"]["corpus"] != corpus.hash:
            raise UserError(f"{shown(self.folder)} was begun for another corpus; delete it and run stage 3 again")
        self.fingerprint = self.manifest["fingerprint"] | {"streamed": "in training's order"}
        rows = self.manifest["rows"]
        self.lengths = corpus.lengths[:rows]
        self.teacher = corpus.index["teacher_positions"].to_numpy(np.int64)[:rows]
        self.parts, self.place, self.cursor = {}, None, 0
        self.shard, self.opened = None, {}  # of `ahead`: the one that is read; of `kept`: all that were
        self.feeder, self.waited, self.stop = None, 0.0, lambda: False
        self.mine = only_one(self.folder / STREAM_LOCK, wait=False, busy=f"another training reads the states of "
                             f"{shown(self.folder)}; wait for it")
        self.mine.__enter__()
        # Which holds the folder's lock for us, against who would delete it, and makes sure of the head.
        self.writer = stores.open_writer(self.folder, self.manifest["fingerprint"],
                                         {key: self.manifest[key] for key in ("hidden", "vocab", "rows", "tokens")})
        if not self.writer.manifest["head"]:
            raise UserError(f"{shown(self.folder / stores.HEAD)} is not what was written; run stage 3 again")

    @classmethod
    def open(cls, folder: str | Path, corpus: str | Path, target: str | Path) -> "Stream":
        """UserError where stage 3 has not begun this stream, or did so for another corpus."""
        if not corpus:
            raise UserError("states that stream are made from the corpus; give the training's settings its folder")
        return cls(Path(folder), Corpus.open(corpus), Path(target))

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> "StreamedRow":
        return StreamedRow(i, self)

    @cached_property
    def head(self) -> dict[str, torch.Tensor]:
        if not stores.same(self.folder, self.manifest["head"]):
            raise stores.differs(self.folder, self.manifest["head"])
        return map_file(self.folder / stores.HEAD, self.manifest["head"])

    def embedding(self) -> torch.Tensor:
        """The target's input embedding [V, h], in the checkpoint's dtype."""
        return self.head["embedding"]

    def lm_head_rows(self, ids) -> torch.Tensor:
        """[D, h]: the head's rows of these target ids."""
        return self.head.get("lm_head", self.embedding())[torch.as_tensor(ids, dtype=torch.long)]

    # ------------------------------------------------------------------------------------------------ orders

    def start(self, kept: np.ndarray, order: np.ndarray, at: int, stop=lambda: False) -> None:
        """Announce what will be read, and have it made.

        kept: rows that may be read at any time; order: all other rows in the order of their reading, a row as often
        as it is read; at: the position in `order` where reading begins. `stop()` true ends a wait with Interrupted.
        """
        self.stop, self.cursor = stop, at
        self.parts = {KEPT: self.part(KEPT, kept), AHEAD: self.part(AHEAD, order)}
        self.place = np.full(len(self), -1)
        self.place[kept] = np.arange(len(kept))
        head, sizes = self.manifest["head"]["bytes"], self.parts[KEPT].bytes
        check_fits(self.how["keep_bytes"], head, len(kept), sum(sizes), max(self.parts[AHEAD].bytes, default=0))
        room = self.how["keep_bytes"] - head - sum(sizes)
        with only_one(self.folder / FEEDER_LOCK):  # a feeder whose training was killed ends within a second
            todo = {KEPT: self.standing(KEPT, 0, sum(sizes)), AHEAD: self.standing(AHEAD, at, room)}
            self.check_disk(sum(sizes) + sum(self.parts[AHEAD].bytes), room + sum(sizes))
            write_json(self.folder / FEED, self.how | {
                "target": str(self.target), "corpus": str(self.corpus.folder), "rows": len(self), "todo": todo,
                "fingerprint": self.manifest["fingerprint"]})
        if any(todo.values()):
            self.feeder = start_feeder(self.folder)

    def part(self, name: str, order: np.ndarray) -> Part:
        order = np.asarray(order, np.int64)
        ranges = stores.shard_ranges(self.lengths[order], self.how["shard_tokens"])
        tokens, teacher = (np.concatenate([[0], per_row[order].cumsum()]) for per_row in (self.lengths, self.teacher))
        sizes = [shard_bytes(self.facts, int(tokens[last + 1] - tokens[first]), int(teacher[last + 1] - teacher[first]),
                             last + 1 - first, self.how["dtype"]) for first, last in ranges]
        return Part(self.folder / name, order, ranges, sizes)

    def standing(self, name: str, at: int, room: int) -> list[tuple[int, int]]:
        """Put a part's folder in order; returns the shards that are still to be made, in order.

        What stands and will be read from position `at` on stays, as far as the first so many shards fit `room`.
        """
        part = self.parts[name]
        if not part.ranges:
            shutil.rmtree(part.folder, ignore_errors=True)
            return []
        fingerprint = self.manifest["fingerprint"] | {
            "part": name, "order": xxhash.xxh3_128_hexdigest(part.order.tobytes()),
            "batch_tokens": self.how["batch_tokens"]}
        try:
            known = stores.read_manifest(part.folder)["fingerprint"] == fingerprint
        except UserError:
            known = False
        if not known:
            shutil.rmtree(part.folder, ignore_errors=True)
        first = part.shard_of(at) if at < len(part.order) else len(part.ranges)
        within = first + int(np.searchsorted(np.cumsum(part.bytes[first:]), room, side="right"))
        sizes = {"hidden": self.manifest["hidden"], "vocab": self.manifest["vocab"], "rows": len(part.order),
                 "tokens": int(self.lengths[part.order].sum())}
        with stores.open_writer(part.folder, fingerprint, sizes) as writer:
            with atomic_write(part.folder / ORDER, "wb") as handle:
                np.save(handle, part.order)
            for gone in writer.done - set(part.ranges[first:within]):
                (part.folder / stores.shard_name(*gone)).unlink()
                forget(writer, [stores.shard_name(*gone)])
            return [r for r in part.ranges[first:] if r not in writer.done]

    def check_disk(self, all_bytes: int, bound: int) -> None:
        standing = sum(e["bytes"] for p in self.parts.values() if p.ranges
                       for e in stores.read_manifest(p.folder)["shards"])
        needed, free = min(all_bytes, bound) - standing, disk_free(self.folder)
        if needed > free:
            raise UserError(f"the states need {needed / 1e9:,.2f} GB more at once, {free / 1e9:,.2f} GB are free at "
                            f"{shown(self.folder)}; free space, or lower keep_bytes in stage 3")

    # ------------------------------------------------------------------------------------------------ reading

    def states(self, i: int) -> StoredRow:
        """Row i with its states: from the kept part, or as the next of the announced order, as copies."""
        if self.place[i] >= 0:
            p, part = int(self.place[i]), self.parts[KEPT]
            shard = part.shard_of(p)
            if shard not in self.opened:
                self.opened[shard] = self.wait(part, shard)
            return self.opened[shard].row(p - part.ranges[shard][0])
        part, p = self.parts[AHEAD], self.cursor
        if p >= len(part.order) or part.order[p] != i:
            raise RuntimeError(f"row {i} is read out of the announced order, at position {p}")
        number = part.shard_of(p)
        first, last = part.ranges[number]
        if self.shard is None:
            self.shard = self.wait(part, number)
        row = copied(self.shard.row(p - first))
        self.cursor += 1
        if p == last:
            self.shard = None  # unmapped first: a file that is mapped keeps its disk
            name = stores.shard_name(first, last)
            (part.folder / name).unlink()
            forget(stores.ShardWriter(part.folder, None), [name])
        return row

    def wait(self, part: Part, number: int) -> Shard:
        began = time.monotonic()
        try:
            while True:
                ended = self.feeder is None or self.feeder.poll() is not None  # before the look: its last shard counts
                if entry := part.entry(number):
                    return Shard(part.folder, entry)
                if ended:
                    raise Starved(self.reason())
                if self.stop():
                    raise Interrupted
                time.sleep(POLL)
        finally:
            self.waited += time.monotonic() - began

    def reason(self) -> str:
        log, code = self.folder / LOG, self.feeder.returncode if self.feeder else 0
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
        if code == 1 and lines and lines[-1].startswith("error: "):
            return f"the states could not be made: {lines[-1].removeprefix('error: ')}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        advice = ", usually for lack of memory: lower batch_tokens or shard_tokens" if code == -signal.SIGKILL else ""
        return (f"the process that makes the states {how}{advice}; run again to resume ({shown(log)} has its last "
                "words)")

    # ------------------------------------------------------------------------------------------------ the end

    def close(self, finished: bool = False) -> None:
        """End the feeder; after a training that came to its end, remove what is ahead."""
        self.shard, self.opened = None, {}
        if self.feeder and self.feeder.poll() is None:
            self.feeder.terminate()
            try:
                self.feeder.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.feeder.kill()
                self.feeder.wait()
        if finished:
            shutil.rmtree(self.folder / AHEAD, ignore_errors=True)
            (self.folder / FEED).unlink(missing_ok=True)
        self.writer.close()
        self.mine.__exit__(None, None, None)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(finished=kind is None)


@dataclass(frozen=True)
class StreamedRow:
    """A row as StoredRow has it. Its tokens come from the corpus; its states when they are first looked at, which is to
    happen once a reading and in the announced order."""

    row: int
    stream: Stream

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        return self.stream.corpus.row(self.row)

    @cached_property
    def stored(self) -> StoredRow:
        return self.stream.states(self.row)

    ids = property(lambda self: self.tokens[0])
    mask = property(lambda self: self.tokens[1])
    aux = property(lambda self: self.stored.aux)
    last = property(lambda self: self.stored.last)
    last_positions = property(lambda self: self.stored.last_positions)
    teacher_argmax = property(lambda self: self.stored.teacher_argmax)
    teacher_lse = property(lambda self: self.stored.teacher_lse)


@dataclass(frozen=True)
class CopiedRow:
    """What a reader needs of a row whose shard may be gone."""

    aux: torch.Tensor
    last: torch.Tensor
    last_positions: np.ndarray
    teacher_argmax: np.ndarray
    teacher_lse: np.ndarray


def copied(row: StoredRow) -> CopiedRow:
    return CopiedRow(row.aux.clone(), row.last.clone(), row.last_positions.copy(), row.teacher_argmax.copy(),
                     row.teacher_lse.copy())


# ---------------------------------------------------------------------------------------------------- processes


def share_cores() -> tuple[int, int]:
    """Threads of (training, feeder). Two processes with all cores each wait for one another, up to twenty times slower;
    so on a CPU each gets its half, and OMP_NUM_THREADS, where it is set, holds for both."""
    given, cores = int(os.environ.get("OMP_NUM_THREADS", 0)), len(os.sched_getaffinity(0))
    if given or torch.cuda.is_available():
        return given or cores, given or cores
    return max(1, cores - cores // 2), max(1, cores // 2)


def start_feeder(folder: Path) -> subprocess.Popen:
    around = environment(PYTHONUNBUFFERED="1", EAGLE3NB_PARENT=str(os.getpid()),
                         OMP_NUM_THREADS=str(share_cores()[1]))
    with open(folder / LOG, "wb") as log:
        return subprocess.Popen([sys.executable, "-m", "eagle3nb.states.feeder", str(folder)], env=around,
                                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
