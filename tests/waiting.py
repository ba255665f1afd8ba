"""Waiting for another process, on a machine that may stand still for half a minute: patience costs only what it needs.

`import waiting`, in the tests' own processes and in those that they start with tests/ on their path.
"""

import time

import psutil

PATIENCE = 300.0  # seconds; below the limit of a test (pyproject.toml), so that it is said what was waited for in vain


def until(condition, seconds: float = PATIENCE, pause: float = 0.01):
    """What condition() gives, once that is true; an AssertionError if it stays false."""
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() > end  # before the condition: however long this stood still, it is asked once more
        if value := condition():
            return value
        assert not late, f"waited {seconds:.0f} s in vain"
        time.sleep(pause)


def ended(pid: int) -> bool:
    """Whether the process is no more, or only waits for its parent to ask after it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # which it may become between two looks at it
        return True


def gone(pid: int, seconds: float = PATIENCE) -> bool:
    """Whether the process ends within that time."""
    try:
        return until(lambda: ended(pid), seconds, 0.05)
    except AssertionError:
        return False
