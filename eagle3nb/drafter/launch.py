"""Starts the training process from a notebook and follows it.

Training runs in a process of its own, so that an interrupted or killed kernel never leaves a half-written drafter and
a later start resumes; its records are metrics.jsonl, its own words train.log, both in the drafter's folder. When the
kernel dies, the process notices and ends (parent.py). Several processes, on one machine or more, are torchrun's
(elastic.py).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.elastic import command, processes_here
from eagle3nb.drafter.settings import INTERRUPTED, ONE_READER, Machines, Settings
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown, write_json
from eagle3nb.parent import environment
from eagle3nb.progress import progress
from eagle3nb.states.stream import streams

ALONE, ELASTIC = Machines(), "eagle3nb.drafter.elastic"
POLL, REDRAW = 0.5, 5.0  # seconds between looks at metrics.jsonl, and between redrawn plots
FEEDING = "feeding.json"  # beside states that stream (states/stream.py): their progress


def launch(settings: Settings, vocabulary, on_metrics: Callable[[list[dict]], None] = lambda lines: None,
           machines: Machines = ALONE) -> list[dict]:
    """Train to the end in a subprocess, or several; returns the lines of metrics.jsonl.

    vocabulary: target ids of D, ascending (corpus.vocabulary), kept as vocabulary.json beside the drafter.
    on_metrics(lines) is called with all lines so far every few seconds and after every evaluation. An interrupt of the
    kernel lets the training save a checkpoint and end. Raises UserError with the training's own line where it fails.
    machines: how many processes, and where. On machines after the first the drafter's folder stays without metrics,
    unless they share a disk; then the list is empty.
    """
    settings.check()
    machines.check()
    here = processes_here(machines)
    several = here > 1 or machines.nodes > 1
    if several and streams(settings.states):
        raise UserError(ONE_READER)
    if settings.accumulate < (whole := here * machines.nodes):
        print(f"accumulate is {settings.accumulate}: so many packs an optimiser step leave some of {whole} processes "
              f"without work; set it to {whole} or more")
    folder = Path(settings.drafter)
    write_json(folder / "vocabulary.json", {"ids": [int(i) for i in vocabulary]})
    write_json(folder / "settings.json", asdict(settings))
    log_path = folder / (f"train-{machines.node_rank}.log" if machines.node_rank else "train.log")
    with open(log_path, "ab") as log:
        said = log.tell()                       # what earlier starts wrote is not this one's
        process = start(folder / "settings.json", log, machines, here)
        started = time.time()
        try:
            prepare(process, folder / "metrics.jsonl", started, Path(settings.states) / FEEDING)
            follow(process, folder / "metrics.jsonl", started, on_metrics)
        except BaseException:                   # an interrupt, or a plot that fails: leave nothing running
            stop(process)
            raise
    told = log_path.read_bytes()[said:].decode(errors="replace").strip().splitlines()
    if process.returncode != 0 or INTERRUPTED in told:
        raise UserError(failure(process.returncode, told, log_path))
    lines = read_metrics(folder / "metrics.jsonl")
    on_metrics(lines)
    return lines


def start(settings_path: Path, log, machines: Machines = ALONE, processes: int = 1) -> subprocess.Popen:
    """python -m eagle3nb.drafter.train, or torchrun of several, in a session of its own: a Ctrl-C reaches it through
    us, once."""
    around = environment(PYTHONUNBUFFERED="1", EAGLE3NB_PARENT=str(os.getpid()))
    for name in ("EAGLE3NB_PROGRESS", "RANK", "WORLD_SIZE"):  # the notebook's side tells the progress
        around.pop(name, None)
    if machines.nodes == processes == 1:
        what = ["eagle3nb.drafter.train", str(settings_path)]
    else:
        cores = len(os.sched_getaffinity(0))
        around = {"OMP_NUM_THREADS": str(max(1, cores // processes))} | around
        around["EAGLE3NB_NODE_RANK"] = str(machines.node_rank)
        what = [ELASTIC, *command(machines, processes, settings_path)]
    return subprocess.Popen([sys.executable, "-m", *what], env=around, stdin=subprocess.DEVNULL, stdout=log,
                            stderr=subprocess.STDOUT, start_new_session=True)


def prepare(process: subprocess.Popen, path: Path, started: float, feeding: Path) -> None:
    """Until training writes its first line. Where states stream, those that it keeps are made before: a bar of them."""
    def told() -> dict:
        fresh = feeding.is_file() and feeding.stat().st_mtime >= started
        return read_json(feeding) if fresh else {}

    def waits() -> bool:
        return process.poll() is None and not current(path, started)

    while waits() and not told():
        time.sleep(POLL)
    if waits():
        first = told()
        with progress(first["total"], first["what"], first["unit"]) as bar:
            while waits() and (now := told()).get("what") == first["what"]:
                bar.advance(now["done"] - bar.done)
                time.sleep(POLL)
    while waits():
        time.sleep(POLL)


def follow(process: subprocess.Popen, path: Path, started: float, on_metrics) -> None:
    """Until the process ends: a progress bar in tokens, plots now and then."""
    lines = current(path, started)
    if not lines:
        return
    drawn, evaluations = 0.0, 0
    with progress(lines[0]["total_tokens"], "training", "tokens") as bar:
        while True:
            ended = process.poll() is not None
            lines = current(path, started)
            bar.expect([line["total_tokens"] for line in lines if "total_tokens" in line][-1:])
            bar.advance(max(0, lines[-1]["tokens"] - bar.done) if lines else 0, note(lines))
            validated = sum(line["kind"] == "validation" for line in lines)
            if validated > evaluations or time.monotonic() - drawn > REDRAW:
                on_metrics(lines)
                drawn, evaluations = time.monotonic(), validated
            if ended:
                return
            time.sleep(POLL)


def current(path: Path, started: float) -> list[dict]:
    """The lines of this start's metrics: an older file is not read before the training has taken it up."""
    if not path.is_file() or path.stat().st_mtime < started:
        return []
    return read_metrics(path)


