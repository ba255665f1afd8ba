"""The contestants of the merge benchmark, each run alone: `python contestants.py NAME TASK.json`.

TASK.json: {"root", "files", "out", "ours", "said", "max_seq_len", "seed", "vocab_size", "opens", "end_of_turn"}. They
write into the folder `out`; `verify` reads `ours`. Everything is imported inside, so that each pays for its own imports
and no other's. What a contestant has to say of itself goes to the file `said`: {"import_seconds", "rows"?, …}.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def copy(task: dict) -> dict:
    """The floor: every line as it is, in the order of the files."""
    with open(Path(task["out"], "copied.jsonl"), "wb") as out:
        for path in task["files"]:
            with open(path, "rb") as lines:
                for line in lines:
                    out.write(line)
        _to_disk(out)
    return {}


def plain(task: dict) -> dict:
    """The script that everyone writes first: all rows in memory."""
    rows = []
    for path in task["files"]:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                row = cut(json.loads(line), task)
                if row:
                    rows.append(row)
    random.seed(task["seed"])
    random.shuffle(rows)
    with open(Path(task["out"], "merged.jsonl"), "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
        _to_disk(out)
    return {"rows": len(rows)}


def datasets(task: dict) -> dict:
    """Hugging Face `datasets`, two processes, its cache in `out`; nothing warmed before."""
    started = time.perf_counter()
    from datasets import load_dataset

    imported = time.perf_counter() - started
    rows = load_dataset("json", data_files=task["files"], split="train", cache_dir=str(Path(task["out"], "cache")))
    rows = rows.map(cut_batch, batched=True, num_proc=2, fn_kwargs={"task": task})
    path = Path(task["out"], "merged.jsonl")
    rows.shuffle(seed=task["seed"]).to_json(path, num_proc=2)
    with open(path, "ab") as out:
        _to_disk(out)
    return {"rows": len(rows), "import_seconds": imported}


def cut_batch(batch: dict, task: dict) -> dict:
    """`cut` for a batch of `datasets`: columns of lists; a row that is skipped is left out."""
    rows = (cut({"id": name, "input_ids": ids, "loss_mask": mask}, task)
            for name, ids, mask in zip(batch["id"], batch["input_ids"], batch["loss_mask"], strict=True))
    kept = [row for row in rows if row]
    return {name: [row[name] for row in kept] for name in ("id", "input_ids", "loss_mask")}


def cut(row: dict, task: dict) -> dict | None:
    """The row with its mask, cut to max_seq_len; None where no two neighbouring tokens are supervised."""
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        mask = derive(ids, task["opens"], task["end_of_turn"])
    ids, mask = ids[:task["max_seq_len"]], mask[:task["max_seq_len"]]
    if not any(a and b for a, b in zip(mask, mask[1:])):  # noqa: B905 (one shorter by intent)
        return None
    return {"id": row["id"], "input_ids": ids, "loss_mask": mask}


def derive(ids: list[int], opens: list[list[int]], end_of_turn: int) -> list[int]:
    """1 from behind an assistant header (the longest comes first in `opens`) through the end of its turn."""
    mask, firsts, at = [0] * len(ids), {header[0] for header in opens}, 0
    while at < len(ids):
        header = ids[at] in firsts and next((h for h in opens if ids[at:at + len(h)] == h), None)
        if not header:
            at += 1
            continue
        at += len(header)
        while at < len(ids):
            mask[at] = 1
            at += 1
            if ids[at - 1] == end_of_turn:
                break
    return mask


def ours(task: dict) -> dict:
    started = time.perf_counter()
    from eagle3nb.corpus.decision import accounting_lines
    from eagle3nb.corpus.masks import Markers
    from eagle3nb.corpus.merge import merge
    from eagle3nb.corpus.records import find_sources

    imported = time.perf_counter() - started
    markers = Markers(tuple(map(tuple, task["opens"])), task["end_of_turn"], ())
    report = merge(find_sources(task["root"]), task["out"], max_seq_len=task["max_seq_len"], seed=task["seed"],
                   vocab_size=task["vocab_size"], markers=markers)
    return {"rows": report["records"], "tokens": report["tokens"], "lines": accounting_lines(report["sources"]),
            "import_seconds": imported}


def verify(task: dict) -> dict:
    """Our reading back of what our merge has written."""
    started = time.perf_counter()
    from eagle3nb.corpus.verify import verify as read_back

    imported = time.perf_counter() - started
    return {"rows": read_back(task["ours"])["records"], "import_seconds": imported}


def audit(task: dict) -> dict:
    """The audit's scan: the rules on ids and masks, over every row."""
    started = time.perf_counter()
    from eagle3nb.corpus.decision import Rules
    from eagle3nb.corpus.masks import Markers
    from eagle3nb.corpus.survey import survey

    imported = time.perf_counter() - started
    markers = Markers(tuple(map(tuple, task["opens"])), task["end_of_turn"], ())
    found = survey(task["root"], rules=Rules(task["max_seq_len"], "own", markers), vocab_size=task["vocab_size"])
    return {"rows": len(found.rows), "import_seconds": imported}


def _to_disk(out) -> None:
    out.flush()
    os.fsync(out.fileno())


CONTESTANTS = {run.__name__: run for run in (copy, plain, datasets, ours, verify, audit)}


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[2]).read_text())
    said = {"import_seconds": 0.0} | CONTESTANTS[sys.argv[1]](task)
    Path(task["said"]).write_text(json.dumps(said))
