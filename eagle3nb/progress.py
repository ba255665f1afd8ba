"""Progress with rate and time left, tidy in an executed notebook and readable from another terminal.

tqdm's plain bar is one stream, which the runner coalesces to its last line; its notebook bars are widgets, blank in a
record. The same figures go, at most twice a second, to the file named by EAGLE3NB_PROGRESS, for `eagle3nb status`.
"""

import os
import sys
import threading
import time
from contextlib import contextmanager

from tqdm import tqdm

from eagle3nb.files import write_json

tqdm.monitor_interval = 0  # no thread of its own: a fork while it holds the lock leaves a child that waits for ever


def own_lock() -> None:
    """A lock of this process alone. tqdm's own is shared with all forks: one that is killed while it draws its bar
    holds it for good, and the others wait for ever."""
    tqdm.set_lock(threading.RLock())


own_lock()
os.register_at_fork(after_in_child=own_lock)


class Bar:
    """A running count of `unit`s. `advance` is cheap enough for a loop over batches."""

    def __init__(self, total: int, what: str, unit: str):
        self.what, self.unit, self.total, self.done = what, unit, total, 0
        self.started = self.told = time.monotonic()
        self.bar = tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, file=sys.stdout, mininterval=2.0,
                        ncols=110, leave=True)

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        if note:
            self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(count)
        if time.monotonic() - self.told > 0.5 or self.done >= self.total:
            self.tell(note)

    def expect(self, total: list[int]) -> None:
        """Another total from here on, where the list holds one: the work was cut."""
        if total and total[0] != self.total:
            self.total = self.bar.total = total[0]

    def tell(self, note: str = "") -> None:
        self.told = time.monotonic()
        path = os.environ.get("EAGLE3NB_PROGRESS")
        if not path:
            return
        rate = self.done / max(self.told - self.started, 1e-9)
        left = (self.total - self.done) / rate if rate else None
        write_json(path, {"what": self.what, "done": self.done, "total": self.total, "unit": self.unit,
                          "rate": rate, "left_s": left, "note": note, "time": time.time()})


@contextmanager
def progress(total: int, what: str, unit: str):
    """`with progress(n, "extraction", "tokens") as bar: bar.advance(k)`."""
    bar = Bar(total, what, unit)
    try:
        yield bar
    finally:
        bar.bar.close()
