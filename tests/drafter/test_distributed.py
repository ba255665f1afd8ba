"""Several processes (Gloo, one machine) against one: the same steps, losses and metrics; a failure ends them all."""

import os
import signal

import numpy as np
from forked import Trainings, assert_alike, scenarios

from eagle3nb.drafter.curves import of_kind
from eagle3nb.drafter.distributed import deal
from eagle3nb.errors import UserError


def test_packs_are_dealt_by_cost():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        costs = rng.integers(1, 100, 20).tolist()
        shares = deal(costs, size)
        loads = [sum(costs[i] for i in share) for share in shares]
        assert sorted(sum(shares, [])) == list(range(20)) and all(share == sorted(share) for share in shares)
        assert max(loads) - min(loads) <= max(costs)
    assert deal([10, 90, 40, 40], 2) == [[1], [0, 2, 3]] and deal([5], 3) == [[0], [], []]


def test_several_processes(tmp_path):
    scenarios(tmp_path, "the_same_curve", "another_number_of_processes", "a_failure_ends_them_all")


def the_same_curve(trainings: Trainings) -> None:
    """Two ranks, and three of which one or two have no pack in an epoch's last step, against one: 1e-6, as float32 sums
    in another order. 1e-5 for the norm of the gradient, of which large parts cancel."""
    one = trainings.run("one")
    assert trainings.codes == [0]
    steps = of_kind(one, "train")
    sizes = np.diff([0, *(line["tokens"] for line in steps)])
    assert len(steps) == 12 and sizes[5] < 96 < 300 < sizes[4] and one[0]["processes"] == 1  # one pack, and five
    for size in (2, 3):
        several = trainings.run(f"of {size}", size)
        assert trainings.codes == [0] * size and several[0]["processes"] == size, trainings.said
        assert_alike(several, one, 1e-5)
        for kind in ("train", "validation"):
            losses = [[line["loss"] for line in of_kind(lines, kind)] for lines in (several, one)]
            np.testing.assert_allclose(*losses, rtol=1e-6)
    assert (trainings.folder / "of 2/config.json").is_file()
    documents = [trainings.run(f"documents {size}", size, loss_average="document", epochs=2) for size in (1, 2)]
    assert_alike(*documents, 1e-5)
    assert documents[0][2]["loss"] != one[2]["loss"]


def another_number_of_processes(trainings: Trainings) -> None:
    """Two, one, two: each is asked to end after some steps, at one process alone, and the next goes on."""
    def ends_after(step, rank):
        def after(run):
            if run.step == step and run.world.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
        return after

    whole = trainings.run("whole")
    trainings.run("parts", 2, after=ends_after(4, 1))
    assert trainings.codes == [0, 0] and "interrupted; the next start" in trainings.said
    lines = trainings.run("parts", 1, after=ends_after(8, 0))
    assert trainings.codes == [130] and lines[-1]["step"] == 8 and "resumed at step 4" in trainings.said
    lines = trainings.run("parts", 2)
    assert trainings.codes == [0, 0] and trainings.said.count("resumed at step 8") == 1
    assert_alike(lines, whole, 1e-4)


def a_failure_ends_them_all(trainings: Trainings) -> None:
    """One line with the process's number, no exit code 0, and what was saved before is gone on with."""
    def spoils(run, numbers):
        if run.step == 5 and run.world.rank == 1:
            raise UserError("this store is damaged")

    whole = trainings.run("whole")
    trainings.run("failed", 2, before=spoils)
    assert all(trainings.codes), trainings.codes
    assert trainings.said.count("error: this store is damaged (process 1 of 2)\n") == 1
    assert_alike(trainings.run("failed", 2), whole, 1e-5)
    assert "resumed at step 3" in trainings.said
