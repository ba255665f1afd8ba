"""The training step against the straightforward one, against speculators 0.9.0, and against the machine: one table.

    make benchmark-training [OPTIONS="--quick --no-gate"]
    python tests/benchmarks/training.py [--quick] [--repeats 3] [--minutes 20] [--seconds 3] [--slow 10] [--threads N]
                                        [--cells 512x3x8192,…] [--by wall|cpu] [--seed 0] [--json FILE] [--no-gate]

SmolLM2's shapes in float32, packs of T = 512 and 2048 tokens, K = 3 and 7 steps, |D| = 8192 and 32,000; documents of
256 tokens of which the last 60 % are supervised, every token in D. An optimiser step is forward, backward, clipping and
AdamW. The trainable set is the same for all: embedding and lm_head frozen, as speculators has it; "head trained" is
ours with lm_head trained too, which is this project's default. Contestants (training_contestants.py):
  ours          this trainer's step
  plain         the usual loop: every slot at every step, a T × T mask, [T, |D|] logits and teacher, autograd for all
  speculators   its own model; attention by sdpa (its "flex" has no backward on a CPU, its "eager" is slower and
                larger), loss by its "eager" (its "fused" needs a GPU); its logging and data loading left out
  bound         our step's own matrix products alone, forward and backward, attention's included: nothing else
ours and plain compute the same loss to 1e-4, which is checked in every cell.

Each run is a process of its own, in an order that is reversed from one repeat to the next; medians of all timed steps
count. A step of more than --slow seconds is its contestant's only one in that cell. What would need more memory than is
free, or more time than --minutes leave, is not run, and said so. Time is wall time; CPU seconds stand beside it. Where
others keep the cores busy, `--threads 1 --by cpu` tells more: rates, ratios and targets are then by CPU seconds, which
other processes hardly change (two threads of one product would wait for one another).

  tok/s      tokens of the pack a second, all of them, supervised or not
  peak MB    of the process, Python and torch included (VmHWM); "above" is what it had before the first step
  bound %    the bound's time of the step's
The exit code is 1 where a target is missed, and the target is named; `--no-gate` only prints. speculators is installed
beside .venv by tools/speculators.sh (40 MB).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
SPECULATORS = HERE.parents[1] / ".cache" / "speculators"
TITLES = {"ours": "ours", "ours-head": "ours, head trained", "plain": "plain", "speculators": "speculators",
          "bound": "bound", "bound-head": "bound, head trained"}
CELLS, QUICK = tuple(product((512, 2048), (3, 7), (8192, 32000))), ((512, 3, 8192), (512, 7, 8192))  # (T, K, |D|)
FASTER = {3: 2.5, 7: 5.0}  # times speculators, for each K
MEMORY_CELL, MEMORY = (2048, 7), 0.25  # of speculators'
BOUND = 0.85
SAME = 1e-4  # of the loss of ours and plain, relative


def needed(name: str, T: int, K: int, D: int) -> float:
    """Bytes, roughly and from above, to leave out what this machine cannot hold."""
    logits, scores = 4.0 * T * D, 4.0 * 9 * T * T
    if name == "plain":
        return 1.5e9 + logits * (1 + 3 * K) + 6 * K * scores
    if name == "speculators":
        return 1.5e9 + logits * (1 + 5 * K) + K * (K + 1) / 2 * (scores / 3)
    return 1.5e9 + K * T * 40e3 + 16e3 * D


class Contest:
    """All runs: said[cell][name] is what each run told of itself, problems[cell][name] why there is none."""

    def __init__(self, options):
        self.options, self.started = options, time.monotonic()
        self.said: dict[tuple, dict] = {cell: {name: [] for name in TITLES} for cell in options.cells}
        self.problems: dict[tuple, dict] = {cell: {} for cell in options.cells}
        self.spent: dict[tuple, float] = {}

    def left(self) -> float:
        return 60 * self.options.minutes - (time.monotonic() - self.started)

    def run(self, cell: tuple, name: str, folder: Path) -> None:
        """One fresh process, unless it has told enough, or cannot."""
        o, (T, K, D), before = self.options, cell, self.said[cell][name]
        if name in self.problems[cell] or (before and before[-1]["seconds"][-1] > o.slow):
            return
        free, need = psutil.virtual_memory().available, needed(name, T, K, D)
        for wrong, why in ((name == "speculators" and not SPECULATORS.is_dir(), "run tools/speculators.sh"),
                           (need > free, f"may need {need / 1e9:.0f} GB, {free / 1e9:.0f} are free"),
                           (self.left() < self.spent.get((cell, name), 0), "no time left")):
            if wrong:
                if not before:
                    self.problems[cell][name] = why
                return
        print(f"T {T} K {K} |D| {D}: {TITLES[name]} …", file=sys.stderr, flush=True)
        task, said = folder / "task.json", folder / "said.json"
        said.unlink(missing_ok=True)
        task.write_text(json.dumps({
            "tokens": T, "ttt_steps": K, "draft_vocab": D, "document": 256, "density": 0.6, "seed": o.seed,
            "threads": o.threads, "seconds": o.seconds, "slow": o.slow, "said": str(said)}))
        environment = {**os.environ, "OMP_NUM_THREADS": str(o.threads), "HF_HUB_OFFLINE": "1"}
        if name == "speculators":
            environment["PYTHONPATH"] = str(SPECULATORS)
        clock = time.monotonic()
        try:
            done = subprocess.run([sys.executable, str(HERE / "training_contestants.py"), name, str(task)], text=True,
                                  capture_output=True, env=environment, timeout=max(self.left(), 1),
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (free, free)))
            failed = done.returncode and (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1][:100]
        except subprocess.TimeoutExpired:
            failed = "no time left"
        self.spent[cell, name] = time.monotonic() - clock
        if not failed:
            before.append(json.loads(said.read_text()))
        elif not before:
            self.problems[cell][name] = failed

    def median(self, cell: tuple, name: str, key: str = "") -> float | None:
        """Seconds a step, of all timed steps of all runs."""
        key = key or {"wall": "seconds", "cpu": "cpu_seconds"}[self.options.by]
        values = [one for said in self.said[cell][name] for one in said[key]]
        return statistics.median(values) if values else None

    def peak(self, cell: tuple, name: str) -> int | None:
        return max((said["peak"] for said in self.said[cell][name]), default=None)

    def row(self, cell: tuple, name: str) -> dict:
        """The table's line. Megabytes are millions of bytes."""
        row = {"tokens": cell[0], "ttt_steps": cell[1], "draft_vocab": cell[2], "contestant": TITLES[name]}
        seconds, runs = self.median(cell, name), self.said[cell][name]
        if not seconds:
            return row | {"problem": self.problems[cell].get(name, "not run")}
        other, limit = self.median(cell, "speculators"), "bound-head" if name == "ours-head" else "bound"
        row |= {"tokens_per_s": cell[0] / seconds, "seconds": self.median(cell, name, "seconds"),
                "cpu_seconds": self.median(cell, name, "cpu_seconds"),
                "seconds_range": [f(s for one in runs for s in one["seconds"]) for f in (min, max)],
                "peak_mb": self.peak(cell, name) / 1e6,
                "above_mb": max(one["peak"] - one["standing"] for one in runs) / 1e6,
                "over_speculators": other / seconds if other else None,
                "steps": sum(len(one["seconds"]) for one in runs), "runs": len(runs), "loss": runs[0]["loss"]}
        if name.startswith("ours") and self.median(cell, limit):
            row["of_bound"] = self.median(cell, limit) / seconds
        if runs[0]["gflop"]:
            row["gflops"] = runs[0]["gflop"] / seconds
        return row


