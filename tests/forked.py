"""Training processes, one or several at once, forked from one that has imported everything and never trains itself:

    python forked.py FOLDER MODULE SCENARIO…     functions of tests/drafter/MODULE.py; their asserts are the test

Each runs drafter.train.main as torchrun would start it, on the synthetic store of conftest.py.
"""

import importlib
import os
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ports import free_port

from eagle3nb.drafter import train as training
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.files import write_json

TIMES = {"seconds", "tokens_per_s", "waited_s", "waiting_share"}
FACTS = SimpleNamespace(hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=97, eps=1e-5,
                        rope={"theta": 10000.0, "scaling": None}, max_positions=256)
DEFAULTS = {"epochs": 4, "pack_tokens": 96, "accumulate": 5, "learning_rate": 3e-3, "validation_share": 0.15,
            "checkpoint_every": 3, "states": "", "target": ""}


def scenarios(folder: Path, *names: str) -> None:
    """Run from a test: the scenarios, one after the other, in a process of its own."""
    module = Path(sys._getframe(1).f_code.co_filename).stem
    done = subprocess.run([sys.executable, __file__, folder, module, *names], capture_output=True, text=True,
                          timeout=850, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def nothing(*_) -> None:
    """What a run is made to do beside training, if not told otherwise."""


class Trainings:
    """.run(name, size, **settings): trains to the end in `size` processes; .codes, .said: of the last one."""

    def __init__(self, folder: Path):
        from conftest import make_store  # tests/drafter's, since that folder leads sys.path here

        self.folder, self.make_store, self.codes, self.said = folder, make_store, [], ""
        self.store = make_store(rows=40, seed=2)

    def run(self, name: str, size: int = 1, *, after=nothing, before=nothing, prepare=nothing, store=None,
            **changes) -> list[dict]:
        """Metrics. before(run, rows of each pack) and after(run) are called in each process around each of its steps,
        prepare() first."""
        drafter = self.folder / name
        if not (drafter / "vocabulary.json").is_file():
            write_json(drafter / "vocabulary.json", {"ids": list(range(97))})
        write_json(drafter / "settings.json", {"drafter": str(drafter), **DEFAULTS, **changes})
        port = free_port()
        log = os.open(drafter / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        children = [self.child(drafter, rank, size, port, log, before, after, prepare, store or self.store)
                    for rank in range(size)]
        os.close(log)
        self.codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        self.said = (drafter / "log").read_text()
        return read_metrics(drafter / "metrics.jsonl")

    def child(self, drafter, rank, size, port, log, before, after, prepare, store) -> int:
        if child := os.fork():
            return child
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            if size > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            stand_in(store, before, after)
            prepare()
            os._exit(training.main(str(drafter / "settings.json")))
        except BaseException:
            traceback.print_exc()
            os._exit(3)


def stand_in(store, before, after) -> None:
    """In a forked process: the synthetic store and target in the place of files."""
    @contextmanager
    def opened(settings):
        yield store

    stepped = training.Run.train_step

    def step(run, numbers, *args):
        before(run, numbers)
        stepped(run, numbers, *args)
        after(run)

    training.opened_states, training.facts_of = opened, lambda folder: FACTS
    training.target_weights = lambda folder: {"norm.weight": torch.ones(32)}
    training.Run.train_step = step


def assert_alike(ours: list[dict], theirs: list[dict], tolerance: float) -> None:
    for kind in ("train", "validation"):
        a, b = ([line for line in lines if line["kind"] == kind] for lines in (ours, theirs))
        assert a and [line["step"] for line in a] == [line["step"] for line in b], (len(a), len(b))
        for one, other in zip(a, b, strict=True):
            assert set(one) == set(other)
            for key in set(one) - {"kind", *TIMES}:
                np.testing.assert_allclose(flat(one[key]), flat(other[key]), rtol=tolerance, atol=1e-9,
                                           err_msg=f"{kind} {one['step']} {key}")


def flat(value) -> np.ndarray:
    """Numbers of a line's value, in order; of a dict, its values'."""
    if isinstance(value, dict):
        value = [x for inner in value.values() for x in flat(inner)]
    return np.array(value, float).ravel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent / "drafter"))
    for name in sys.argv[3:]:
        getattr(importlib.import_module(sys.argv[2]), name)(Trainings(Path(sys.argv[1]) / name))
        print(f"{name}: done", flush=True)
