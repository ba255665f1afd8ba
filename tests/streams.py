"""Streams of a tiny target: what the tests of streamed training share with the process that is killed in them."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiny
import torch
from forked import flat
from waiting import PATIENCE

from eagle3nb.corpus.merged import Corpus
from eagle3nb.drafter import train as training
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.initialise import target_weights
from eagle3nb.drafter.settings import Settings
from eagle3nb.drafter.streaming import opened_states
from eagle3nb.files import write_json
from eagle3nb.states import feeder, stream
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.target import facts_of

HOW = {"dtype": "fp32", "shard_tokens": 1500}
TIMES = {"seconds", "tokens_per_s", "waited_s", "waiting_share"}


def make_world(root, rows):
    """.settings(name, states); .trained(name, states): metrics of a training in this process; .begin(states)."""
    corpus = Corpus.open(tiny.make_corpus(root / "made", rows=rows))
    target = TransformersTarget(tiny.make_target(root / "target"), torch.float32, "cpu")

    def settings(name, states, **changes) -> Settings:
        write_json(root / name / "vocabulary.json", {"ids": list(range(128))})
        return Settings(**{"states": str(root / states), "drafter": str(root / name), "target": str(root / "target"),
                           "corpus": str(corpus.folder), "epochs": 2, "pack_tokens": 512, "accumulate": 2,
                           "initialise": "head", "learning_rate": 1e-3, "checkpoint_every": 10, **changes})

    def trained(name, states, stop=lambda: False, **changes) -> list[dict]:
        given = settings(name, states, **changes)
        with opened_states(given) as store:
            training.train(given, store, facts_of(given.target), lambda: target_weights(given.target), stop)
        return read_metrics(root / name / "metrics.jsonl")

    def begin(name, keep_bytes=26_000_000, batch_tokens=1024, **changes) -> dict:
        return stream.begin(corpus, target, root / name, batch_tokens=batch_tokens, keep_bytes=keep_bytes,
                            **HOW | changes)

    return SimpleNamespace(root=root, corpus=corpus, target=target, settings=settings, trained=trained, begin=begin)


class Forked:
    """The feeder in a child, with what is used of subprocess.Popen."""

    def __init__(self, folder):
        self.parent, self.returncode = os.getpid(), None
        self.pid = os.fork()
        if not self.pid:
            try:
                os.environ["EAGLE3NB_PARENT"] = str(self.parent)
                os.closerange(3, 1024)  # as Popen does: training's lock is not the feeder's
                log = os.open(folder / stream.LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (not pytest's)
                os._exit(feeder.main(str(folder)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)

    def poll(self):
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout=PATIENCE):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("feeder", timeout)
            time.sleep(0.01)

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def watched(folder: Path):
    """Yields a list: bytes of all shards and heads below the folder, whole or being written, a look a millisecond. The
    last look comes after the block."""
    sizes, ended = [], threading.Event()

    def total() -> int:
        found = 0
        for file in folder.rglob("*.safetensors*"):
            with suppress(FileNotFoundError):
                found += file.stat().st_size
        return found

    def look():
        last = False
        while not last:
            last = ended.is_set()
            try:
                sizes.append(total())
            except FileNotFoundError:  # a folder went while it was read
                last = False
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def of(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def assert_alike(lines, others, tolerance):
    for kind in ("train", "validation"):
        ours, theirs = of(lines, kind), of(others, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for key in set(one) - {"kind", *TIMES}:
                np.testing.assert_allclose(flat(one[key]), flat(other[key]), rtol=tolerance,
                                           err_msg=f"{kind} {one['step']} {key}")