def targets(contest: Contest) -> list[dict]:
    """Every target with what was found: {"target", "found", "met"}; met is None where a side did not run."""
    found = []
    for cell in contest.options.cells:
        T, K, D = cell
        rows, at = {name: contest.row(cell, name) for name in TITLES}, f"at T {T}, K {K}, |D| {D:,}"

        def add(target: str, sides: tuple, value: float | None, met, text: str = "{:.2f} times", at=at, rows=rows):
            missing = "; ".join(f"{TITLES[name]}: {rows[name]['problem']}" for name in sides if "problem" in rows[name])
            found.append({"target": f"{target} {at}", "found": missing or text.format(value),
                          "met": None if missing else bool(met(value))})

        add(f"{FASTER.get(K, 1):g} times speculators' tokens/s", ("ours", "speculators"),
            rows["ours"].get("over_speculators"), lambda x, K=K: x >= FASTER.get(K, 1))
        if (T, K) == MEMORY_CELL:
            peaks = contest.peak(cell, "ours"), contest.peak(cell, "speculators")
            add(f"at most {MEMORY:g} of speculators' peak memory", ("ours", "speculators"),
                peaks[0] / peaks[1] if all(peaks) else None, lambda x: x <= MEMORY, "{:.2f} of it")
        for name, limit in (("ours", "bound"), ("ours-head", "bound-head")):
            share = rows[name].get("of_bound")
            add(f"{100 * BOUND:.0f} % of the bound ({TITLES[name]})", (name, limit), share and 100 * share,
                lambda x: x >= 100 * BOUND, "{:.0f} %")
        losses = rows["ours"].get("loss"), rows["plain"].get("loss")
        add(f"ours and plain have the same loss to {SAME:g}", ("ours", "plain"),
            abs(losses[0] / losses[1] - 1) if None not in losses else None, lambda x: x <= SAME, "{:.1e}")
    return found


