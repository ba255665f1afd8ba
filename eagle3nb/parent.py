"""Processes of our own: how they find this package, and that they end when the one that started them is gone."""

import os
import threading
import time
from pathlib import Path


def die_with_parent() -> None:
    """Ends this process when its parent has ended, however that did: a killed kernel leaves nothing running behind.

    Watched by a thread rather than PR_SET_PDEATHSIG, which fires when the parent's *thread* ends. The parent is told by
    EAGLE3NB_PARENT where that is set, since it may be gone before this is called.
    """
    parent = int(os.environ.get("EAGLE3NB_PARENT", os.getppid()))

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def environment(**more: str) -> dict[str, str]:
    """For `python -m eagle3nb…` beside us: this very package, and whatever else is on PYTHONPATH."""
    package = str(Path(__file__).resolve().parents[1])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
