"""Waiting so that a stop button ends it."""

import queue

LOOK = 0.5  # seconds: what a signal is late by, at most


def next_of(waiting: queue.Queue | queue.SimpleQueue):
    """The queue's next thing, waited for in pieces of LOOK.

    Python runs a signal's handler when its main thread comes back from what it waits in. A signal that comes in the
    moment before `get()` sleeps does not wake it, and an interrupt would wait for the next thing, which may be minutes
    away or never come.
    """
    while True:
        try:
            return waiting.get(timeout=LOOK)
        except queue.Empty:
            pass
