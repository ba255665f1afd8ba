"""The merge against a line copy, a plain script and Hugging Face `datasets`: one corpus, one run, one table.

    make benchmark-merge [OPTIONS="--records 2000 --big 0"]
    python tests/benchmarks/merge.py [--records 37312] [--folder DIR] [--repeats 3] [--slow-repeats 1] [--big 2]
                                     [--cores 2] [--seed 0] [--json FILE] [--no-gate]

About 5 minutes and 6 GB of disk at the default size. The corpus (tests/benchmarks/corpus.py) is made anew in `--folder`
(default .cache/benchmark-merge) and lies in the page cache for all; everything written is removed at the end. Each
contestant (tests/benchmarks/contestants.py) is a process of its own, on the same cores, and is timed from its start to
its exit: interpreter, imports and fsync included. The order is reversed from one repeat to the next, the median counts.

  wall s     median (and range) over the runs; import s is the part that importing took, CPU s is of all its processes
  MB/s       million bytes of input JSONL a second; for `verify`, which reads the merged file, of that
  peak MB    of the process and all below it, read every 50 ms: PSS where /proc tells it, else RSS; "mapped" is what
             of it are pages of mapped files, which the kernel can take back
The exit code is 1 where a bound is missed, and the bound is named; `--no-gate` only prints. With `--big GB` the merge
runs once more, on a corpus of that size, to show that its memory does not grow. `--json FILE` writes the same figures.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from corpus import MARKERS, MAX_SEQ_LEN, RECORDS, VOCAB, Made, fingerprint, make_corpus
from watch import MEASURE, Watched, watch

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / ".cache" / "benchmark-merge"
TITLES = {"copy": "line copy, fsync", "plain": "plain script", "datasets": "HF datasets", "ours": "ours: merge",
          "verify": "ours: verify", "audit": "ours: audit's scan"}
SLOW = ("plain", "datasets")
WRITERS = ("plain", "datasets", "ours")  # these must keep the same rows
BOUNDS = (("ours", "plain", 8), ("ours", "datasets", 4), ("ours", "copy", 1 / 3), ("audit", "ours", 1 / 3))
MEMORY = 512e6  # bytes, of our merge
BYTES_A_RECORD, DISK = 28_600, 7  # the run needs this many times the corpus: `datasets` caches it as int64, twice


class Contest:
    """The runs of every contestant over one corpus, in `folder`."""

    def __init__(self, folder: Path, made: Made, seed: int):
        self.folder, self.made = folder, made
        self.runs: dict[str, list[Watched]] = {name: [] for name in TITLES}
        self.said: dict[str, dict] = {name: {} for name in TITLES}  # what a contestant's last run told of itself
        self.problems: dict[str, str] = {}
        self.read: dict[str, int] = dict.fromkeys(TITLES, made.bytes)
        self.kept: dict[str, tuple] = {}  # fingerprint of the rows written
        if not importlib.util.find_spec("datasets"):
            self.problems["datasets"] = "not installed"
        files = sorted(str(path) for path in (folder / "corpus").rglob("*.jsonl"))
        self.task = {"root": str(folder / "corpus"), "files": files, "ours": str(folder / "ours"), "seed": seed,
                     "max_seq_len": MAX_SEQ_LEN, "vocab_size": VOCAB, "opens": MARKERS.opens,
                     "end_of_turn": MARKERS.end_of_turn}

    def run(self, name: str) -> None:
        """One fresh process. What it wrote is looked at after its first run, and removed unless it is ours."""
        if name in self.problems:
            return
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        task, said, log = (self.folder / f"{name}.{part}" for part in ("task", "said", "log"))
        task.write_text(json.dumps(self.task | {"out": str(out), "said": str(said)}))
        os.sync()  # what others have written is not this one's to wait for
        print(f"{TITLES[name]} …", file=sys.stderr, flush=True)
        done = watch([sys.executable, str(HERE / "contestants.py"), name, str(task)], log, environment(self.folder))
        if done.code:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
            print("\n".join(lines[-20:]), file=sys.stderr)
            self.problems[name] = f"failed with code {done.code}: {lines[-1]}"
            return
        self.runs[name].append(done)
        self.said[name] = json.loads(said.read_text())
        if name in WRITERS and name not in self.kept:
            self.kept[name] = fingerprint(out / "merged.jsonl")
        if name == "ours":
            self.read["verify"] = (out / "merged.jsonl").stat().st_size
        else:
            shutil.rmtree(out)

    def rate(self, name: str) -> float | None:
        """Bytes a second at the median of the wall times."""
        seconds = [run.seconds for run in self.runs[name]]
        return self.read[name] / statistics.median(seconds) if seconds and name not in self.problems else None

    def row(self, name: str) -> dict:
        """The table's line. Megabytes are millions of bytes."""
        if name in self.problems or not self.runs[name]:
            return {"contestant": TITLES[name], "problem": self.problems.get(name, "not run")}
        runs, plain = self.runs[name], self.rate("plain")
        seconds = [run.seconds for run in runs]
        peak = max(runs, key=lambda run: run.memory)
        return {"contestant": TITLES[name], "wall_s": statistics.median(seconds),
                "wall_s_range": [min(seconds), max(seconds)], "runs": len(runs),
                "import_s": self.said[name]["import_seconds"],
                "cpu_s": statistics.median(run.cpu_seconds for run in runs), "mb_s": self.rate(name) / 1e6,
                "over_plain": self.rate(name) / plain if plain else None, "peak_mb": peak.memory / 1e6,
                "mapped_mb": peak.mapped / 1e6, "rows": self.said[name].get("rows")}


