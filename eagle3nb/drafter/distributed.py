"""Several training processes that act as one: who leads, sums over all, the leader's values at all.

torchrun gives each process its rank (elastic.py). An optimiser step's packs are dealt to the processes; a pack's loss
is scaled by the counts of the whole step, so gradients are summed, not averaged, and the step's content does not depend
on how many processes there are. Gradients meet once a step, parameter by parameter: the buckets of
DistributedDataParallel would cost a copy of them all. What lies on a GPU goes through NCCL, the rest through Gloo.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eagle3nb.errors import UserError


@dataclass(frozen=True)
class World:
    """One of `size` processes. The leader reads checkpoints and writes all that is written."""

    device: str
    rank: int = 0
    size: int = 1
    leader: int = 0  # its rank: the first process of the first machine, where the notebook runs

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def sum(self, values) -> np.ndarray:
        """float64, of any shape, over all processes; counts up to 2^53 are exact."""
        total = torch.from_numpy(np.array(values, np.float64))
        if self.size > 1:
            dist.all_reduce(total)
        return total.numpy()

    def any(self, here: bool) -> bool:
        """Is it so at one process at least?"""
        return bool(self.sum(float(here)) > 0)

    def told(self, value):
        """The leader's value (anything that pickles), at every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.leader, device=torch.device("cpu"))
        return box[0]

    def tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The leader's tensors at every process, on the CPU; what the others give is not looked at."""
        if self.size == 1:
            return tensors
        shapes = self.told({name: (x.shape, x.dtype) for name, x in tensors.items()} if self.leads else None)
        received = {}
        for name, (shape, dtype) in shapes.items():
            received[name] = tensors[name].cpu().contiguous() if self.leads else torch.empty(shape, dtype=dtype)
            dist.broadcast(received[name], src=self.leader)
        return received

    def sum_gradients(self, parameters) -> None:
        """In place, the same bits at every process; one that had no pack takes part with zeros."""
        if self.size == 1:
            return
        waiting = []
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            waiting.append(dist.all_reduce(p.grad, async_op=True))
        for work in waiting:
            work.wait()

    def mine(self, costs) -> list[int]:
        """Which of a step's packs this process computes, ascending; costs: of each pack, such as its tokens."""
        return deal(costs, self.size)[self.rank]


def deal(costs, size: int) -> list[list[int]]:
    """Numbers of the packs of each of `size` processes: the costliest first, each to who has least so far."""
    shares, loads = [[] for _ in range(size)], [0] * size
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        to = loads.index(min(loads))
        shares[to].append(i)
        loads[to] += costs[i]
    return [sorted(share) for share in shares]


def alone() -> World:
    return World("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def joined():
    """Yields this process's World: as torchrun's environment says, or alone. UserError where it has no GPU of its own.

    EAGLE3NB_NODE_RANK is the machine's number. torchrun's c10d rendezvous does not look at it and numbers machines by
    their addresses, so rank 0 need not be where the notebook is that shows the curve.
    """
    world = alone()
    if "RANK" not in os.environ:
        yield world
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world.device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(f"{local + 1} processes on {torch.cuda.device_count()} GPUs; set processes to 0, one a GPU")
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if world.device == "cuda" else "gloo")
    try:
        first = local == 0 and int(os.environ.get("EAGLE3NB_NODE_RANK", "0")) == 0
        leaders = torch.tensor([rank, 1]) * first
        dist.all_reduce(leaders)
        if leaders[1] != 1:
            raise UserError(f"{int(leaders[1])} machines have node_rank 0; number them 0, 1, …")
        yield World(world.device, rank, size, int(leaders[0]))
    finally:
        dist.destroy_process_group()
