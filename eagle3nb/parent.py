"""A process that ends when the one that started it is gone."""

import os
import threading
import time


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
