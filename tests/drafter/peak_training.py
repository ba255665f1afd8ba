"""Peak memory of a real training in a process of its own, and beside it what the memory plan foretells.

    python tests/drafter/peak_training.py                              the five shapes, one after another (2 minutes)
    python tests/drafter/peak_training.py '{"T": 1024, "K": 3, …}'     one training, as JSON

Bytes above what stood before it (Python, torch, a store of random states in memory), at its three peaks: start, step,
save. The table's exit code is 1 where the highest of them is foretold wrong by more than 10 %.
"""

import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import torch

from eagle3nb.drafter import train
from eagle3nb.drafter.settings import Settings
from eagle3nb.files import write_json

SHAPE = {"h": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "m": 1536, "V": 49152, "D": 4096, "T": 1024, "K": 3,
         "document": 256, "supervised": 0.6, "accumulate": 1, "steps": 3, "initialise": "head", "fc_norm": False,
         "norm_output": False, "freeze_head": False, "compute": "fp32"}


SHAPES = ({"T": 1024, "K": 3, "D": 4096}, {"T": 512, "K": 7, "D": 8192}, {"T": 512, "K": 3, "D": 8192, "accumulate": 4},
          {"T": 2048, "K": 7, "D": 8192}, {"T": 1024, "K": 3, "D": 32000, "freeze_head": True})
TOLERANCE = 0.10


class RandomStore:
    """What training uses of a store, of random bf16 states; every token lies in D, so every slot counts."""

    fingerprint = {"corpus": "random"}

    def __init__(self, o: dict):
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

        def states(*size):
            return torch.randn(*size, generator=generator).bfloat16()

        self.chosen = np.sort(rng.choice(o["V"], o["D"], replace=False))
        self.embedded, self.head = states(o["V"], o["h"]), states(o["V"], o["h"]) * 0.1
        T, self.rows = o["document"], []
        mask = (np.arange(T) >= round((1 - o["supervised"]) * T)).astype(np.uint8)
        positions = np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int32)
        for number in range(max(1, o["T"] * o["accumulate"] * o["steps"] // T)):
            self.rows.append(SimpleNamespace(
                row=number, ids=rng.choice(self.chosen, T).astype(np.int32), mask=mask, aux=states(T, 3 * o["h"]),
                last=states(len(positions), o["h"]), last_positions=positions,
                teacher_argmax=rng.choice(self.chosen, len(positions)).astype(np.int32)))
        self.lengths = np.array([T] * len(self.rows))

    def __len__(self):
        return len(self.rows)

    def row(self, i):
        return self.rows[i]

    def embedding(self):
        return self.embedded

    def lm_head_rows(self, ids):
        return self.head[torch.as_tensor(ids)]


def facts_of(o: dict):
    return SimpleNamespace(hidden=o["h"], heads=o["heads"], kv_heads=o["kv_heads"], head_dim=o["head_dim"],
                           intermediate=o["m"], vocab=o["V"], eps=1e-5, rope={"theta": 1e4, "scaling": None},
                           max_positions=8192, layers=8, eos=())


def settings_of(o: dict, folder: str) -> Settings:
    return Settings(states="", drafter=folder, target="", epochs=1, pack_tokens=o["T"], ttt_steps=o["K"],
                    accumulate=o["accumulate"], initialise=o["initialise"], validation_share=0.0, fc_norm=o["fc_norm"],
                    norm_output=o["norm_output"], freeze_head=o["freeze_head"], compute=o["compute"])


def run(o: dict, folder: str, store: RandomStore) -> None:
    write_json(f"{folder}/vocabulary.json", {"ids": store.chosen.tolist()})
    norm = {"norm.weight": torch.ones(o["h"])}
    train.train(settings_of(o, folder), store, facts_of(o), lambda: norm)


def status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def watch(place, name: str, peaks: dict, peak: str, base: int) -> None:
    """Notes the process's highest memory during each call of place.name."""
    wrapped = getattr(place, name)

    def call(*args, **more):
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")  # the high-water mark starts anew
        result = wrapped(*args, **more)
        peaks[peak] = max(peaks.get(peak, 0), status("VmHWM") - base)
        return result

    setattr(place, name, call)


def main(o: dict) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = RandomStore(o)
    base, peaks = status("VmRSS"), {}
    for place, name, peak in ((train, "initialise", "start"), (train.Run, "train_step", "step"),
                              (train, "save_checkpoint", "save")):
        watch(place, name, peaks, peak, base)
    with tempfile.TemporaryDirectory() as folder:
        run(o, folder, store)
    print(json.dumps(peaks))


def foretold(o: dict) -> dict:
    """{peak: bytes} of the plan, less what stands before the measurement begins: two processes and the embedding."""
    from eagle3nb.drafter.model import DraftConfig
    from eagle3nb.drafter.plan import PEAKS, Shape, training_memory
    from eagle3nb.states.plan import RUNTIME

    config = DraftConfig.from_target(facts_of(o), o["D"], fc_norm=o["fc_norm"], norm_output=o["norm_output"])
    shape = Shape(o["T"], o["K"], o["accumulate"], o["document"], o["supervised"], o["initialise"],
                  freeze_head=o["freeze_head"], teacher_positions=round(o["T"] * o["steps"] * o["supervised"]),
                  compute=o["compute"])
    parts = training_memory(config, shape, device="cpu")["parts"]
    standing = 2 * RUNTIME + next(part["step"] for part in parts if part["part"] == "embedding")
    return {peak: sum(part[peak] for part in parts) - standing for peak in PEAKS}


def table() -> int:
    """Measured and foretold, in MB, for each of SHAPES; 1 where one is too far off."""
    print(f"{'shape':<66}{'start':>14}{'step':>14}{'save':>14}{'peak':>8}")
    worst = 0.0
    for changes in SHAPES:
        o = SHAPE | {"steps": 2} | changes
        done = subprocess.run([sys.executable, __file__, json.dumps(o)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        measured, planned = json.loads(done.stdout), foretold(o)
        error = max(planned.values()) / max(measured.values()) - 1
        worst = max(worst, abs(error))
        pairs = "".join(f"{measured[peak] / 1e6:>8,.0f}{planned[peak] / 1e6:>6,.0f}" for peak in planned)
        print(f"{json.dumps(changes):<66}{pairs}{100 * error:>+7.1f}%", flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(SHAPE | json.loads(sys.argv[1])) if sys.argv[1:] else table())
