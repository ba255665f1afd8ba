"""Training killed (SIGKILL) at random steps, and in the middle of what it writes: the resumed run is the undisturbed
one. Several processes may go on where one was killed, and the other way round."""

import json
import os
import signal

import numpy as np
from forked import Trainings, assert_alike, flat, scenarios

from eagle3nb.drafter import checkpoint
from eagle3nb.drafter.curves import of_kind, read_metrics


def test_killed_and_resumed(tmp_path):
    scenarios(tmp_path, "killed_anywhere", "with_other_processes")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_anywhere(trainings: Trainings) -> None:
    """Batch order, learning rate, loss and all else of a line to 1e-6, though there is one process and nothing in it is
    random: equal, then. Checkpoints come every second step, so a kill loses a step, or none."""
    rng, batches = np.random.default_rng(5), {}

    def noted(name, then=lambda run: None):
        def before(run, numbers):
            with open(trainings.folder / name / "batches", "a") as handle:
                handle.write(json.dumps([run.step, [rows.tolist() for rows in numbers]]) + "\n")
            then(run)
        return before

    def at_step(step):
        return {"before": noted("killed", lambda run: kill() if run.step == step else None)}

    def in_checkpoint(number, what):
        """The number-th that is written: half of its tensors, all of them and no record, or no old one removed."""
        calls = iter(range(1, 1000))
        parts = {"tensors": "save", "record": "write_json", "old": "checkpoints"}

        def prepare():
            whole = getattr(checkpoint, parts[what])

            def cut(*args, **more):
                if next(calls) < number:
                    return whole(*args, **more)
                if what == "tensors":
                    folder = trainings.folder / "killed" / "checkpoints" / f"partial-{os.getpid()}"
                    (folder / "tensors.safetensors").write_bytes(whole(*args, **more)[:5000])
                return kill()

            setattr(checkpoint, parts[what], cut)
        return {"prepare": prepare, "before": noted("killed")}

    settings = {"checkpoint_every": 2, "epochs": 8, "evaluate_every": 4}
    whole = trainings.run("whole", before=noted("whole"), **settings)
    assert trainings.codes == [0] and whole[-1]["step"] == 24
    steps = sorted(rng.choice(np.arange(1, 24), 4, replace=False).tolist())
    ways = [at_step(0), at_step(steps[0]), in_checkpoint(2, "tensors"), at_step(steps[1]), in_checkpoint(1, "record"),
            at_step(steps[2]), in_checkpoint(2, "old"), at_step(steps[3])]
    for number, way in enumerate(ways):
        trainings.run("killed", **way, **settings)
        assert trainings.codes == [-signal.SIGKILL], (number, steps, trainings.codes, trainings.said)
        assert ("is torn" in trainings.said) == (number == 6)
        if number == 3:
            tear(trainings.folder / "killed" / "checkpoints", "tensors.safetensors", rng)
            lines = trainings.run("killed", **at_step(newest(trainings) + 1), **settings)
            assert "is torn (its tensors do not match their hash); the one before it" in trainings.said, trainings.said
        if number == 5:                             # and the next one says so
            tear(trainings.folder / "killed" / "checkpoints", "state.json", rng)
    lines = trainings.run("killed", before=noted("killed"), **settings)
    assert trainings.codes == [0], trainings.said
    assert_alike(lines, whole, 1e-6)
    losses = [[flat(line["loss"]) for line in of_kind(one, "train")] for one in (lines, whole)]
    np.testing.assert_array_equal(*losses)
    for name in ("whole", "killed"):
        with open(trainings.folder / name / "batches") as handle:
            made = [json.loads(line) for line in handle]
        batches[name] = dict(map(tuple_of, made))
        assert all(batches[name][step] == rows for step, rows in map(tuple_of, made)), "a step had another batch"
    assert batches["killed"] == batches["whole"] and sorted(batches["whole"]) == list(range(24))
    models = [(trainings.folder / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]
    left = [path.name for path in (trainings.folder / "killed").rglob("*partial*")]
    assert not left and len(list((trainings.folder / "killed" / "checkpoints").iterdir())) == checkpoint.KEPT


def tuple_of(pair):
    return pair[0], pair[1]


def newest(trainings: Trainings) -> int:
    return max(int(path.name[5:]) for path in (trainings.folder / "killed" / "checkpoints").glob("step-*"))


def tear(folder, name: str, rng) -> None:
    """The newest checkpoint's file as a crash may leave it: cut, or with a block of zeros."""
    path = max(folder.glob("step-*")) / name
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data) // 2, len(data) - 600)) if len(data) > 2000 else len(data) // 2
    data[at:at + 512] = bytes(512) if name.endswith("safetensors") else b""
    path.write_bytes(data)


def with_other_processes(trainings: Trainings) -> None:
    """Two, of which one is killed; one, killed; two to the end: 1e-4, as float32 sums in another order."""
    def kills(step, rank):
        return lambda run, numbers: kill() if run.step == step and run.world.rank == rank else None

    whole = trainings.run("whole", checkpoint_every=2)
    trainings.run("parts", 2, before=kills(5, 1), checkpoint_every=2)
    assert trainings.codes[1] == -signal.SIGKILL and trainings.codes[0] not in (0, None)
    trainings.run("parts", 1, before=kills(9, 0), checkpoint_every=2)
    assert trainings.codes == [-signal.SIGKILL] and "resumed at step 4" in trainings.said
    lines = trainings.run("parts", 2, checkpoint_every=2)
    assert trainings.codes == [0, 0] and "resumed at step 8" in trainings.said
    assert lines == read_metrics(trainings.folder / "parts" / "metrics.jsonl")
    assert_alike(lines, whole, 1e-4)
