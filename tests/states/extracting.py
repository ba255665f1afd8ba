"""Extractions that die, meet, or wait for one another: python extracting.py TARGET CORPUS FOLDER SCENARIO…

One process imports everything and forks its children, each a call of `extract`; the scenario asserts what it finds. A
child logs the range of each shard as it begins to extract it: "first last pid number", one line, in one write.
"""

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from waiting import until

from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.states import extract as extraction
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.manifest import read_manifest, shard_name
from eagle3nb.states.store import Store

torch.set_num_threads(1)
SETTINGS = {"dtype": "fp8_e4m3", "batch_tokens": 256, "shard_tokens": 130}
KILLS = 20
ALIVE = set()  # children that have not ended
FEW, PAUSE = 24, 0.005  # rows where two processes meet, and seconds more that a shard takes there


class Run:
    """Children that extract one corpus into one folder, and what they log."""

    def __init__(self, target: TransformersTarget, corpus: Path, folder: Path, limit: int = 0, pause: float = 0.0):
        self.target, self.corpus, self.folder, self.limit, self.pause = target, corpus, folder, limit, pause
        self.log = folder.with_name(folder.name + ".log")
        self.log.touch()

    def child(self, name: str, gate: Path | None = None, hold: tuple[int, Path] | None = None) -> int:
        """A process that extracts; it leaves `<name>.json`, what extract returned, and `<name>.progress`.

        It begins when the file `gate` is there. hold (n, file): at its n-th shard it waits for the file, so that no
        other need be quick enough to meet it, however the machine shares its time out.
        """
        child = os.fork()
        if child:
            ALIVE.add(child)
            return child
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its bar
            os.environ["EAGLE3NB_PROGRESS"] = str(self.folder.with_name(f"{name}.progress"))
            if gate:
                until(gate.exists, pause=0.001)
            self.watch(name, *(hold or (0, None)))
            found = extraction.extract(Corpus.open(self.corpus), self.target, self.folder, limit=self.limit, **SETTINGS)
            self.folder.with_name(f"{name}.json").write_text(json.dumps(found))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def watch(self, name: str, most: int, go_on: Path | None) -> None:
        """Log each shard that is begun, and take `pause` more for each; at the `most`-th, wait for `go_on`."""
        real, log, mine = extraction.shard, os.open(self.log, os.O_WRONLY | os.O_APPEND), []

        def shard(corpus, target, first, last, *rest):
            os.write(log, f"{first} {last} {name}\n".encode())
            mine.append(first)
            time.sleep(self.pause)
            if len(mine) == most:
                until(go_on.exists, pause=0.001)
            return real(corpus, target, first, last, *rest)

        extraction.shard = shard

    def begun(self) -> list[tuple[tuple[int, int], str]]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [((int(first), int(last)), name) for first, last, name in lines]

    def done(self) -> set[tuple[int, int]]:
        try:
            return {(shard["first"], shard["last"]) for shard in read_manifest(self.folder)["shards"]}
        except UserError:  # not even that, so early
            return set()

    def claimed(self, shard: tuple[int, int]) -> bool:
        """Whether a process has the shard's claim: the lock, since the file may stand without it for a moment."""
        try:
            handle = os.open(self.folder / f"{shard_name(*shard)}.claim", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)


def ended(child: int) -> int:
    """Its exit status: negative, the signal that killed it."""
    status = os.waitpid(child, 0)[1]
    ALIVE.discard(child)
    return os.waitstatus_to_exitcode(status)


def undisturbed(target, corpus: Path, folder: Path, limit: int = 0) -> tuple[Store, float]:
    """The store of one process that nobody disturbs, and seconds a shard."""
    run, began = Run(target, corpus, folder / "undisturbed", limit), time.monotonic()
    assert ended(run.child("undisturbed")) == 0
    store = Store.open(run.folder)
    assert len(run.begun()) == len(store.shards)
    return store, (time.monotonic() - began) / len(store.shards)


def same(store: Store, whole: Store) -> None:
    """Content, files and what lies beside them."""
    assert store.content_hash() == whole.content_hash() and store.verify()
    assert [shard["xxh3"] for shard in store.shards] == [shard["xxh3"] for shard in whole.shards]
    names = [{file.name for file in s.folder.iterdir()} for s in (store, whole)]
    assert names[0] == names[1] and not any(name.endswith((".partial", ".claim")) for name in names[0]), names


def killed(target, corpus: Path, folder: Path) -> None:
    """KILLS processes, one after the other, each killed at a moment of its own, from the first shard to the last."""
    whole, a_shard = undisturbed(target, corpus, folder)
    ranges = [(shard["first"], shard["last"]) for shard in whole.shards]
    assert len(ranges) > 2 * KILLS
    rng = np.random.default_rng(int(os.environ.get("SEED", "0")))
    run, lost, points = Run(target, corpus, folder / "killed"), [], []
    # Each after so many shards stand (none, up to all but a few), and then at any moment of the next two. None comes
    # further than that and two more, however long we stood still meanwhile.
    for number, after in enumerate(np.sort(rng.integers(0, len(ranges) - 3, KILLS))):
        before, wait = len(run.begun()), rng.uniform(0, 2 * a_shard)
        child = run.child(f"killed-{number}", hold=(after + 4 - len(run.done()), folder / "never"))
        until(lambda after=after: sum(1 for _ in run.folder.glob("shard-*.safetensors")) >= after, pause=0.0005)
        time.sleep(min(wait, 10))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        begun, done = [r for r, _ in run.begun()[before:]], run.done()
        points.append(len(done))
        opened = [r for r in begun if r not in done]
        assert opened == begun[len(begun) - len(opened):] and len(opened) <= 2, (opened, begun)  # one in the target,
        lost += opened                                                                            # one being written
    assert points == sorted(points) and points[0] <= len(ranges) // 4 and points[-1] >= len(ranges) // 2, points
    assert ended(run.child("last")) == 0
    begun = [r for r, _ in run.begun()]
    assert sorted(begun) == sorted(ranges + lost)  # everything once, and again only what was open
    same(Store.open(run.folder), whole)
    print(f"{KILLS} kills with {points} of {len(ranges)} shards finished; {len(lost)} shards were open")


