"""What happens to a store when processes die or meet: python processes.py SCENARIO FOLDER

Each scenario forks its children from this one process, which has imported everything, and asserts what it finds.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import shards
import torch
import waiting

from eagle3nb.errors import UserError
from eagle3nb.states import manifest as manifests
from eagle3nb.states import shard as shard_files
from eagle3nb.states import writing
from eagle3nb.states.store import Store, open_writer

torch.set_num_threads(1)
DTYPE = "fp8_e4m3"
CHILDREN = []


def opened(folder, rows):
    return open_writer(folder, {"corpus": "x", "dtype": DTYPE}, shards.sizes(rows))


def forked(do) -> int:
    """A child that does something and ends; its process number."""
    child = os.fork()
    if child:
        CHILDREN.append(child)
        return child
    try:
        do()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(child: int) -> int:
    """Its exit status: negative, the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(folder, rows, ranges):
    writer = opened(folder, rows)
    writer.write_head(shards.head())
    for first, last in ranges:
        writer.write(first, last, shards.shard(first, last, rows))
    return Store.open(folder)


def complete(folder, rows, ranges) -> list[tuple[int, int]]:
    """Write what is not there yet; returns what was written."""
    writer, made = opened(folder, rows), []
    writer.write_head(shards.head())
    for first, last in ranges:
        with writer.claim(first, last) as mine:
            if mine:
                writer.write(first, last, shards.shard(first, last, rows))
                made.append((first, last))
    return made


def clean(folder) -> None:
    strangers = [file.name for file in folder.iterdir() if file.name.endswith((".partial", ".claim"))]
    assert not strangers, strangers


# ---------------------------------------------------------------------------------------------------- killed


def at_every_line(seen, do) -> None:
    """Do it, and call seen(n) before its nth line of the store's code."""
    own = {module.__file__ for module in (writing, shard_files, manifests, sys.modules["eagle3nb.files"])}
    count = 0

    def line(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            seen(count)
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in own else None)
    do()
    sys.settrace(None)


def steps(folder: Path, do, note: Path) -> list[int]:
    """The lines before which something in the folder has changed since the line before: all that a kill can tell apart,
    since what is not on disk ends with the process."""
    found, states = [1], [None]

    def seen(count):
        state = sorted((file.name, (s := file.stat()).st_ino, s.st_size, s.st_mtime_ns) for file in folder.iterdir())
        if state != states[-1]:
            found.append(count)
            states.append(state)

    assert ended(forked(lambda: (at_every_line(seen, do), note.write_text(json.dumps(found))))) == 0
    return json.loads(note.read_text())


def kill(step: int, do) -> None:
    """Do it in a child that is killed before the given line."""
    def seen(count):
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(lambda: at_every_line(seen, do))) == -signal.SIGKILL


def kill_everywhere(folder: Path) -> None:
    """SIGKILL at every step that a process goes through from opening the store to its second shard."""
    shard_files.BLOCK, rows, ranges = 512, 6, [(0, 1), (2, 3), (4, 5)]
    expected = whole(folder / "whole", rows, ranges)
    opened(folder / "begun", rows).write(0, 1, shards.shard(0, 1, rows))
    stale = folder / "begun" / f"{manifests.shard_name(4, 5)}.7.partial"
    stale.write_text("of a process that died before")
    made, prepared, here = shards.shard(2, 3, rows), shards.head(), folder / "killed"

    def work():
        writer = opened(here, rows)
        writer.write_head(prepared)
        with writer.claim(2, 3) as mine:
            assert mine
            writer.write(2, 3, made)

    def afresh():
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(folder / "begun", here)

    afresh()
    seen, found = set(), steps(here, work, folder / "steps")
    for step in found:
        afresh()
        kill(step, work)
        manifest = manifests.read_manifest(here)  # whole, whenever it was
        assert all(manifests.same(here, entry) for entry in manifests.files_of(manifest))
        done = {(shard["first"], shard["last"]) for shard in manifest["shards"]}
        assert {(0, 1)} <= done <= {(0, 1), (2, 3)}
        seen.add(((2, 3) in done, bool(manifest["head"]), any(here.glob("*.partial")), any(here.glob("*.claim"))))
        writer = opened(here, rows)
        clean(here)
        assert {file.name for file in here.glob("*.safetensors")} == {e["file"] for e in manifests.files_of(manifest)}
        with writer.claim(2, 3) as mine:
            assert mine == ((2, 3) not in done)
        made_again = complete(here, rows, ranges)
        assert made_again == [r for r in ranges if r not in done], made_again
        store = Store.open(here)
        assert store.content_hash() == expected.content_hash() and store.verify()
        assert [s["xxh3"] for s in store.shards] == [s["xxh3"] for s in expected.shards]
        clean(here)
    assert len(found) > 30 and len(seen) >= 6, (len(found), seen)  # before and after each rename, with leftovers or not
    print(len(found), "kills,", len(seen), "kinds of what they leave")


# ---------------------------------------------------------------------------------------------------- together


