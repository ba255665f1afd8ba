"""Processes that belong to one execution of a stage, found by a mark in their environment, and their end.

A kernel has a session of its own, and so may what a notebook starts: process groups do not hold them together, and
once a parent is dead its children no longer tell whose they were. The environment they inherited still does.
"""

import contextlib
import os
import time

import psutil

MARK = "EAGLE3NB_FAMILY"
YOUNG = 5.0  # seconds in which a process has long begun to run its program


def family(mark: str) -> tuple[list[psutil.Process], bool]:
    """(every living process with this mark, except the caller; whether one more may be ours).

    Between fork and its program's start a process shows an empty environment, or none: for as long as that takes, and
    on a machine that stalls it takes seconds, nobody can tell whose it is.
    """
    found, open_question = [], False
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark:
                found.append(process)
            elif not process.environ():
                open_question |= is_starting(process)
        except (psutil.Error, OSError):
            open_question |= is_starting(process)
    return found, open_question


def is_starting(process: psutil.Process) -> bool:
    """Whether a process of this user is seconds old."""
    try:
        return time.time() - process.create_time() < YOUNG and process.uids().real == os.getuid()
    except (psutil.Error, OSError):
        return False


def end_family(mark: str, patience: float = 10.0) -> list[psutil.Process]:
    """Kills all of them, and what they start meanwhile; returns those still there after `patience` seconds (none).

    However long a look takes on a machine that stands still: what it found is killed, and looked for once more.
    """
    until, late = time.monotonic() + patience, False
    while True:
        left, open_question = family(mark)
        if not (left or open_question) or late:
            return left
        late = time.monotonic() > until
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
        if not left:
            time.sleep(0.05)
