"""What the choices that decide a drafter cost or gain: one training a row and seed, walked over the same prompts.

    make demo                                              # or: eagle3nb run demo --stages audit,merge,extraction
    python tests/benchmarks/ablation.py [--row NAME] [--seeds 1,2,3] [--epochs 4] [--minutes 0] [--quick]
                                        [--work outputs/demo/work] [--prompts 0] [--json FILE] [--list]

Every row is the demo's training with one choice changed: draft vocabulary, steps of the training-time test, where
training starts, EAGLE-3.1's two norms, what the loss is averaged over. `--row` makes one row alone, `--list` names
them, `--work outputs/smollm2/work` takes another run's states. About 3 minutes a run on 2 quiet cores, so 3 hours for
all 18 rows by 3 seeds (an estimate: the demo trains at 1,560 tokens/s). `--minutes` bounds the time: what is under way
then is stopped at a checkpoint, and the next call goes on there. Finished runs stand in the JSON
(outputs/ablation.json) and are made again only if their settings, the states or the prompts change. `--quick`: six
rows, one seed, one epoch, two prompts a source: does it run?

Printed, a row: acceptance length of the walk over the target's greedy answers to the held-out prompts, with 3 drafted
tokens whatever the row trained with, states computed in float32; its difference from the first row's on the same
prompts; minutes a run. The 95 % intervals are over prompts and seeds together, and a difference whose interval holds 0
is called noise. On the demo's 65,000 generated tokens most are. `best at`: the step whose drafter was kept; 0 says that
training did not improve on its start.
"""

import argparse
import json
import shutil
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import yaml

from eagle3nb.acceptance import benchmarks, offline
from eagle3nb.acceptance.prompts import load
from eagle3nb.corpus import vocabulary
from eagle3nb.corpus.masks import find_markers
from eagle3nb.corpus.merged import Corpus
from eagle3nb.drafter.launch import launch
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.settings import Settings
from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, resolve, shown, write_json
from eagle3nb.record.tables import table_text
from eagle3nb.states import open_target
from eagle3nb.states.store import Store
from eagle3nb.states.target import digest, embedding, load_tokenizer, target_dir

BASE = "demo"
ROWS = {  # name → the parameters of stage 4 in which it differs from the demo's
    BASE: {},
    **{f"vocabulary-{n}": {"draft_vocab_size": n} for n in (1024, 2048, 8192, 16384)},
    **{f"steps-{n}": {"ttt_steps": n} for n in (1, 2, 5, 7)},
    **{f"start-{how}": {"initialise": how} for how in ("target", "head", "random")},
    "norm-output": {"norm_output": True}, "fc-norm": {"fc_norm": True},
    "eagle-3.1": {"norm_output": True, "fc_norm": True},
    "loss-document": {"loss_average": "document"}, "head-frozen": {"freeze_head": True},
    "rate-1e-3": {"learning_rate": 1e-3},
}
QUICK = (BASE, "vocabulary-1024", "steps-1", "start-random", "eagle-3.1", "loss-document")
STEPS, BEYOND = 3, 8  # drafted tokens of every walk; answers as the evaluation takes them, so that its cache serves
ANSWER = 64           # tokens of an answer, as in the demo
MEANS = ("coverage", "validation", "wall_s", "best_step", "steps")  # of a row's runs, in its table


# ------------------------------------------------------------------------------------------ what stands, what is made


def carry_out(jobs: list[tuple[str, int]], expected, path: Path, make, deadline: float) -> tuple[dict, bool]:
    """(runs by "row/seed", all done?). make(row, seed) → a run's figures, or TimeoutError; kept at once in `path`.

    expected(row, seed) is what a run depends on: one that stands with another value is made again. Seconds of a run
    that was stopped are kept too and added to its figures.
    """
    kept = read_json(path) if path.is_file() else {"runs": {}, "spent": {}}
    for row, seed in jobs:
        key, of = f"{row}/{seed}", expected(row, seed)
        if kept["runs"].get(key, {}).get("of") == of:
            continue
        if time.monotonic() >= deadline:
            return kept["runs"], False
        spent = kept["spent"].pop(key, {"of": of, "seconds": 0.0})
        before, began = spent["seconds"] if spent["of"] == of else 0.0, time.monotonic()
        try:
            figures = make(row, seed)
        except TimeoutError:
            kept["spent"][key] = {"of": of, "seconds": before + time.monotonic() - began}
            write_json(path, kept)
            return kept["runs"], False
        kept["runs"][key] = {"of": of, **figures, "wall_s": round(before + time.monotonic() - began, 1)}
        write_json(path, kept)
    return kept["runs"], True


