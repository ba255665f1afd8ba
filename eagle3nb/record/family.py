"""Processes that belong to one execution of a stage, found by a mark in their environment, and their end.

A kernel has a session of its own, and so may what a notebook starts: process groups do not hold them together, and
once a parent is dead its children no longer tell whose they were. The environment they inherited still does.
"""

import contextlib
import os
import time

import psutil

MARK = "EAGLE3NB_FAMILY"


def family(mark: str) -> list[psutil.Process]:
    """Every living process with this mark, except the caller."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end_family(mark: str, patience: float = 10.0) -> list[psutil.Process]:
    """Kills all of them, and what they start meanwhile; returns those still there after `patience` seconds (none)."""
    until = time.monotonic() + patience
    while (left := family(mark)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
    return left
