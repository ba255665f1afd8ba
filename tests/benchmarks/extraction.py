"""Extraction against bare forward passes, and the store's writer against the disk: one run, one table.

    make benchmark-extraction [OPTIONS="--rows 60 --segments 2"]
    python tests/benchmarks/extraction.py [--rows 240] [--segments 12] [--shard-tokens 2048] [--batch-tokens 1024]
                                          [--threads N] [--writer-mb 400] [--repeats 5] [--folder DIR] [--json FILE]
                                          [--no-gate]

About 3 minutes on two quiet cores, 4 GB of memory, 2 GB of disk. Two questions:

What does extraction cost beside the forward? The demo corpus is merged, its first rows are cut into segments, and each
segment is run twice, in an order that alternates, so that a busy machine slows both alike:
  floor       Transformers' own AutoModel (no lm_head, no cache), over the very same batches, made beforehand
  extraction  `extract` into a fresh store: forward, captured layers, teacher, checks, encoding, writing, fsync
A segment's figure is the ratio of the two rates; the median of the segments counts. `teacher` (the lm_head at the
positions that need it, which the floor has not) is timed by the extraction itself and left out of the comparison. CPU
time is told beside wall time: it counts the writer's thread whether it runs beside the forward or not, and other
processes hardly change it. Where others keep the cores busy, `--threads 1` and the CPU time tell more than wall time:
two threads of one product then wait for one another, up to ten times longer than they compute.

What does the writer cost beside the disk? A target that costs nothing (states that lie ready, a vocabulary of 64) goes
through the same `extract`; in turn with it, the same files are written plainly: write, fsync, one after the other.

The exit code is 1 where a bound is missed, and the bound is named; `--no-gate` only prints.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers

from eagle3nb.corpus.masks import find_markers, teacher_positions
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.states import extract as extraction
from eagle3nb.states import forward, open_target
from eagle3nb.states.store import Store, shard_ranges
from eagle3nb.states.target import facts_of, load_tokenizer, target_dir

ROOT = Path(__file__).resolve().parents[2]
FORWARD, WRITER = 0.95, 0.5  # the bounds
MEAN, LONGEST = 227, 1024  # tokens of a row: the demo's mean, and where it is cut
DTYPES = ("bf16", "fp8_e4m3")  # of the store, for the writer; the first is held to the bound
BLOCK = 1 << 24


class Rows:
    """What the extraction uses of a corpus: rows that lie ready."""

    def __init__(self, rows, vocab: int):
        self.rows, self.vocab_size, self.tokenizer = rows, vocab, None
        self.lengths = np.array([len(ids) for ids, _ in rows])
        self.index = pd.DataFrame({"tokens": self.lengths,
                                   "teacher_positions": [len(teacher_positions(mask)) for _, mask in rows]})
        self.hash = f"rows of the benchmark: {len(rows)}"

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int):
        return self.rows[i]


class FreeTarget:
    """A target whose states lie ready: `capture` costs a few views."""

    engine, device = "transformers", torch.device("cpu")

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.dir, self.dtype, self.layers = folder, dtype, (2, 15, 27)
        self.facts = dataclasses.replace(facts_of(folder), vocab=64)
        h, generator = self.facts.hidden, torch.Generator().manual_seed(0)
        self.aux = torch.randn(LONGEST, 3 * h, generator=generator).to(dtype)
        self.last = torch.randn(LONGEST, h, generator=generator).to(dtype)

    def capture(self, rows):
        return [(self.aux[: len(ids)], self.last[: len(ids)]) for ids in rows]

    def logits(self, last):
        return torch.zeros(1, 64).expand(len(last), 64)


class Meter:
    """CPU seconds of the pipeline and, in it, of the teacher: of all of this process's threads, the writer's too."""

    def __init__(self):
        self.seconds = {"share": 0.0, "teacher": 0.0}
        for module, name in ((extraction, "share"), (forward, "teacher")):
            setattr(module, name, self.timed(name, getattr(module, name)))

    def timed(self, name: str, function):
        def measured(*arguments):
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.process_time() - began
        return measured

    def read(self) -> dict:
        found, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return found


# ---------------------------------------------------------------------------------------------------- the forward


def demo_rows(folder: Path, target: Path, count: int) -> Rows:
    """The first rows of the demo corpus, merged as `make demo` does."""
    facts, tokenizer = facts_of(target), load_tokenizer(target)
    merge(find_sources(ROOT / "data" / "demo", exclude=["A1"]), folder / "corpus", max_seq_len=LONGEST, seed=1,
          vocab_size=facts.vocab, markers=find_markers(tokenizer), tokenizer=tokenizer)
    corpus = Corpus.open(folder / "corpus")
    return Rows([corpus.row(i) for i in range(min(count, len(corpus)))], facts.vocab)


def padded_batches(rows: Rows, o) -> list[torch.Tensor]:
    """The batches that `extract` makes of these rows, ids [B, T]."""
    made = []
    for first, last in shard_ranges(rows.lengths, o.shard_tokens):
        for batch in forward.batches(rows.lengths[first : last + 1], o.batch_tokens):
            ids = [torch.from_numpy(rows.row(first + i)[0]).long() for i in batch]
            made.append(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
    return made


@torch.inference_mode()
def bare(body, batches) -> dict:
    began, cpu = time.perf_counter(), time.process_time()
    for ids in batches:
        body(input_ids=ids, use_cache=False)
    return {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu}


def extracted(rows: Rows, target, folder: Path, o, meter: Meter) -> dict:
    meter.read()
    found = extraction.extract(rows, target, folder, dtype="bf16", batch_tokens=o.batch_tokens,
                               shard_tokens=o.shard_tokens)
    cpu = meter.read()
    return {"wall": found["seconds"], "cpu": cpu["share"], "teacher": found["teacher_s"], "teacher cpu": cpu["teacher"],
            **{name: found[f"{name}_s"] for name in ("forward", "gather", "wait", "write")}}


def forwards(folder: Path, o, meter: Meter) -> list[dict]:
    """A row a segment: tokens, and of floor and extraction the seconds."""
    model = target_dir("embedded")
    rows, target = demo_rows(folder, model, o.rows), open_target("transformers", model)
    body = transformers.AutoModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    segments = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), o.segments)):
        piece = Rows([rows.row(i) for i in part], rows.vocab_size)
        batches = padded_batches(piece, o)
        runs = {"floor": lambda batches=batches: bare(body, batches),
                "extraction": lambda piece=piece, number=number: extracted(piece, target, folder / f"states-{number}",
                                                                           o, meter)}
        if not number:
            bare(body, batches[:1])  # both warm
            target.capture([piece.row(0)[0]])
        found = {name: runs[name]() for name in (list(runs) if number % 2 else reversed(runs))}
        segments.append({"tokens": int(piece.lengths.sum()), "batches": len(batches), **found})
        print(f"segment {number + 1} of {o.segments}: " + ", ".join(
            f"{name} {found[name]['wall']:.1f} s" for name in runs), file=sys.stderr, flush=True)
    return segments


def ratios(segments: list[dict], clock: str) -> list[float]:
    """The extraction's rate without the teacher's time as a share of the floor's, segment by segment."""
    teacher = {"wall": "teacher", "cpu": "teacher cpu"}[clock]
    return [s["floor"][clock] / (s["extraction"][clock] - s["extraction"][teacher]) for s in segments]


