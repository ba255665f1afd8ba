"""What rules find in one batch of rows: counts, and the first few places of each, cheap to send between processes."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

EXAMPLES = 5  # kept of each rule


@dataclass
class Hits:
    """counts: rows by rule. examples: rule → [(row, at or None, detail)], the first few by row."""

    counts: Counter = field(default_factory=Counter)
    examples: dict = field(default_factory=lambda: defaultdict(list))

    def add(self, rule: str, rows, at=None, detail: Callable[[int, int | None], str] = lambda row, at: "") -> None:
        """More rows under `rule`: rows int[K] ascending, each once; at int[K], the position in the row, or None.

        `detail(row, at)` says in a few words what is wrong there; it is called for the rows that are kept as examples.
        """
        rows = np.asarray(rows)
        if not len(rows):
            return
        self.counts[rule] += len(rows)
        for i in range(min(len(rows), EXAMPLES - len(self.examples[rule]))):
            place = None if at is None else int(at[i])
            self.examples[rule].append((int(rows[i]), place, detail(int(rows[i]), place)))


def first_by_row(positions: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64[K], at int64[K]) of the first of the flat `positions` (ascending) that lies in each row."""
    rows = np.searchsorted(starts, positions, side="right") - 1
    rows, first = np.unique(rows, return_index=True)
    return rows, positions[first] - starts[rows]
