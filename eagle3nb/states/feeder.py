"""The feeder, as a process of its own: python -m eagle3nb.states.feeder STATES

Makes the shards that training has announced (stream.py), in their order, into `kept` and `ahead`. A shard that was
computed waits in memory until there is room for it, and is written whole; meanwhile the next is in the target. Ends
after the last, when training ends, and with one line `error: …` where the states cannot be made.
"""

import os
import re
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.lock import only_one
from eagle3nb.parent import die_with_parent
from eagle3nb.progress import progress
from eagle3nb.states import extract, open_target
from eagle3nb.states import store as stores
from eagle3nb.states.forward import shard
from eagle3nb.states.stream import AHEAD, FEED, FEEDER_LOCK, FEEDING, KEPT, ORDER, POLL, Ordered, shard_bytes
from eagle3nb.states.writing import same_store

ENDING = threading.Event()
WHAT = {KEPT: "states that are kept", AHEAD: "states ahead"}


def feed(folder: Path, orders: dict, target) -> None:
    """Make every shard of feed.json. UserError for another target or corpus than stage 3's, and as extract."""
    corpus, dtype = Corpus.open(orders["corpus"]), orders["dtype"]
    same_store(folder, orders["fingerprint"],
               extract.fingerprint(corpus, target, orders["rows"], dtype, orders["shard_tokens"]))
    for name in (KEPT, AHEAD):
        todo = orders["todo"][name]
        if not todo:
            continue
        rows, writer = Ordered(corpus, np.load(folder / name / ORDER)), Paced(folder, name, orders, target.facts)
        total = sum(int(corpus.lengths[rows.order[first : last + 1]].sum()) for first, last in todo)
        clock = dict.fromkeys(extract.CLOCK, 0.0)
        with progress(total, WHAT[name], "tokens") as bar, extract.Background(writer, clock) as background:
            for first, last in todo:
                tensors = made(rows, target, first, last, orders, clock, bar, background.check)
                background.hand(first, last, tensors, ExitStack())
                del tensors


def made(rows: Ordered, target, first: int, last: int, orders: dict, clock: dict, bar, check) -> dict:
    """One shard's tensors; an error names the corpus's row, not the position."""
    dtype = extract.gathered_in(target, orders["dtype"])
    try:
        return shard(rows, target, first, last, dtype, orders["batch_tokens"], clock, bar, check)
    except UserError as error:
        raise UserError(re.sub(r"^row (\d+)", lambda found: f"row {rows.order[int(found[1])]}", str(error))) from error


class Paced:
    """Writes the shards of a part, each when there is room for it."""

    def __init__(self, folder: Path, name: str, orders: dict, facts):
        self.folder, self.orders, self.facts = folder, orders, facts
        self.writer = stores.ShardWriter(folder / name, orders["dtype"])

    def write(self, first: int, last: int, tensors: dict) -> None:
        size = shard_bytes(self.facts, len(tensors["input_ids"]), len(tensors["last_positions"]), last + 1 - first,
                           self.orders["dtype"])
        while used(self.folder) + size > self.orders["keep_bytes"]:
            if ENDING.wait(POLL):
                return
        self.writer.write(first, last, tensors)


def used(folder: Path) -> int:
    """Bytes of all shards and the head, whole or being written."""
    total = 0
    for part in (folder, folder / KEPT, folder / AHEAD):
        for file in os.scandir(part) if part.is_dir() else ():
            if stores.OWN.fullmatch(file.name) and ".safetensors" in file.name:
                try:
                    total += file.stat().st_size
                except FileNotFoundError:  # read to its end, or renamed
                    continue
    return total


def end(*_) -> None:
    ENDING.set()
    sys.exit(143)


def main(folder: str) -> int:
    """0 done, 1 the user's fault (one line `error: …`)."""
    die_with_parent()
    signal.signal(signal.SIGTERM, end)
    folder = Path(folder)
    os.environ["EAGLE3NB_PROGRESS"] = str(folder / FEEDING)
    try:
        with only_one(folder / FEEDER_LOCK):
            orders = read_json(folder / FEED)
            target = open_target(orders["engine"], orders["target"], tensor_parallel=orders["tensor_parallel"],
                                 engine_args=orders["engine_args"])
            try:
                feed(folder, orders, target)
            finally:
                if hasattr(target, "close"):  # an engine that is a process of its own
                    target.close()
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