# ---------------------------------------------------------------------------------------------------- the writer


def writer(folder: Path, o) -> list[dict]:
    """A row a store's dtype: bytes, and the seconds of our writer and of plain writes, run by run."""
    rng, made = np.random.default_rng(0), []
    torch.set_num_threads(1)  # what is left to compute is bound by memory, and on a busy machine a second one is late
    for dtype in DTYPES:
        target = FreeTarget(target_dir("embedded"), torch.float32)  # what a CPU's target computes in
        size = {"bf16": 2, "fp8_e4m3": 1}[dtype] * 4 * target.facts.hidden
        count = max(2, round(o.writer_mb * 1e6 / size / MEAN))
        rows = Rows([(rng.integers(0, 64, MEAN).astype(np.int32), np.ones(MEAN, np.uint8))] * count, 64)
        ours, plain, told = [], [], []
        for repeat in range(o.repeats + 1):  # the first warms up
            store = folder / f"writer-{dtype}-{repeat}"
            os.sync()
            found = extraction.extract(rows, target, store, dtype=dtype, batch_tokens=o.batch_tokens,
                                       shard_tokens=4 * o.shard_tokens)
            files = [(store / shard["file"]).read_bytes() for shard in Store.open(store).shards]
            for file in store.iterdir():
                file.unlink()
            os.sync()
            seconds = plainly(files, folder / "plain")
            if repeat:
                ours.append(found["seconds"])
                plain.append(seconds)
                told.append({name: found[f"{name}_s"] for name in ("gather", "teacher", "wait", "write")})
        made.append({"dtype": dtype, "bytes": sum(map(len, files)), "files": len(files), "ours": ours, "plain": plain,
                     "told": told})
    return made


def plainly(files: list[bytes], path: Path) -> float:
    """Seconds that the same bytes take as plain files: write, fsync, one after the other."""
    began = time.perf_counter()
    for number, data in enumerate(files):
        with open(path.with_name(f"{path.name}-{number}"), "wb", buffering=0) as handle:
            for start in range(0, len(data), BLOCK):
                handle.write(memoryview(data)[start : start + BLOCK])
            os.fsync(handle.fileno())
    seconds = time.perf_counter() - began
    for number in range(len(files)):
        path.with_name(f"{path.name}-{number}").unlink()
    return seconds


# ---------------------------------------------------------------------------------------------------- the table


