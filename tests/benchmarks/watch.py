"""A command run to its end under watch: wall time, CPU time, and the peak memory of it and all processes below it."""

import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERVAL, SHARE = 0.05, 0.1  # seconds between two readings; the most of one core that reading may take
ROLLUP = "/proc/{}/smaps_rollup"
MEASURE = "PSS" if os.path.exists(ROLLUP.format("self")) else "RSS"


@dataclass(frozen=True)
class Watched:
    """seconds: wall, from start to exit. memory: bytes at the peak; `mapped` of them pages of files, which the kernel
    can take back (0 where only RSS is known)."""

    code: int
    seconds: float
    cpu_seconds: float
    memory: int
    mapped: int


def watch(command: list[str], log: Path, env: dict | None = None) -> Watched:
    """Run `command` with its output in `log`. A reading sums the tree's PSS, or its RSS where /proc has no PSS."""
    peak, done = [(0, 0)], threading.Event()
    with open(log, "wb") as out:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        reader = threading.Thread(target=_sample, args=(process.pid, peak, done))
        reader.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # returns at the exit itself, with the workers' CPU time
            seconds = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            done.set()
            reader.join()
            if process.returncode is None:
                process.kill()
    return Watched(process.returncode, seconds, usage.ru_utime + usage.ru_stime, *peak[0])


def _sample(pid: int, peak: list, done: threading.Event) -> None:
    """Keep the greatest reading in peak[0] until `done`; a reading of a large process takes milliseconds."""
    taken = 0.0
    while not done.wait(max(INTERVAL - taken, taken * (1 / SHARE - 1))):
        started = time.perf_counter()
        peak[0] = max(peak[0], _memory(pid))
        taken = time.perf_counter() - started


def _memory(pid: int) -> tuple[int, int]:
    """(bytes, bytes of mapped files) of the process and its descendants now; one that has just ended counts nothing."""
    total = mapped = 0
    try:
        processes = [psutil.Process(pid)]
        processes += processes[0].children(recursive=True)
    except psutil.Error:
        return 0, 0
    for process in processes:
        try:
            if MEASURE == "RSS":
                total += process.memory_info().rss
                continue
            with open(ROLLUP.format(process.pid)) as rollup:
                sizes = dict(line.split()[:2] for line in rollup if line.startswith("Pss"))
            total += int(sizes["Pss:"]) * 1024
            mapped += int(sizes.get("Pss_File:", 0)) * 1024
        except (psutil.Error, OSError, KeyError):  # it has ended
            continue
    return total, mapped
