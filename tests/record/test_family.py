"""What a stage started ends with it, whoever its parent was and however slow the look at the processes is."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from waiting import ended, gone, until

from eagle3nb.record import family as families
from eagle3nb.record.family import MARK, end_family, family

# Starts another in a session of its own, says so, and leaves it behind when it is killed.
PARENT = ("import subprocess, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(900)']; "
          "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True); time.sleep(900)")


@pytest.fixture
def both():
    """(mark, pids of a process with that mark and of its child)."""
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen([sys.executable, "-c", PARENT], env=os.environ | {MARK: mark}, stdout=subprocess.PIPE,
                          text=True) as parent:
        pids = parent.pid, int(parent.stdout.readline())
        until(lambda: len(family(mark)[0]) == 2)
        yield mark, pids
        for pid in pids:
            if not ended(pid):
                psutil.Process(pid).kill()


def test_parent_and_child_end_and_others_stay(both):
    mark, pids = both
    other = f"{mark}-other"
    with subprocess.Popen([sys.executable, "-c", "input()"], env=os.environ | {MARK: other},
                          stdin=subprocess.PIPE) as stranger:
        assert end_family(mark, 300) == [] and all(map(ended, pids))
        assert stranger.poll() is None


def test_a_look_that_takes_longer_than_patience_still_ends_them(both, monkeypatch):
    mark, pids = both

    def slow(mark):
        found = family(mark)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(families, "family", slow)
    end_family(mark, 0.01)
    assert all(map(gone, pids))


def test_one_that_cannot_be_ended_is_returned_in_time(both, monkeypatch):
    mark, pids = both
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    assert {process.pid for process in end_family(mark, 0.5)} == set(pids)
    monkeypatch.undo()
