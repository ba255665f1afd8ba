"""kill -9 while a merge runs: afterwards there is the old corpus or the new one, byte for byte, and nothing else.

The merge runs in a process forked from one that has everything imported, so that one kill costs no second of imports.
"""

import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.corpus import make_corpus
from waiting import until

FILES = ("index.parquet", "merge.json", "merged.jsonl", "rejected.jsonl")
OTHERS = {"corpus/notes.txt": b"mine", "corpus/.checkpoints/deep/x": b"mine too", "corpus.old/x": b"1",
          "corpus.partial": b"2", "corpus.99999999.partial.txt": b"3", "states.99999999.partial/x": b"4",
          "corpus.7x.partial/x": b"5"}
HELPER = '''
import os, signal, sys

def serve():
    from eagle3nb import files
    from eagle3nb.corpus.masks import Markers
    from eagle3nb.corpus.merge import merge
    from eagle3nb.corpus.records import find_sources
    markers = Markers(((163585, 163586, 163587), (163585, 163586)), 163588, (163588,))
    root = sys.argv[1]

    def once(seed, processes):
        merge(find_sources(root + "/in"), root + "/work/corpus", max_seq_len=4096, seed=seed, vocab_size=163840,
              markers=markers, processes=processes)

    def dies(number):
        """Kill this process right before its number-th act on the file system."""
        acts = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "open",
                "ctypes.dlsym", "os.scandir", "shutil.rmtree", "shutil.copytree", "os.listdir"}
        count = 0
        def hook(event, args):
            nonlocal count
            if event in acts and (event != "open" or root in str(args[0])):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)

    for line in sys.stdin:
        seed, processes, forever, number, exchange = map(int, line.split())
        child = os.fork()
        if not child:
            os.setsid()
            sys.stdin.close()
            sys.stdout = open(os.devnull, "w")
            try:
                if not exchange:
                    files.exchange = lambda a, b: False
                if number:
                    dies(number)
                once(seed, processes)
                while forever:
                    seed = 3 - seed
                    once(seed, processes)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

if __name__ == "__main__":
    serve()
'''


class Helper:
    """Merges of `root`/in into `root`/work/corpus, on demand."""

    def __init__(self, root: Path):
        self.root, self.leader = root, None
        (root / "helper.py").write_text(HELPER)
        self.process = subprocess.Popen([sys.executable, root / "helper.py", root], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def start(self, seed: int, processes=1, forever=False, number=0, exchange=True) -> int:
        """The merging process's number, which is its group's too. number: the act before which it kills itself."""
        self.process.stdin.write(f"{seed} {processes} {int(forever)} {number} {int(exchange)}\n")
        self.process.stdin.flush()
        self.leader = int(self.process.stdout.readline())
        return self.leader

    def ended(self) -> int:
        """Its exit status, −9 where it was killed."""
        status, self.leader = int(self.process.stdout.readline()), None
        return status

    def once(self, seed: int, **options) -> int:
        self.start(seed, **options)
        return self.ended()


@pytest.fixture
def helper(tmp_path):
    helper = Helper(tmp_path)
    yield helper
    if helper.leader:  # the test has failed, and this one might merge for ever
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.leader, signal.SIGKILL)
    helper.process.stdin.close()
    helper.process.wait(300)


def state(folder: Path) -> tuple:
    """The corpus as its bytes are."""
    return tuple(hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES)


def put_others(work: Path) -> None:
    for name, data in OTHERS.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(data)


def check_others(work: Path) -> None:
    for name, data in OTHERS.items():
        assert (work / name).read_bytes() == data
    assert {path.name for path in (work / "corpus").iterdir()} == {*FILES, "notes.txt", ".checkpoints"}


def left_behind(work: Path) -> list[str]:
    known = {name.split("/")[0] for name in OTHERS} | {"corpus"}
    return sorted(path.name for path in work.iterdir() if path.name not in known)


