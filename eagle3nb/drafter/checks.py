"""What training refuses before its first step, and what it keeps of a batch whose gradient is no number."""

from pathlib import Path

import numpy as np

from eagle3nb.drafter.checkpoint import checkpoints
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown, write_json
from eagle3nb.states.streamed import Stream

TARGET = ("target config", "target weights", "layers")  # of a store's fingerprint: whose states they are
KEPT = 3  # batches that are written down, the first ones


def read_vocabulary(path: Path, vocab: int) -> list[int]:
    """Target ids of D from vocabulary.json. UserError where they are no draft vocabulary of a target of `vocab` ids."""
    ids = read_json(path)
    ids = ids.get("ids") if isinstance(ids, dict) else None
    again = "run notebook 4, which makes it for this corpus and target"
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{shown(path)} holds no list of token ids; {again}")
    if falls := np.flatnonzero(np.diff(ids) <= 0).tolist():
        raise UserError(f"{shown(path)}: ids must ascend, and {ids[falls[0] + 1]} follows {ids[falls[0]]}; {again}")
    if ids[0] < 0 or ids[-1] >= vocab:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise UserError(f"{shown(path)}: token {wrong} lies outside the target's vocabulary of {vocab:,}, so it is of "
                        f"another target; {again}")
    return ids


def check_target(folder: Path, fingerprint: dict) -> None:
    """UserError where the latest checkpoint below `folder` was trained on the states of another target: a fresh start
    would delete it."""
    for path in checkpoints(folder / "checkpoints")[:1]:
        try:
            theirs = read_json(path / "state.json").get("target", {})
        except UserError:                       # torn: nothing can be said, nothing is lost
            continue
        if differing := [name for name in TARGET if name in theirs and theirs[name] != fingerprint.get(name)]:
            raise UserError(f"{shown(folder)} holds checkpoints of another target (other {', '.join(differing)}); "
                            "choose another run or work_dir, or delete them")


def target_of(fingerprint: dict) -> dict:
    """What `check_target` compares, for a checkpoint's state."""
    return {name: fingerprint[name] for name in TARGET if name in fingerprint}


def check_slots(store, rows, t2d: np.ndarray) -> None:
    """UserError where no slot of the training rows counts, or none bears loss: nothing would be learnt.

    Reads rows until one does. A slot t counts where x[t+1] and x[t+2] are supervised, and bears loss where the teacher
    at t+1 prefers a token of D; states that stream are not there yet, so of them the second is not asked.
    """
    counts = False
    for i in rows:
        row = store.row(int(i))
        mask = np.asarray(row.mask)
        if (mask[1:-1] & mask[2:]).any():
            counts = True
            if isinstance(store, Stream) or t2d[row.teacher_argmax[np.asarray(row.last_positions) > 0]].any():
                return
    if not counts:
        raise UserError(f"none of {len(rows)} training rows has two supervised tokens in a row, so no slot counts; "
                        "check the loss masks in stage 1")
    raise UserError(f"the target prefers a token of the draft vocabulary nowhere in {len(rows)} training rows, so "
                    "vocabulary.json is of another corpus or target; run notebook 4, which makes it anew")


def keep_batch(folder: Path, step: int, store, numbers, **values) -> str:
    """Write rows and ids of a step's packs to `folder`/step-<step>.json, of the first steps only; the first's name.

    numbers: row numbers of each pack; values: more of JSON, such as the loss.
    """
    kept, path = sorted(folder.glob("step-*.json")), folder / f"step-{step:06d}.json"
    if len(kept) < KEPT or path in kept:
        packs = [[{"row": int(row.row), "ids": np.asarray(row.ids).tolist()} for row in map(store.row, map(int, rows))]
                 for rows in numbers]
        write_json(path, {"step": step, **values, "packs": packs})
    return shown(min([*kept, path]))
