"""`eagle3nb status RUN`: follows a headless run from another terminal; it only reads, so it disturbs nothing."""

import json
import os
import time
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import shown
from eagle3nb.record import console
from eagle3nb.record.runs import held, read_run, state_folder
from eagle3nb.record.stage import paths_of
from eagle3nb.record.tables import number, span


def status(run: str, once: bool = False, every: float = 2.0) -> int:
    """Prints where the run stands; goes on until the runner ends, unless `once`. UserError for an unknown run."""
    paths = paths_of(run)
    if not paths.run.is_dir():
        known = sorted(p.name for p in paths.run.parent.glob("*") if p.is_dir())
        raise UserError(f"no run {run!r} in outputs/ (runs: {', '.join(known) or 'none'})")
    before = ""
    while True:
        running = held(paths.run)
        text = picture(paths.run, state_folder(paths.run), running)
        if text != before:
            print(text, flush=True)
        before = text
        if once or not running:
            return 0
        time.sleep(every)


def picture(folder: Path, state: Path, running: bool) -> str:
    """Finished stages, then the one that runs with progress and last metrics."""
    now = console.read_progress(state / "status.json") if running else {}
    found = read_run(folder)
    lines = [f"{console.head(stage)} {wrong}; delete it and run the stage again"
             for stage, wrong in found.damaged.items()]
    for stage, twin in found.twins.items():
        if stage == now.get("stage"):
            lines.append(f"{console.head(stage)} running for {span(round(time.time() - now['started']))}")
            progress = console.progress_line(console.read_progress(state / "progress.json"))
            metrics = last_line(Path(now["work"]) / "drafter" / "metrics.jsonl") if stage == "training" else ""
            lines += [f"{'':13} {text}" for text in (progress, metrics) if text]
        else:
            sentence = twin["result"].get("verdict") if twin["status"] == "ok" else twin.get("error")
            lines.append(f"{console.head(stage)} {twin['status']}: {sentence}")
    return "\n".join(lines) or f"{shown(folder)} has no stage yet"


def last_line(path: Path) -> str:
    """The last whole row of metrics.jsonl as `step 120, loss 2.31`; "" where there is none."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, os.path.getsize(path) - 65536))
            whole = [line for line in handle.read().split(b"\n")[:-1] if line.strip()]
        row = json.loads(whole[-1])
    except (OSError, ValueError, IndexError):
        return ""
    return ", ".join(f"{k} {number(v)}" for k, v in row.items() if isinstance(v, (int, float)))