def summary(segments: list[dict], writers: list[dict]) -> dict:
    tokens = sum(s["tokens"] for s in segments)
    rows = []
    for name, wall, cpu in (("floor: bare forwards", lambda s: s["floor"]["wall"], lambda s: s["floor"]["cpu"]),
                            ("extraction", lambda s: s["extraction"]["wall"], lambda s: s["extraction"]["cpu"]),
                            ("  without teacher", lambda s: s["extraction"]["wall"] - s["extraction"]["teacher"],
                             lambda s: s["extraction"]["cpu"] - s["extraction"]["teacher cpu"]),
                            *((f"  {part}", lambda s, part=part: s["extraction"][part], None)
                              for part in ("forward", "teacher", "gather", "wait", "write"))):
        rates = [s["tokens"] / wall(s) if wall(s) else None for s in segments]
        rows.append({"what": name, "seconds": sum(map(wall, segments)),
                     "tokens_per_s": statistics.median(rates) if all(rates) else None,
                     "cpu_us_a_token": 1e6 * sum(map(cpu, segments)) / tokens if cpu else None})
    shares = {clock: ratios(segments, clock) for clock in ("wall", "cpu")}
    disk = [{"dtype": w["dtype"], "bytes": w["bytes"], "files": w["files"],
             **{f"{side}_mb_s": w["bytes"] / 1e6 / statistics.median(w[side]) for side in ("ours", "plain")},
             "share": statistics.median(p / o for p, o in zip(w["plain"], w["ours"], strict=True)),
             "shares": [p / o for p, o in zip(w["plain"], w["ours"], strict=True)]} for w in writers]
    found = statistics.median(shares["wall"])
    bounds = [{"bound": f"extraction without the teacher at {FORWARD:.0%} of the floor's rate or more",
               "found": f"{found:.1%} (CPU time: {statistics.median(shares['cpu']):.1%})", "met": found >= FORWARD},
              {"bound": f"the writer alone, {disk[0]['dtype']}, at {WRITER:.0%} of the disk's rate or more",
               "found": f"{disk[0]['share']:.0%}", "met": disk[0]["share"] >= WRITER}]
    return {"tokens": tokens, "rows": rows, "shares": shares, "disk": disk, "bounds": bounds}


def show(result: dict) -> None:
    found = result["summary"]
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"{found['tokens']:,} tokens of the demo in {len(result['segments'])} segments, "
          f"{sum(s['batches'] for s in result['segments'])} batches\n")
    print(f"{'':<24}{'seconds':>10}{'tokens/s':>10}{'CPU us/token':>14}")
    for row in found["rows"]:
        rate, cpu = (f"{row[key]:,.0f}" if row[key] else "" for key in ("tokens_per_s", "cpu_us_a_token"))
        print(f"{row['what']:<24}{row['seconds']:>10.2f}{rate:>10}{cpu:>14}")
    for clock, shares in found["shares"].items():
        print(f"of the floor, {clock + ' time:':<11}{statistics.median(shares):>7.1%}   "
              f"(segments: {', '.join(f'{share:.1%}' for share in shares)})")
    print(f"\n{'writer alone':<24}{'MB':>10}{'files':>7}{'ours MB/s':>11}{'plain MB/s':>12}{'share':>8}")
    for row in found["disk"]:
        print(f"{row['dtype']:<24}{row['bytes'] / 1e6:>10,.0f}{row['files']:>7}{row['ours_mb_s']:>11,.0f}"
              f"{row['plain_mb_s']:>12,.0f}{row['share']:>8.0%}   "
              f"(runs: {', '.join(f'{share:.0%}' for share in row['shares'])})")
    print()
    for bound in found["bounds"]:
        print(f"{'met   ' if bound['met'] else 'MISSED'}  {bound['bound']}: {bound['found']}")


def machine(o) -> dict:
    load = os.getloadavg()
    return {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(), "threads": o.threads,
            "torch": torch.__version__, "transformers": transformers.__version__,
            "load before": f"{load[0]:.1f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=240, help="of the demo corpus")
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--shard-tokens", type=int, default=2048,
                        help="of the extraction; the writer alone gets four times as many, since there are no segments")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--writer-mb", type=float, default=400, help="of one run of the writer")
    parser.add_argument("--repeats", type=int, default=5, help="of the writer")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "benchmark-extraction")
    parser.add_argument("--json", default="")
    parser.add_argument("--no-gate", action="store_true", help="exit with 0 whatever is found")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    transformers.utils.logging.disable_progress_bar()
    o.folder.mkdir(parents=True, exist_ok=True)
    about = machine(o)
    with tempfile.TemporaryDirectory(prefix="extraction-", dir=o.folder) as folder:
        segments = forwards(Path(folder), o, Meter())
        writers = writer(Path(folder), o)
    result = {"machine": about, "segments": segments, "writers": writers, "summary": summary(segments, writers)}
    show(result)
    if o.json:
        Path(o.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    missed = [bound["bound"] for bound in result["summary"]["bounds"] if not bound["met"]]
    if missed and not o.no_gate:
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