def show(result: dict) -> None:
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"\n{'T':>5}{'K':>3}{'|D|':>7}  {'contestant':<20}{'tok/s':>8}{'s/step':>8}{'CPU s':>8}{'peak MB':>9}"
          f"{'above':>7}{'x spec.':>8}{'bound %':>10}{'steps':>6}")
    for row in result["rows"]:
        head = f"{row['tokens']:>5}{row['ttt_steps']:>3}{row['draft_vocab']:>7}  {row['contestant']:<20}"
        if "problem" in row:
            print(f"{head}{row['problem']}")
            continue
        over, share = row["over_speculators"], row.get("of_bound")
        shares = f"{100 * share:.0f}" if share else f"{row['gflops']:.0f} GF/s" if "gflops" in row else ""
        print(f"{head}{row['tokens_per_s']:>8,.0f}{row['seconds']:>8.2f}{row['cpu_seconds']:>8.2f}{row['peak_mb']:>9,.0f}"
              f"{row['above_mb']:>7,.0f}{f'{over:.2f}' if over else '':>8}{shares:>10}{row['steps']:>6}")
    print()
    for one in result["targets"]:
        print(f"{ {True: 'met', False: 'MISSED', None: 'not run'}[one['met']]:<8}{one['target']}: {one['found']}")


def machine(threads: int) -> dict:
    return {"system": f"{platform.system()} {platform.machine()}", "cores": len(os.sched_getaffinity(0)),
            "threads": threads, "load before": round(os.getloadavg()[0], 1),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="T 512, |D| 8192 only, one repeat of a second each")
    parser.add_argument("--cells", default="", help="T x K x |D|, comma-separated, as 512x3x8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20, help="no run starts that would not end by then")
    parser.add_argument("--seconds", type=float, default=3, help="steps are timed so long in each run")
    parser.add_argument("--slow", type=float, default=10, help="a longer step is the contestant's only one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall", help="rates and ratios by this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--no-gate", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.seconds = 1, 1
    named = [tuple(int(size) for size in cell.split("x")) for cell in options.cells.split(",") if cell]
    options.cells = tuple(named) or (QUICK if options.quick else CELLS)
    contest, about = Contest(options), machine(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for cell in options.cells:
                for name in list(TITLES)[::-1 if repeat % 2 else 1]:
                    contest.run(cell, name, Path(folder))
    result = {"machine": about, "rows": [contest.row(cell, name) for cell in options.cells for name in TITLES],
              "targets": targets(contest), "minutes": (time.monotonic() - contest.started) / 60}
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return int(not options.no_gate and any(one["met"] is not True for one in result["targets"]))


if __name__ == "__main__":
    sys.exit(main())