class Trainings:
    """The demo's store, corpus and prompts, and a training on them for each row and seed."""

    def __init__(self, o):
        self.o, self.work, self.folder = o, resolve(o.work), resolve(o.json).with_suffix("")
        if not (self.work / "states" / "manifest.json").is_file():
            raise UserError(f"{shown(self.work)} holds no states; run: eagle3nb run demo --stages "
                            "audit,merge,extraction")
        self.target, self.corpus = target_dir("embedded"), Corpus.open(self.work / "corpus")
        self.store = Store.open(self.work / "states")
        self.parameters = {}
        for file in ("common", "training"):
            self.parameters |= yaml.safe_load((project_root() / "params" / "demo" / f"{file}.yml").read_text())
        self.parameters |= {"epochs": o.epochs, "minutes": 0.0}
        self.first = self.corpus.report["validation"]["first_row"]
        self.counts = vocabulary.supervised_counts(self.corpus, range(self.first))
        tokenizer = load_tokenizer(self.target)
        self.forced = find_markers(tokenizer).special_ids
        self.prompts = benchmarks.render(load(["data/heldout.jsonl"], o.prompts), tokenizer)
        self.deadline, self.answers = None, None

    def settings(self, row: str, seed: int) -> tuple[Settings, np.ndarray]:
        """(settings, target ids of D) of a run."""
        parameters = self.parameters | ROWS[row] | {"seed": seed}
        ids = vocabulary.choose(self.counts, parameters["draft_vocab_size"], self.forced).ids
        drafter = self.folder / f"{row}-{seed}"
        return Settings.of(parameters, self.first if self.first < len(self.corpus) else 0, states=self.work / "states",
                           drafter=drafter, target=self.target, corpus=self.corpus.folder), ids

    def expected(self, row: str, seed: int) -> str:
        """Hash of all that decides a run's figures but the code. A setting at its default is left out, so that runs
        stand when the code gains one."""
        settings, ids = self.settings(row, seed)
        free = ("states", "drafter", "target", "corpus")
        decides = {f.name: str(value) for f in fields(settings)
                   if (value := getattr(settings, f.name)) != f.default and f.name not in free}
        asked = [[prompt.id, prompt.ids] for prompt in self.prompts]
        return digest([decides, ids.tolist(), self.store.fingerprint, asked, STEPS, BEYOND, ANSWER])

    def make(self, row: str, seed: int) -> dict:
        """Train and walk. The drafter's folder goes once its figures are known."""
        settings, ids = self.settings(row, seed)

        def look(lines):
            if time.monotonic() > self.deadline:
                raise TimeoutError                  # launch lets the training save a checkpoint and end

        print(f"{row}, seed {seed}", flush=True)
        lines = launch(settings, ids, look)
        drafter = DraftModel.load(settings.drafter, embedding(self.target)).float().eval().requires_grad_(False)
        table = self.walk(drafter)
        shutil.rmtree(settings.drafter)
        best, end = lines[-1]["best"], lines[-1]
        covered = vocabulary.coverage(self.counts, vocabulary.Vocabulary(ids, self.corpus.vocab_size))
        return {"prompts": table["id"].tolist(), "accepted": table["accepted"].tolist(),
                "verifies": table["verifies"].tolist(), "coverage": covered, "parameters": lines[0]["parameters"],
                "validation": best["acceptance"], "best_step": best["step"], "steps": end["step"],
                "tokens": end["tokens"], "training_s": end["seconds"]}

    def walk(self, drafter):
        """Counts a prompt. The answers and their states, in float32, are the same for all drafters: captured once."""
        if self.answers is None:
            model = open_target("transformers", self.target)
            taken = benchmarks.answers(model, self.prompts, max_new_tokens=ANSWER, beyond=BEYOND,
                                       cache_dir=benchmarks.CACHE)
            self.answers = [([taken[i] for i in group], aux)
                            for group, aux, _last in offline.captured(model, taken, STEPS, 4096)]
        found = []
        for answers, aux in self.answers:
            for answer, drafted in zip(answers, offline.drafts(drafter, answers, aux, STEPS), strict=True):
                found.append(offline.Chains(answer, offline.metrics.chain_hits(drafted, answer.sequence)))
        return offline.counts(found, [STEPS]).sort_values(["source", "id"])


# ------------------------------------------------------------------------------------------ figures