def together(folder: Path) -> None:
    """Four processes on one folder from its first moment on, two of them killed on the way.

    However the machine shares its time out, each has its part and none of the two outruns its end: after their first
    shard all wait until each has one, and two wait at their 5th, two at their 10th, until both are killed. That leaves
    shards enough for each to come so far.
    """
    rows, ranges = 60, [(i, i + 1) for i in range(0, 60, 2)]
    expected = whole(folder / "whole", rows, ranges)
    here, log, gate, all_four, dead = (folder / name for name in ("shared", "log", "gate", "all", "dead"))
    log.touch()

    def work(number, most):
        waiting.until(gate.exists, pause=0.001)
        writer, made = opened(here, rows), 0
        writer.write_head(shards.head())
        for first, last in ranges[number:] + ranges[:number]:
            with writer.claim(first, last) as mine:
                if not mine:
                    continue
                made += 1
                if made == most:
                    waiting.until(dead.exists, pause=0.001)
                time.sleep(0.004)
                writer.write(first, last, shards.shard(first, last, rows))
                with open(log, "a") as handle:
                    handle.write(f"{first} {os.getpid()}\n")
            if made == 1:
                waiting.until(all_four.exists, pause=0.001)

    def logged() -> list[list[str]]:
        return [line.split() for line in log.read_text().splitlines()]

    children = [forked(lambda number=number, most=most: work(number, most))
                for number, most in ((0, 5), (2, 10), (11, 5), (20, 10))]
    gate.touch()
    waiting.until(lambda: len(logged()) == 4, pause=0.001)
    all_four.touch()
    for child, after in ((children[0], 6), (children[2], 14)):
        waiting.until(lambda after=after: len(logged()) >= after, pause=0.001)
        os.kill(child, signal.SIGKILL)
    dead.touch()
    statuses = [ended(child) for child in children]
    assert statuses == [-9, 0, -9, 0], statuses
    left = complete(here, rows, ranges)
    assert len(left) <= 2, left  # what the killed were at, if the others had gone past it by then
    by = logged()
    assert len(by) == len({first for first, _ in by})  # nothing was written twice
    assert len({process for _, process in by}) == 4
    store = Store.open(here)
    assert store.content_hash() == expected.content_hash() and store.verify()
    assert [s["xxh3"] for s in store.shards] == [s["xxh3"] for s in expected.shards]
    clean(here)


def living(folder: Path) -> None:
    """A process stopped in the middle of a write keeps its claim and its file; once killed, both are free."""
    shard_files.BLOCK, rows, ranges = 256, 8, [(0, 3), (4, 7)]
    here = folder / "states"
    opened(here, rows).write_head(shards.head())

    def stopped():
        def stop(path, *arguments, **named):
            handle = open(path, *arguments, **named)  # noqa: SIM115 (the writer closes it)
            if path.name.endswith(".partial"):
                handle.write(b"half of it")
                os.kill(os.getpid(), signal.SIGSTOP)
            return handle

        shard_files.open = stop
        writer = opened(here, rows)
        with writer.claim(0, 3) as mine:
            assert mine
            writer.write(0, 3, shards.shard(0, 3, rows))

    child = forked(stopped)
    os.waitpid(child, os.WUNTRACED)
    for _ in range(2):
        partial = here / f"{manifests.shard_name(0, 3)}.{child}.partial"
        assert partial.read_bytes() == b"half of it"
        dead = here / f"{manifests.shard_name(4, 7)}.{os.getpid()}.partial"  # a number that lives, and no claim
        dead.write_bytes(b"left")
        writer = opened(here, rows)
        assert partial.exists() and not dead.exists()
        with writer.claim(0, 3) as mine:
            assert not mine
        try:
            writer.write(0, 3, shards.shard(0, 3, rows))
            raise AssertionError("written over another's claim")
        except UserError as error:
            assert "another process is writing" in str(error), error
        assert complete(here, rows, ranges) in ([(4, 7)], [])
        assert partial.exists() and writer.done == {(4, 7)}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with opened(here, rows).claim(0, 3) as mine:
        assert mine and not partial.exists()
    assert complete(here, rows, ranges) == [(0, 3)]
    assert Store.open(here).content_hash() == whole(folder / "whole", rows, ranges).content_hash()
    clean(here)


def renamed(folder: Path) -> None:
    """A process stopped between its file's rename and its entry in the manifest: the file is no leftover."""
    rows, here = 8, folder / "states"
    opened(here, rows).write_head(shards.head())

    def stopped():
        writer, enter = opened(here, rows), writing.ShardWriter.enter
        writing.ShardWriter.enter = lambda *arguments: (os.kill(os.getpid(), signal.SIGSTOP), enter(*arguments))
        writer.write(0, 3, shards.shard(0, 3, rows))

    child = forked(stopped)
    os.waitpid(child, os.WUNTRACED)
    shard = here / manifests.shard_name(0, 3)
    assert shard.exists() and opened(here, rows).done == set() and shard.exists()
    os.kill(child, signal.SIGCONT)
    assert ended(child) == 0 and opened(here, rows).done == {(0, 3)}
    child = forked(stopped)  # again, and this one dies there
    os.waitpid(child, os.WUNTRACED)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    manifests.write_manifest(here, manifests.read_manifest(here) | {"shards": []})  # as if it had never been entered
    assert opened(here, rows).done == set() and not shard.exists()


def readers(folder: Path) -> None:
    """Six processes open and read one store at once."""
    rows, ranges = 40, [(0, 9), (10, 30), (31, 39)]
    expected = whole(folder / "states", rows, ranges).content_hash()

    def read():
        store = Store.open(folder / "states", verify="each")
        assert store.content_hash() == expected and store.verify()

    children = [forked(read) for _ in range(6)]
    assert [ended(child) for child in children] == [0] * 6


if __name__ == "__main__":
    scenarios = (kill_everywhere, together, living, renamed, readers)
    try:
        {scenario.__name__: scenario for scenario in scenarios}[sys.argv[1]](Path(sys.argv[2]))
    finally:
        for child in CHILDREN:  # one that is stopped would outlive us
            with suppress(OSError):
                if os.waitpid(child, os.WNOHANG)[0] == 0:
                    os.kill(child, signal.SIGKILL)
