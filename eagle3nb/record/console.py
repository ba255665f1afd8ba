"""What the runner prints: a line a stage, one line of progress that moves on a terminal, the failure on stderr."""

import json
import sys
import time
from pathlib import Path

from eagle3nb.files import shown
from eagle3nb.record.declared import stem
from eagle3nb.record.tables import number, span

EVERY = 20.0  # seconds between progress lines where no terminal shows the moving one
told = {"at": 0.0, "open": False}


def head(stage: str) -> str:
    return stem(stage).replace("_", " ").ljust(13)


def read_progress(path: Path) -> dict:
    """The progress file's content; {} while there is none, or one half gone."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def progress_line(found: dict) -> str:
    """`training 12,300/40,000 tokens, 684/s, 40 s left, loss 2.31`."""
    if not found:
        return ""
    parts = [f"{found['what']} {number(round(found['done']))}/{number(round(found['total']))} {found['unit']}",
             f"{number(float(found['rate']))}/s"]
    if found.get("left_s") is not None:
        parts.append(f"{span(max(found['left_s'], 0))} left")
    return ", ".join([*parts, *([found["note"]] if found.get("note") else [])])


def starts(stage: str, reason: str) -> None:
    told["at"] = time.monotonic()
    print(f"{head(stage)} runs ({reason})", flush=True)


def progress(stage: str, path: Path, seconds: float) -> None:
    """Redraws the line on a terminal; elsewhere prints one each EVERY seconds."""
    terminal = sys.stdout.isatty()
    if not terminal and time.monotonic() - told["at"] < EVERY:
        return
    told["at"] = time.monotonic()
    line = f"{head(stage)} {span(round(seconds))}  {progress_line(read_progress(path))}".rstrip()
    if terminal:
        print(f"\r\x1b[2K{line[:118]}", end="", flush=True)
        told["open"] = True
    else:
        print(line, flush=True)


def line_ends() -> None:
    """Clears the moving line."""
    if told["open"]:
        print("\r\x1b[2K", end="", flush=True)
        told["open"] = False


def done(stage: str, twin: dict) -> None:
    print(f"{head(stage)} ok, {span(twin['cost']['total_s'])}: {twin['result']['verdict']}", flush=True)
    lines(twin)


def kept(stage: str, twin: dict) -> None:
    print(f"{head(stage)} unchanged, kept: {twin['result']['verdict']}", flush=True)
    lines(twin)


def lines(twin: dict) -> None:
    """What the stage wants on the console besides: `result["console"]`."""
    for line in twin["result"].get("console", []):
        print(line, flush=True)


def failed(stage: str, twin: dict, folder: Path) -> None:
    sys.stdout.flush()
    record = shown(folder / f"{stem(stage)}.html")
    warn(f"{stem(stage).replace('_', ' ')} failed: {twin['error']} (record: {record})")


def warn(text: str) -> None:
    print(f"eagle3nb: {text}", file=sys.stderr, flush=True)