def environment(folder: Path) -> dict:
    """The caller's, with the caches of `datasets` in `folder`, no network, and bytecode kept as for any user."""
    cache = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | cache


def bounds(contest: Contest, big: dict | None) -> list[dict]:
    """Every bound with what was found: {"bound", "found", "met"}."""
    found = []
    for name, other, times in BOUNDS:
        a, b = contest.rate(name), contest.rate(other)
        missing = [f"{TITLES[n]} {contest.problems.get(n, 'not run').split(':')[0]}" for n in (name, other)
                   if not contest.rate(n)]
        found.append({"bound": f"{TITLES[name]} at least {times:.3g} times as fast as {TITLES[other]}",
                      "found": "; ".join(missing) if missing else f"{a / b:.2f} times",
                      "met": not missing and a / b >= times})
    peaks = [(contest.made.bytes, max((run.memory for run in contest.runs["ours"]), default=None))]
    peaks += [(big["bytes"], big["peak"])] if big else []
    for size, peak in peaks:
        found.append({"bound": f"merge of {size / 1e6:,.0f} MB in less than {MEMORY / 1e6:.0f} MB",
                      "found": f"{peak / 1e6:.0f} MB" if peak else "it failed", "met": bool(peak and peak < MEMORY)})
    found.append(same_rows(contest))
    return found


def same_rows(contest: Contest) -> dict:
    """All who write keep the same rows, as many as the generator promised; audit and verify count as many."""
    made, kept = contest.made, contest.kept
    promised = f"the same {made.records:,} rows of {made.tokens:,} tokens"
    wrong = [TITLES[name] for name in kept if kept[name][:2] != (made.records, made.tokens)]
    wrong += [TITLES[name] for name in ("verify", "audit")
              if contest.runs[name] and contest.said[name]["rows"] != made.records]
    names = ", ".join(TITLES[name] for name in kept)
    if wrong or len(set(kept.values())) != 1:
        return {"bound": promised, "found": f"not from {', '.join(wrong) or f'all of {names}'}", "met": False}
    return {"bound": promised, "found": f"kept by {names}", "met": True}


def merge_big(folder: Path, gigabytes: float, seed: int) -> dict:
    """Our merge, once, on a corpus of about so many GB: {"bytes", "records", "seconds", "peak" (None if it failed)}."""
    made = make_corpus(folder / "corpus", round(gigabytes * 1e9 / BYTES_A_RECORD), seed)
    contest = Contest(folder, made, seed)
    contest.run("ours")
    done = contest.runs["ours"][0] if contest.runs["ours"] else None
    return {"bytes": made.bytes, "records": made.records, "seconds": done.seconds if done else None,
            "peak": done.memory if done else None, "mapped": done.mapped if done else None,
            "problem": contest.problems.get("ours", "")}


