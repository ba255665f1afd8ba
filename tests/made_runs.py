"""Runs under outputs/ as the runner leaves them, made without running anything: twins, notebooks, counts, curves."""

import json
from pathlib import Path

import numpy as np
import xxhash

SOURCES = ("A2_chat", "B1_code")
STEMS = {"audit": "1_audit", "merge": "2_merge", "extraction": "3_extraction", "training": "4_training",
         "evaluation": "5_evaluation"}
REPOSITORY = Path(__file__).parent.parent


def project(root: Path) -> Path:
    """A project's folder with the repository's own notebooks and profiles."""
    for name in ("notebooks", "params"):
        (root / name).symlink_to(REPOSITORY / name)
    (root / "outputs").mkdir()
    return root


def parameters(stage: str, name: str) -> dict:
    from eagle3nb.record.params import load

    return load("demo", (stage,), [], name)[stage].full


def prompt_counts(rng, prompts: int = 12, steps_max: int = 4, beyond: int = 0) -> list[dict]:
    """Rows as of offline.counts; every prompt's chains grow with the steps. `beyond`: added to what is accepted."""
    rows = []
    for i in range(prompts):
        for steps in range(1, steps_max + 1):
            verifies = int(rng.integers(5, 20))
            accepted = min(int(rng.integers(0, verifies * steps)) + beyond, verifies * steps)
            rows.append({"id": f"p{i}", "text": f"text {i}", "source": SOURCES[i % 2], "looping": False, "steps": steps,
                         "tokens": 20 + i, "verifies": verifies, "accepted": accepted, "delivered": accepted})
    return rows


def acceptance(counts: list[dict]) -> list[dict]:
    """The evaluation's rows, in a plain loop; the intervals are no more than a place to be found again."""
    rows = []
    for steps in sorted({row["steps"] for row in counts}):
        for source in ("all", *SOURCES):
            part = [r for r in counts if r["steps"] == steps and source in ("all", r["source"])]
            verifies, accepted = (sum(r[key] for r in part) for key in ("verifies", "accepted"))
            tau = 1 + accepted / verifies
            rows.append({"steps": steps, "source": source, "tau": tau, "low": tau - 0.125, "high": tau + 0.25,
                         "delivered_per_verify": tau, "prompts": len(part), "verifies": verifies, "accepted": accepted})
    return rows


def metrics(rng, steps: int = 30) -> str:
    lines = [{"kind": "train", "step": i, "tokens": 100 * i, "loss_k": (5 - i / 10 + rng.random(3) / 10).tolist()}
             for i in range(1, steps + 1)]
    lines += [{"kind": "validation", "step": i, "tokens": 100 * i, "epoch": 0, "loss_k": [5 - i / 10] * 3,
               "accuracy": [0.3, 0.2, 0.1], "acceptance": 1.2 + i / 100} for i in range(0, steps + 1, 10)]
    return "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["step"]))


def make(root: Path, name: str = "demo", *, stages=tuple(STEMS), seed: int = 0, day: int = 1, counts=None,
         card: str = "# A drafter's card\n", **changed) -> Path:
    """outputs/<name> with an ok twin, notebook and page of each stage. `changed`: parameters of the stages that have
    them. Its acceptance.json, metrics.jsonl and card lie in work/, with their hashes in the twins."""
    rng, folder = np.random.default_rng(seed), root / "outputs" / name
    (folder / "work/.runner").mkdir(parents=True)
    counts = prompt_counts(rng) if counts is None else counts
    for number, stage in enumerate(stages):
        given = parameters(stage, name)
        given |= {key: value for key, value in changed.items() if key in given}
        twin = {"stage": stage, "status": "ok", "parameters": given, "inputs": [], "outputs": [],
                "provenance": {"commit": f"{day:02d}" * 20, "dirty": False, "versions": {"torch": "2.0"}, "cores": 2,
                               "system": "Linux", "ram_bytes": 10**9, "gpus": [],
                               "command": f"eagle3nb run params/demo --run {name}",
                               "started": f"2026-11-{day:02d}T01:{number:02d}:00+00:00"},
                "result": {"verdict": f"{stage} went well"},
                "cost": {"total_s": 10.0 + number, "wall_s": 9.0, "peak_rss_bytes": 10**8}}
        twin["result"] |= result(stage, counts)
        for ending, text in work(stage, counts, rng, card).items():
            path = folder / "work" / ending
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            twin["outputs"].append(entry(f"outputs/{name}/work/{ending}", text))
        if stage == "evaluation":
            twin["inputs"] = [{"path": "data/heldout.jsonl", "bytes": 3, "xxh3": "0" * 32}]
        save(folder, stage, twin)
    return folder


