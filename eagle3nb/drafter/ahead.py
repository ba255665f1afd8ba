"""The next optimiser step's packs, read while this one computes: the step does not wait for the disk."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from eagle3nb.drafter.packing import Pack


class Ahead:
    """make(step) → that step's packs in memory, called by a thread one step ahead, so that two steps' packs are held.

    `reads` false: made when they are asked for (states that stream, whose feeder runs ahead itself, and in order).
    .waited: seconds spent in `take` so far.
    """

    def __init__(self, make: Callable[[int], list[Pack]], total: int, reads: bool = True):
        self.make, self.total, self.reads, self.waited = make, total, reads, 0.0
        self.pool, self.coming = ThreadPoolExecutor(1, "ahead"), {}

    def take(self, step: int) -> list[Pack]:
        """The packs of `step`, with whatever error their reading raised."""
        began = time.monotonic()
        made = self.coming.pop(step).result() if step in self.coming else self.make(step)
        self.waited += time.monotonic() - began
        if self.reads and step + 1 < self.total:
            self.coming[step + 1] = self.pool.submit(self.make, step + 1)
        return made

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_) -> None:
        """Waits for a reading that has begun: the store may be closed next."""
        self.pool.shutdown(cancel_futures=True)