def machine(cores: int) -> dict:
    versions = {package.name: package.version for package in importlib.metadata.distributions()
                if package.name in ("numpy", "orjson", "datasets", "pyarrow")}
    return {"system": f"{platform.system()} {platform.machine()}", "cores": cores, "python": platform.python_version(),
            **dict(sorted(versions.items()))}


def show(result: dict) -> None:
    made = result["corpus"]
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"{made['bytes'] / 1e6:,.0f} MB of JSONL: {made['records'] + made['skipped']:,} rows, {made['cut']:,} longer "
          f"than {MAX_SEQ_LEN}, {made['maskless']:,} without a mask; memory is {MEASURE}; wall time includes imports\n")
    print(f"{'contestant':<20}{'wall s':>8} {'(range)':<16}{'import s':>8}{'CPU s':>8}{'MB/s':>8}{'x plain':>9}"
          f"{'peak MB':>9}{'mapped':>8}{'runs':>6}")
    for row in result["contestants"]:
        if "problem" in row:
            print(f"{row['contestant']:<20}{row['problem']}")
            continue
        spread = "({:.2f}-{:.2f})".format(*row["wall_s_range"])
        ratio = f"{row['over_plain']:.2f}" if row["over_plain"] else "-"
        print(f"{row['contestant']:<20}{row['wall_s']:>8.2f} {spread:<16}{row['import_s']:>8.2f}{row['cpu_s']:>8.2f}"
              f"{row['mb_s']:>8.1f}{ratio:>9}{row['peak_mb']:>9.0f}{row['mapped_mb']:>8.0f}{row['runs']:>6}")
    print("\n" + "\n".join(result["accounting"]))
    if big := result["big"]:
        said = big["problem"] or f"{big['seconds']:.1f} s, peak {big['peak'] / 1e6:.0f} MB"
        print(f"\nmerge of {big['bytes'] / 1e6:,.0f} MB, {big['records']:,} records: {said}")
    print()
    for bound in result["bounds"]:
        print(f"{'met   ' if bound['met'] else 'MISSED'}  {bound['bound']}: {bound['found']}")


def contend(options, folder: Path) -> dict:
    """The whole benchmark in a folder that the caller removes."""
    made = make_corpus(folder / "corpus", options.records, options.seed)
    contest = Contest(folder, made, options.seed)
    for repeat in range(max(options.repeats, options.slow_repeats)):
        names = [name for name in TITLES if repeat < (options.slow_repeats if name in SLOW else options.repeats)]
        for name in reversed(names) if repeat % 2 else names:
            contest.run(name)
    shutil.rmtree(folder / "corpus")
    shutil.rmtree(folder / "ours", ignore_errors=True)
    big = None
    if options.big:
        (folder / "big").mkdir()
        big = merge_big(folder / "big", options.big, options.seed + 1)
    return {"machine": machine(options.cores), "memory": MEASURE, "seed": options.seed, "corpus": asdict(made),
            "contestants": [contest.row(name) for name in TITLES], "accounting": contest.said["ours"].get("lines", []),
            "big": big, "bounds": bounds(contest, big)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow-repeats", type=int, default=1, help="of the plain script and of datasets")
    parser.add_argument("--big", type=float, default=2.0, help="GB of JSONL to show the memory on; 0 for none")
    parser.add_argument("--cores", type=int, default=2, help="cores that every contestant may use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--no-gate", action="store_true", help="exit with 0 whatever is found")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    need = DISK * max(options.records * BYTES_A_RECORD, options.big * 1e9 / 2)
    if shutil.disk_usage(options.folder).free < need:
        sys.exit(f"{options.folder} has less than {need / 1e9:.1f} GB free; choose another --folder or fewer --records")
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))[:options.cores]
        os.sched_setaffinity(0, allowed)
        options.cores = len(allowed)
    with tempfile.TemporaryDirectory(prefix="merge-", dir=options.folder) as folder:
        result = contend(options, Path(folder))
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    missed = [bound["bound"] for bound in result["bounds"] if not bound["met"]]
    if missed and not options.no_gate:
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
