"""Starts the training process from a notebook and follows it.

Training runs in a process of its own, so that an interrupted or killed kernel never leaves a half-written drafter and
a later start resumes; its records are metrics.jsonl, its own words train.log, both in the drafter's folder. When the
kernel dies, the process notices and ends (parent.py).
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
from eagle3nb.drafter.settings import Settings
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown, write_json
from eagle3nb.parent import environment
from eagle3nb.progress import progress

POLL, REDRAW = 0.5, 5.0  # seconds between looks at metrics.jsonl, and between redrawn plots
FEEDING = "feeding.json"  # beside states that stream (states/stream.py): their progress


def launch(settings: Settings, vocabulary, on_metrics: Callable[[list[dict]], None] = lambda lines: None) -> list[dict]:
    """Train to the end in a subprocess; returns the lines of metrics.jsonl.

    vocabulary: target ids of D, ascending (corpus.vocabulary), kept as vocabulary.json beside the drafter.
    on_metrics(lines) is called with all lines so far every few seconds and after every evaluation. An interrupt of the
    kernel lets the training save a checkpoint and end. Raises UserError with the training's own line where it fails.
    """
    settings.check()
    folder = Path(settings.drafter)
    write_json(folder / "vocabulary.json", {"ids": [int(i) for i in vocabulary]})
    write_json(folder / "settings.json", asdict(settings))
    with open(folder / "train.log", "ab") as log:
        process = start(folder / "settings.json", log)
        started = time.time()
        try:
            prepare(process, folder / "metrics.jsonl", started, Path(settings.states) / FEEDING)
            follow(process, folder / "metrics.jsonl", started, on_metrics)
        except BaseException:                   # an interrupt, or a plot that fails: leave nothing running
            stop(process)
            raise
    if process.returncode != 0:
        raise UserError(failure(process.returncode, folder / "train.log"))
    lines = read_metrics(folder / "metrics.jsonl")
    on_metrics(lines)
    return lines


def start(settings_path: Path, log) -> subprocess.Popen:
    """python -m eagle3nb.drafter.train in a session of its own: a Ctrl-C reaches it through us, once."""
    around = environment(PYTHONUNBUFFERED="1", EAGLE3NB_PARENT=str(os.getpid()))
    around.pop("EAGLE3NB_PROGRESS", None)  # the notebook's side tells the progress
    return subprocess.Popen([sys.executable, "-m", "eagle3nb.drafter.train", str(settings_path)], env=around,
                            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


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
    return ", ".join([*parts, *([f"{share:.0%} waiting for states"] if waited else [])])


def stop(process: subprocess.Popen, patience: float = 60.0) -> None:
    """Ask for a checkpoint and an end; after `patience` seconds insist."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def failure(code: int, log: Path) -> str:
    """The training's own `error: …` line, or what its exit code says."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code == 1 and lines and lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    if code < 0:
        advice = "usually for lack of memory: lower pack_tokens" if code == -signal.SIGKILL else "run again to resume"
        return f"training was killed by {signal.Signals(-code).name}, {advice}; {shown(log)} has its last words"
    last = lines[-1] if lines else "no output"
    return f"training ended with exit code {code} ({last}); {shown(log)} has the rest; run again to resume"