def note(lines: list[dict]) -> str:
    trained = next((line for line in reversed(lines) if line["kind"] == "train"), None)
    evaluated = next((line for line in reversed(lines) if line["kind"] == "validation"), None)
    parts = [f"loss {trained['loss']:.3f}"] if trained and trained["loss"] is not None else []
    parts += [f"acceptance {evaluated['acceptance']:.3f}"] if evaluated else []
    waited = [line["waited_s"] for line in lines if line["kind"] == "train" and "waited_s" in line]
    share = sum(waited) / max(lines[-1]["seconds"], 1e-3)
    return ", ".join([*parts, *([f"{share:.0%} waiting for states"] if share > 0.005 else [])])


def stop(process: subprocess.Popen, patience: float = 60.0) -> None:
    """Ask for a checkpoint and an end; after `patience` seconds insist.

    torchrun's own processes are asked themselves: it would give them 30 seconds, too few for a large checkpoint.
    """
    import psutil

    if process.poll() is None:
        children = psutil.Process(process.pid).children() if ELASTIC in process.args else []
        for one in children or [process]:
            one.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def failure(code: int, told: list[str], log: Path) -> str:
    """The training's own last `error: …` line, or what its exit code says; told: the lines of this start."""
    errors = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
    if code == 1 and errors:
        return errors[-1]
    if code == 0:
        return f"training was {INTERRUPTED}"
    if code < 0:
        advice = "usually for lack of memory: lower pack_tokens" if code == -signal.SIGKILL else "run again to resume"
        return f"training was killed by {signal.Signals(-code).name}, {advice}; {shown(log)} has its last words"
    last = told[-1] if told else "no output"
    return f"training ended with exit code {code} ({last}); {shown(log)} has the rest; run again to resume"