def shared(target, corpus: Path, folder: Path) -> None:
    """Two processes on one folder from its first moment on; each tells what it did itself."""
    whole, _ = undisturbed(target, corpus, folder, FEW)
    run, gate = Run(target, corpus, folder / "shared", FEW, PAUSE), folder / "gate"
    both = folder / "both"
    children = [run.child(name, gate, (2, both)) for name in ("a", "b")]
    gate.touch()
    until(lambda: {name for _, name in run.begun()} == {"a", "b"}, pause=0.0005)
    both.touch()
    assert [ended(child) for child in children] == [0, 0]
    begun = run.begun()
    assert len({r for r, _ in begun}) == len(begun) == len(whole.shards)
    told = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("a", "b")}
    for name, other in (("a", "b"), ("b", "a")):
        made = [r for r, by in begun if by == name]
        tokens = sum(shard["tokens"] for shard in whole.shards if (shard["first"], shard["last"]) in made)
        found = told[name]
        assert found["shards_made"] == len(made) > 0 and found["extracted_tokens"] == tokens
        assert found["shards_made"] + found["shards_by_others"] + found["shards_kept"] == len(whole.shards)
        assert found["shards_by_others"] <= told[other]["shards_made"]
        assert found["rows"] == len(whole) and found["bytes"] == told[other]["bytes"]
        progress = json.loads((folder / f"{name}.progress").read_text())
        assert progress["done"] == progress["total"] == tokens
    same(Store.open(run.folder), whole)


def one_killed(target, corpus: Path, folder: Path) -> None:
    """Two processes, one of them killed on the way: the other makes what that one had open, and nothing else again."""
    whole, _ = undisturbed(target, corpus, folder, FEW)
    run, gate = Run(target, corpus, folder / "shared", FEW, PAUSE), folder / "gate"
    dead = folder / "dead"  # the victim does not outrun its end, nor the other take all before it
    victim, other = (run.child(name, gate, (most, dead)) for name, most in (("victim", 5), ("other", 2)))
    gate.touch()
    until(lambda: sum(name == "victim" for _, name in run.begun()) >= 5, pause=0.0005)
    os.kill(victim, signal.SIGKILL)
    assert ended(victim) == -signal.SIGKILL
    dead.touch()
    assert ended(other) == 0
    begun = run.begun()
    again = [r for r, name in begun if name == "other" and (r, "victim") in begun]
    assert len(begun) == len(whole.shards) + len(again) and len(again) <= 2, again
    found = json.loads((folder / "other.json").read_text())
    # What the victim had finished before the other opened the store is not "by others" but kept.
    assert found["shards_made"] + found["shards_by_others"] + found["shards_kept"] == len(whole.shards)
    same(Store.open(run.folder), whole)


def stopped(target, corpus: Path, folder: Path) -> None:
    """A process that stands still keeps its shards: the other waits, and says so; then the first goes on, or dies."""
    whole, _ = undisturbed(target, corpus, folder, FEW)
    ranges = [(shard["first"], shard["last"]) for shard in whole.shards]
    for how, status in ((signal.SIGCONT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        run = Run(target, corpus, folder / how.name, FEW, PAUSE)
        awake = folder / f"{how.name}.awake"
        sleeper = run.child("sleeper", hold=(6, awake))
        until(lambda run=run: len(run.begun()) >= 4, pause=0.0005)
        held, pause, told = [], 0.003, folder / "other.progress"
        while not held or (run.folder / "manifest.json.claim").exists():  # whoever holds that stops all others
            os.kill(sleeper, signal.SIGCONT)
            time.sleep(pause)  # longer each time: a busy machine may not come to it at once
            os.kill(sleeper, signal.SIGSTOP)
            os.waitpid(sleeper, os.WUNTRACED)
            held, pause = [r for r in ranges if run.claimed(r) and r not in run.done()], min(1.2 * pause, 10)
        told.unlink(missing_ok=True)
        other = run.child("other")
        until(lambda run=run, held=held: len(run.done()) == len(whole.shards) - len(held), pause=0.0005)
        until(lambda told=told: told.exists() and "waits for other processes" in told.read_text(), pause=0.0005)
        assert held and os.waitpid(other, os.WNOHANG) == (0, 0)
        awake.touch()
        os.kill(sleeper, how)
        assert ended(sleeper) == status and ended(other) == 0
        by_other = [r for r, name in run.begun() if name == "other"]
        assert [r for r in held if r in by_other] == (held if how == signal.SIGKILL else [])
        found = json.loads((folder / "other.json").read_text())
        assert found["shards_made"] == len(by_other) and found["others_s"] > 0
        same(Store.open(run.folder), whole)


SCENARIOS = {"killed": killed, "shared": shared, "one_killed": one_killed, "stopped": stopped}

if __name__ == "__main__":
    target, corpus, folder = TransformersTarget(sys.argv[1], torch.float32, "cpu"), Path(sys.argv[2]), Path(sys.argv[3])
    for scenario in sys.argv[4:]:
        (folder / scenario).mkdir()
        began = time.monotonic()
        try:
            SCENARIOS[scenario](target, corpus, folder / scenario)
        finally:
            for child in ALIVE:
                os.kill(child, signal.SIGKILL)
        print(f"{scenario}: {time.monotonic() - began:.1f} s", flush=True)
