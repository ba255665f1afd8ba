"""A project of its own for tests that run notebooks as JupyterLab does: copies, a tiny target, little data."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import tiny

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "run": "t", "data_root": "data", "target": "target", "max_seq_len": 128, "exclude": [], "benchmarks": [],
    "lengths": [64, 128], "draft_vocab_size": 64, "shard_tokens": 1024, "batch_tokens": 256, "policy_tokens": 64,
    "epochs": 1, "pack_tokens": 128, "prompts": ["heldout.jsonl"], "max_new_tokens": 12, "steps_max": 3, "steps": 2,
    "bootstrap": 50, "decode_prompts": 2, "cost_seconds": 0.05, "batches": [1]}


def make(root: Path, target: Path) -> Path:
    """notebooks/ with SMALL in place of their defaults, params/, data/, target/ and held-out prompts."""
    (root / "params").mkdir(parents=True)
    shutil.copytree(target, root / "target")
    rng = np.random.default_rng(1)
    for name in ("A2_chat", "B1_tools"):
        (root / "data" / name).mkdir(parents=True)
        rows = "".join(json.dumps(tiny.random_row(rng, 2)) + "\n" for _ in range(24))
        (root / "data" / name / "part-000.jsonl").write_text(rows)
    asked = [{"id": f"p{i}", "source": "A2_chat", "messages": [{"role": "user", "content": "ask " + "x" * i}]}
             for i in range(4)]
    (root / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (root / "notebooks").mkdir()
    for path in sorted((ROOT / "notebooks").glob("[0-9]_*.ipynb")):
        book = json.loads(path.read_text())
        cell = next(c for c in book["cells"] if "parameters" in c["metadata"].get("tags", []))
        cell["source"] = smaller("".join(cell["source"]))
        (root / "notebooks" / path.name).write_text(json.dumps(book))
    return root


def smaller(source: str) -> str:
    """The parameters cell with the values of SMALL."""
    for name, value in SMALL.items():
        line = re.compile(rf"^({name}: .*?) = .*?  #", re.MULTILINE)
        source = line.sub(lambda found, value=value: f"{found[1]} = {value!r}  #", source)
    return source
