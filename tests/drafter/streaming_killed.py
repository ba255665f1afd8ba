"""Training and its feeder killed again and again: python streaming_killed.py FOLDER [kills] [seed]

All processes are forked from this one, which has imported everything and never trains itself.
"""

import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import streams
from waiting import gone, until

from eagle3nb.drafter import streaming
from eagle3nb.drafter import train as training
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.errors import UserError
from eagle3nb.states import streamed

torch.set_num_threads(1)
KEEP = 3_000_000
training.SCALED = streaming.SCALED = 800
streamed.start_feeder = streams.Forked


def train(world, name) -> psutil.Process:
    """A training in a child of ours, as drafter.train.main would be: 1 and a line where states do not come."""
    child = os.fork()
    if child:
        return psutil.Process(child)
    try:
        world.trained(name, "states", checkpoint_every=3, pack_tokens=256, accumulate=1, epochs=3)
        os._exit(0)
    except UserError as error:
        (world.root / "said").write_text(str(error))
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)


def ended(process: psutil.Process) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])


def reached(metrics: Path) -> int:
    """The last step of which metrics tell; 0 before there are any."""
    return max((line["step"] for line in read_metrics(metrics)), default=0)


def await_step(process: psutil.Process, metrics: Path, step: int) -> None:
    """Until training has come so far, or has ended."""
    try:
        until(lambda: reached(metrics) >= step or process.status() == psutil.STATUS_ZOMBIE)
    except AssertionError:
        process.kill()
        raise


def main(folder: Path, kills: int = 20, seed: int = 0) -> None:
    """A kill comes so many steps after the last one, and so long after that step as a step or a start may take: by the
    clock alone, a machine of changing speed would kill before anything is done, or never."""
    rng, world = np.random.default_rng(seed), streams.make_world(folder, 60)
    world.begin("states", keep_bytes=KEEP)
    assert ended(train(world, "whole")) == 0
    whole = read_metrics(folder / "whole" / "metrics.jsonl")
    shutil.rmtree(folder / "states" / "kept")  # it is to be killed too
    steps, victims, finished, metrics = [], [], 0, folder / "killed" / "metrics.jsonl"
    with streams.watched(folder / "states") as sizes:
        while len(victims) < kills and finished < 5:
            before, more = reached(metrics), int(rng.integers(0, whole[-1]["step"] // 8))
            process = train(world, "killed")
            await_step(process, metrics, before + more)
            time.sleep(rng.uniform(0, 0.05 if more else 1.5))
            feeders = process.children()
            if feeders and rng.random() < 0.5:
                with suppress(psutil.NoSuchProcess):
                    feeders[0].kill()
                victims.append("feeder")
                code = ended(process)
                assert code in (0, 1), code  # 0: it had made all that was needed
                assert code == 0 or "was killed by SIGKILL" in (folder / "said").read_text()
            else:
                process.kill()
                victims.append("training")
                code = ended(process)
                if rng.random() < 0.5:  # else the next one meets the old feeder, which ends in its own time
                    assert all(gone(feeder.pid) for feeder in feeders)
            steps.append(reached(metrics))
            lines = read_metrics(metrics)
            if code == 0 or code == -signal.SIGKILL and lines and lines[-1]["kind"] == "end":
                if len(victims) > 3 and len(set(victims)) == 2 and len(set(steps)) > 2:
                    break
                finished += 1  # too early: once more from the beginning
                streams.assert_alike(lines, whole, 1e-6)
                shutil.rmtree(folder / "killed")
        assert ended(train(world, "killed")) == 0
    print(f"{victims}; at steps {steps} of {whole[-1]['step']}; {max(sizes)} bytes at most")
    streams.assert_alike(read_metrics(metrics), whole, 1e-6)
    assert max(sizes) <= KEEP and not (folder / "states" / "ahead").exists()
    assert len(victims) > 3 and len(set(victims)) == 2 and len(set(steps)) > 2, (victims, steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