def entry(path: str, text: str) -> dict:
    return {"path": path, "bytes": len(text.encode()), "xxh3": xxhash.xxh3_128_hexdigest(text.encode())}


def result(stage: str, counts: list[dict]) -> dict:
    sources = [{"name": source, "records": 3, "tokens": 600, "supervised": 400} for source in SOURCES]
    fingerprint = {"target config": "c" * 32, "target weights": "w" * 32, "tokenizer": "t" * 32}
    return {"audit": {"findings": 2, "forecast": {"records": 6, "tokens": 1200}, "disk": {"needed": 5_000_000}},
            "merge": {"merge": {"records": 6, "tokens": 1200, "supervised": 800, "truncated_records": 1,
                                "exclude": ["A1"], "sources": sources}},
            "extraction": {"store": {"tokens": 1200, "bytes": 5_000_000, "tokens_per_s": 812.5, "dtype": "bf16"},
                           "fingerprint": fingerprint},
            "training": {"best": {"acceptance": 1.75, "accuracy": [0.4375, 0.25]}, "tokens_per_s": 1234.0,
                         "coverage": 0.9712, "last": {"tokens": 3000, "step": 30}, "parameters_trained": 7_448_832},
            "evaluation": {"acceptance": acceptance(counts), "decode": {"equal": 8, "prompts": 8}}}[stage]


def work(stage: str, counts: list[dict], rng, card: str) -> dict[str, str]:
    return {"training": {"drafter/metrics.jsonl": metrics(rng), "drafter/model.safetensors": "weights"},
            "evaluation": {"evaluation/acceptance.json": json.dumps({"prompts": counts}),
                           "export/README.md": card}}.get(stage, {})


def save(folder: Path, stage: str, twin: dict, cells=()) -> None:
    """The twin, and a notebook and page that were made of it; `cells` are further ones of the notebook."""
    source = next(c for c in json.loads((REPOSITORY / f"notebooks/{STEMS[stage]}.ipynb").read_text())["cells"]
                  if "parameters" in c["metadata"].get("tags", []))
    given = "".join(f"{key} = {value!r}\n" for key, value in twin["parameters"].items())
    injected = {"cell_type": "code", "metadata": {"tags": ["injected-parameters"]}, "source": given, "outputs": []}
    book = {"cells": [source | {"outputs": []}, injected, *cells], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / f"{STEMS[stage]}.json").write_text(json.dumps(twin))
    (folder / f"{STEMS[stage]}.ipynb").write_text(json.dumps(book))
    page = f'<!DOCTYPE html><html lang="en"><title>{stage}</title><a href="index.html">all stages</a>' \
           f'<a href="{STEMS[stage]}.ipynb">notebook</a><h1>{stage}</h1></html>'
    (folder / f"{STEMS[stage]}.html").write_text(page)


def change(folder: Path, stage: str, **parts) -> dict:
    """The twin of a stage with parts of it replaced, written again and returned."""
    path = folder / f"{STEMS[stage]}.json"
    twin = json.loads(path.read_text()) | parts
    path.write_text(json.dumps(twin))
    return twin