def taus(accepted: np.ndarray, verifies: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Acceptance length of every seed on every resample of prompts, [resamples, seeds]; accepted, verifies
    [seeds, prompts], drawn int [resamples, prompts]."""
    return 1 + accepted[:, drawn].sum(-1).T / verifies[:, drawn].sum(-1).T


def resampled(per_seed: np.ndarray, rng) -> np.ndarray:
    """The mean over seeds on resampled prompts *and* seeds, float64 [resamples].

    per_seed [resamples, seeds] as of `taus`. Seeds are drawn with replacement; their part of the deviation is
    stretched by √(n / (n − 1)), since n drawn from n vary that much too little, and with two or three it shows. A
    single seed adds nothing: its interval is over prompts alone.
    """
    count, seeds = per_seed.shape
    mean = per_seed.mean(1)
    if seeds == 1:
        return mean
    drawn = rng.integers(seeds, size=(count, seeds))
    return mean + (np.take_along_axis(per_seed, drawn, 1).mean(1) - mean) * np.sqrt(seeds / (seeds - 1))


def figures(runs: dict[str, list[dict]], *, bootstrap: int = 4000, seed: int = 1) -> list[dict]:
    """A row of the table for each name with its runs (one a seed), beside those of BASE where it has any.

    Differences are paired over prompts, which are drawn once for both; seeds are drawn for each apart, since training's
    noise is its own in each run.
    """
    rng, rows, base = np.random.default_rng(seed), [], None
    for name, each in runs.items():
        accepted, verifies = (np.array([run[key] for run in each], float) for key in ("accepted", "verifies"))
        prompts = accepted.shape[1]
        drawn = np.random.default_rng(seed).integers(prompts, size=(bootstrap, prompts))
        ours = resampled(taus(accepted, verifies, drawn), rng)
        tau = float((1 + accepted.sum(1) / verifies.sum(1)).mean())
        low, high = offline.ends(ours)
        row = {"row": name, "seeds": len(each), "acceptance": tau, "low": low, "high": high, "less base": None,
               "from": None, "to": None, "verdict": ""}
        if name == BASE:
            base = (each[0]["prompts"], tau, ours)
        elif base and base[0] == each[0]["prompts"]:
            row["less base"] = tau - base[1]
            row["from"], row["to"] = offline.ends(ours - base[2])
            row["verdict"] = "noise" if row["from"] <= 0 <= row["to"] else "better" if row["from"] > 0 else "worse"
            if min(len(each), len(runs[BASE])) == 1:
                row["verdict"] += ", one seed"
        rows.append(row | {name: float(np.mean([run[name] for run in each])) for name in MEANS})
    return rows


def shown_rows(rows: list[dict]) -> list[dict]:
    """The table as printed."""
    def between(low, high):
        return "" if low is None else f"{low:+.3f} … {high:+.3f}"
    return [{"row": r["row"], "what changes": ", ".join(f"{k} {v}" for k, v in ROWS[r["row"]].items()) or "–",
             "seeds": r["seeds"], "acceptance": f"{r['acceptance']:.3f}", "95 %": f"{r['low']:.3f} … {r['high']:.3f}",
             f"less {BASE}": "" if r["less base"] is None else f"{r['less base']:+.3f}",
             "95 % of it": between(r["from"], r["to"]), "verdict": r["verdict"], "coverage": f"{r['coverage']:.1%}",
             "best at": f"{r['best_step']:.0f} of {r['steps']:.0f}",
             "minutes a run": f"{r['wall_s'] / 60:.1f}"} for r in rows]


def parsed(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", choices=ROWS, metavar="NAME", help="this row alone; --list names them")
    parser.add_argument("--seeds", default="1,2,3", help="of training: its noise, start and order of rows")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=0, help="stop then, at a checkpoint; 0: no bound")
    parser.add_argument("--work", default="outputs/demo/work", help="a run's work folder, with corpus and states")
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts a source; 0: all")
    parser.add_argument("--json", default="", help="where finished runs are kept; default outputs/ablation.json")
    parser.add_argument("--quick", action="store_true",
                        help=f"{', '.join(QUICK)}: one seed, one epoch, two prompts a source")
    parser.add_argument("--list", action="store_true", help="name the rows and what they change")
    o = parser.parse_args(arguments)
    o.rows = [o.row] if o.row else list(ROWS)
    if o.quick:
        o.rows, o.seeds, o.epochs, o.prompts = [o.row] if o.row else list(QUICK), "1", 1, 2
    o.json = o.json or f"outputs/ablation{'-quick' if o.quick else ''}.json"
    o.seeds = [int(seed) for seed in o.seeds.split(",")]
    return o


def main() -> int:
    """0 where every run that was asked for stands, 1 where time was short or something is missing."""
    o = parsed()
    if o.list:
        print(table_text([{"row": name, "changes": ", ".join(f"{k} {v}" for k, v in changes.items()) or "–"}
                          for name, changes in ROWS.items()], "Rows"))
        return 0
    deadline = time.monotonic() + 60 * o.minutes if o.minutes else float("inf")
    try:
        trainings = Trainings(o)
        trainings.deadline = deadline
        jobs = [(row, seed) for seed in o.seeds for row in o.rows]       # every row has one seed before any has two
        runs, done = carry_out(jobs, trainings.expected, resolve(o.json), trainings.make, deadline)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    known = {row: [runs[key] for seed in o.seeds if (key := f"{row}/{seed}") in runs
                   and runs[key]["of"] == trainings.expected(row, seed)] for row in dict.fromkeys([BASE, *o.rows])}
    rows = figures({row: each for row, each in known.items() if each})
    prompts = len(trainings.prompts)
    print(table_text(shown_rows(rows), f"Acceptance length with {STEPS} drafts over {prompts} held-out prompts, "
                     f"{o.epochs} epochs; seeds' noise in the intervals where there are two or more"))
    report = resolve(o.json).with_name(f"{resolve(o.json).stem}-table.json")
    write_json(report, {"epochs": o.epochs, "prompts": prompts, "drafts": STEPS, "rows": rows})
    print(json.dumps({"rows": len(rows), "all": done, "table": shown(report)}))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
