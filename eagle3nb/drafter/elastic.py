"""torchrun as a process of ours: python -m eagle3nb.drafter.elastic <torchrun's arguments>

It starts a training process a GPU, starts them all again where one ends (max_restarts), and ends when the notebook's
kernel does; its processes, which have sessions of their own, end with it. On several machines the same command or
notebook runs on each, with its own node_rank and one rendezvous; the machines need not share a disk, only the states
and the target: the first one's process leads (distributed.py).
"""

import os
import signal
import sys
from pathlib import Path

from eagle3nb.drafter.settings import Machines
from eagle3nb.errors import UserError
from eagle3nb.parent import die_with_parent

LOCAL = "127.0.0.1"


def processes_here(machines: Machines) -> int:
    """Training processes on this machine: as given, or one a GPU, one on a CPU. UserError for more than its GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and machines.processes > gpus:
        raise UserError(f"processes is {machines.processes} and this machine has {gpus} GPUs; set it to 0, one a GPU")
    return machines.processes or gpus or 1


def command(machines: Machines, processes: int, settings_path: Path) -> list[str]:
    """torchrun's arguments for `processes` on this machine."""
    if machines.nodes == 1:
        where = ["--standalone", f"--local-addr={LOCAL}"]      # a container's name need not resolve
    else:
        where = [f"--nnodes={machines.nodes}", f"--node-rank={machines.node_rank}", "--rdzv-id=eagle3nb",
                 "--rdzv-backend=c10d", f"--rdzv-endpoint={machines.rendezvous}"]
    return [*where, f"--nproc-per-node={processes}", f"--max-restarts={machines.max_restarts}",
            "-m", "eagle3nb.drafter.train", str(settings_path)]


def main(arguments: list[str]) -> int:
    """0, or 1 after a line that says which process ended how."""
    die_with_parent()
    os.environ["EAGLE3NB_PARENT"] = str(os.getpid())          # of the training processes
    # Else all starts share one store, and a second one finds the addresses of the first's processes (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        sys.stderr.write(ended({rank: failure.exitcode for rank, failure in error.failures.items()}) + "\n")
        return 1
    return 0


def ended(codes: dict[int, int]) -> str:
    """codes: exit code of each process that failed. One that was killed takes the others with it: it is the cause."""
    rank = min(codes, key=lambda rank: (codes[rank] != -signal.SIGKILL, codes[rank] >= 0, rank))
    if codes[rank] >= 0:
        return f"process {rank} ended with exit code {codes[rank]}"
    name = signal.Signals(-codes[rank]).name
    advice = ", usually for lack of memory: lower pack_tokens" if codes[rank] == -signal.SIGKILL else ""
    return f"error: training process {rank} was killed by {name}{advice}; run again to resume"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
