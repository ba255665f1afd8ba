"""Training on states that are made while it runs: which rows are kept, and in which order the others are read."""

from contextlib import contextmanager

import numpy as np

from eagle3nb.drafter.fitting import SCALED, SLOTS
from eagle3nb.drafter.packing import Plan
from eagle3nb.drafter.settings import Settings
from eagle3nb.states.store import Store
from eagle3nb.states.stream import streams
from eagle3nb.states.streamed import Stream


@contextmanager
def opened_states(settings: Settings):
    """Yields the Store that stage 3 has made, or the Stream that it has begun. UserError where there is neither."""
    if streams(settings.states):
        with Stream.open(settings.states, settings.corpus, settings.target) as stream:
            yield stream
    else:
        yield Store.open(settings.states, "first" if settings.verify_states == "all" else settings.verify_states)


def announce(stream: Stream, settings: Settings, plan: Plan, rows: np.ndarray, held_out: np.ndarray, step: int,
             stop) -> None:
    """Start the stream for a training that begins at optimiser step `step` of its plan."""
    kept = np.concatenate([rows[:read_at_the_start(stream, settings, rows)], held_out])
    streamed = np.ones(len(stream), bool)
    streamed[kept] = False
    steps = [order[streamed[order]] for order in map(np.concatenate, plan.steps)]
    at = sum(map(len, steps[:step]))
    stream.start(kept, np.concatenate(steps), at, stop)


def read_at_the_start(stream: Stream, settings: Settings, rows: np.ndarray) -> int:
    """How many of the first training rows the column scales and the fitted start read, at most: they read rows in order
    until they have enough tokens (each row's first left out), or teacher positions (the first two left out)."""
    enough = (stream.lengths[rows] - 1).cumsum() >= SCALED
    if settings.initialise in ("fitted", "target"):
        enough &= np.maximum(stream.teacher[rows] - 2, 0).cumsum() >= SLOTS
    return int(np.argmax(enough)) + 1 if enough.any() else len(rows)