def group(leader: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reached(stage: int, work: Path, leader: int, before: int) -> bool:
    """Has the merge come so far? 0 it was started, 7 the new corpus stands where the old one stood."""
    partial = work / f"corpus.{leader}.partial"
    held = []
    for folder in (partial / "spool", partial):
        with contextlib.suppress(FileNotFoundError):  # glob would raise that of a folder that goes while it looks
            held += [f"{folder.name}/{name}" for name in os.listdir(folder)]
    found = [True, partial.exists(), any(name.startswith("spool/") for name in held),
             (partial / "merged.jsonl").exists(), any("/index.parquet" in name for name in held),
             any("/merge.json" in name for name in held), (partial / "merge.json").exists()]
    renewed = (work / "corpus").stat().st_ino != before
    return renewed or stage < len(found) and found[stage]


def test_killed_at_a_random_moment_the_corpus_is_wholly_old_or_wholly_new(tmp_path, helper):
    make_corpus(tmp_path / "in", records=1400)  # 18 MB
    packed = next((tmp_path / "in").glob("*/part-000.jsonl"))
    subprocess.run(["gzip", "-1", packed], check=True)
    work, rng, states = tmp_path / "work", random.Random(0), {}
    for seed in (2, 1):
        assert helper.once(seed, processes=2) == 0
        states[state(work / "corpus")] = seed
    assert len(states) == 2
    put_others(work)
    seen = [1]
    # Three times each stage; then the last and an early one in turn, until both ends were met often enough.
    for number, stage in enumerate([*(n // 3 for n in range(24)), *(7, 1) * 20]):
        changes = sum(one != other for one, other in itertools.pairwise(seen))
        if number >= 24 and changes >= 3 and seen.count(seen[0]) > 3:
            break
        before = (work / "corpus").stat().st_ino
        leader = helper.start(3 - seen[-1], processes=2, forever=True)
        until(lambda stage=stage, leader=leader, before=before: reached(stage, work, leader, before), pause=0.001)
        time.sleep(rng.random() * (0.5 if number < 9 else 0.05))
        if number % 2:
            os.kill(leader, signal.SIGKILL)  # its workers find out by themselves
        else:
            os.killpg(leader, signal.SIGKILL)
        assert helper.ended() == -signal.SIGKILL
        until(lambda leader=leader: not group(leader), pause=0.02)
        seen.append(states[state(work / "corpus")])  # a KeyError is a mixture
        check_others(work)
        assert len(left_behind(work)) <= 1 and all(name.endswith(".partial") for name in left_behind(work))
    assert changes >= 3 and seen.count(seen[0]) > 3
    assert helper.once(1, processes=2) == 0
    assert left_behind(work) == [] and states[state(work / "corpus")] == 1
    check_others(work)


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_before_each_act_on_the_file_system(tmp_path, helper, write, exchange):
    """Where the system cannot exchange folders there may be none for a moment; then the old one waits beside it."""
    rng, work, states = random.Random(1), tmp_path / "work", {}
    rows = [{"input_ids": [rng.randrange(99) for _ in range(9)], "loss_mask": [1] * 9} for _ in range(30)]
    write(tmp_path / "in/A/1.jsonl", rows[:20])
    write(tmp_path / "in/A/2.jsonl.gz", rows[20:])
    for seed in (2, 1):
        assert helper.once(seed) == 0
        states[seed] = state(work / "corpus")
    put_others(work)
    now, renewed, absent = 1, 0, 0
    for number in range(1 if exchange else 45, 500):  # the acts before the exchange are the same
        status = helper.once(3 - now, number=number, exchange=exchange)
        there = (work / "corpus").exists()
        if not there:
            assert not exchange and status == -signal.SIGKILL
            [aside] = work.glob("corpus.*.replaced")
            assert state(aside) == states[now]
            absent += 1
            assert helper.once(now, exchange=exchange) == 0  # puts it back, and merges the same
        found = state(work / "corpus")
        assert found in states.values()
        check_others(work)
        if found != states[now]:
            now, renewed = 3 - now, renewed + 1
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert number > 60 and renewed > 1 and left_behind(work) == [] and bool(absent) != exchange
