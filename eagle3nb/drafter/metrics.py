"""Counting: hits, joint prefixes, the walk a server would take. Pure numpy; training selects by it, evaluation reports.

`hits` is bool [K, T]: hits[k, t] says that step k of the chain that starts at slot t drafted x[t+2+k] right, given that
all its earlier steps did (feeding the true tokens is then exact, DESIGN section 4). Slot t knows x[..t+1] and drafts
x[t+2], x[t+3], …
"""

from dataclasses import dataclass

import numpy as np


def chain_hits(predictions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Predicted target ids int [K, T] (−1 undefined) against the text's ids int [T] → hits bool [K, T].

    A step whose true token lies beyond the text is a miss: give the text K + 1 tokens more than the answer.
    """
    K, T = predictions.shape
    hits = np.zeros((K, T), dtype=bool)
    for k in range(min(K, T - 2)):
        hits[k, :T - 2 - k] = predictions[k, :T - 2 - k] == ids[2 + k:]
    return hits


def joint_prefix(hits: np.ndarray) -> np.ndarray:
    """bool [K, T]: every step up to k is a hit. Its sum over k is n(t), the number of leading hits."""
    return np.logical_and.accumulate(hits, axis=0)


@dataclass(frozen=True)
class Walk:
    """The verifies of one answer. τ = 1 + accepted / verifies; delivered / verifies is what the user gets a verify.

    `accepted` counts drafted tokens that run past the answer's end too, as the engines count; `delivered` does not.
    The prefill's own token, x[answer_start], belongs to no verify and is in neither.
    """

    verifies: int
    accepted: int
    delivered: int
    slots: np.ndarray      # int64 [verifies]: where each verify stood
    lengths: np.ndarray    # int64 [verifies]: tokens it accepted, 0..steps
    steps: int

    @property
    def per_position(self) -> np.ndarray:
        """int64 [steps]: verifies that accepted at least j + 1 drafted tokens."""
        return np.array([(self.lengths > j).sum() for j in range(self.steps)], dtype=np.int64)


def walk(hits: np.ndarray, answer_start: int, answer_end: int, steps: int) -> Walk:
    """Walk an answer x[answer_start:answer_end] of one turn as a server with `steps` drafted tokens does.

    The first verify stands at t = answer_start − 1 and accepts n(t); then t ← t + n(t) + 1, until the last one is out.
    Raises ValueError where steps exceeds hits' K or the answer lies outside the text.
    """
    K, T = hits.shape
    if not 1 <= steps <= K:
        raise ValueError(f"walk of {steps} steps over hits of {K}")
    if not 1 <= answer_start <= answer_end <= T:
        raise ValueError(f"answer [{answer_start}, {answer_end}) lies outside 1..{T}")
    n = joint_prefix(hits[:steps]).sum(axis=0)
    slots, lengths, t = [], [], answer_start - 1
    while t + 1 < answer_end - 1:          # x[t+1] is the last token that is out
        slots.append(t)
        lengths.append(int(n[t]))
        t += int(n[t]) + 1
    delivered = max(0, answer_end - 1 - answer_start)
    return Walk(len(slots), sum(lengths), delivered, np.array(slots, np.int64), np.array(lengths, np.int64), steps)


def acceptance_length(verifies: int, accepted: int) -> float:
    """τ; 1.0 without a verify, since a server then gives its one token a step."""
    return 1.0 + accepted / verifies if verifies else 1.0


def formulas(hits: np.ndarray, counted: np.ndarray) -> dict[str, float]:
    """What other tools print for the same hits bool [K, T] over counted slots bool [K, T]; none of them is τ.

    `product`: Σ_k Π_{i≤k} accuracy_i (SpecForge, TorchSpec: no +1). `one_plus_product`: 1 more (Model-Optimizer).
    `one_plus_joint`: 1 + Σ_k joint hits_k / counted_k (NeMo Automodel). They start a chain at every token, where a
    server starts one only after a rejection, and the product takes steps for independent.
    """
    valid = np.maximum(counted.sum(axis=1), 1)
    marginal = (hits & counted).sum(axis=1) / valid
    joint = (joint_prefix(hits) & counted).sum(axis=1) / valid
    product = float(np.cumprod(marginal).sum())
    return {"product": product, "one_plus_product": 1 + product, "one_plus_joint": 1 + float(joint.sum())}


class TeacherPrefix:
    """Acceptance against the teacher's argmax on text that may leave it, summed over documents: training's figure.

    A slot is at risk at step k if it counts there, hit at every earlier step, and the text followed the teacher's
    argmax at those steps; past a token where the text leaves the argmax the chain is unknown and the slot leaves the
    count (as in a survival curve). Then length = 1 + Σ_k Π_{j≤k} hits_j / at risk_j.
    """

    def __init__(self, K: int):
        self.at_risk = np.zeros(K, dtype=np.int64)
        self.hits = np.zeros(K, dtype=np.int64)

    def add(self, counted: np.ndarray, hits: np.ndarray, on_argmax: np.ndarray) -> None:
        """All bool [K, T]: slot counts at step k; the draft equals the teacher's argmax; the text's token equals it."""
        alive = np.ones(counted.shape[1], dtype=bool)
        for k in range(len(self.hits)):
            alive = alive & counted[k]
            self.at_risk[k] += alive.sum()
            self.hits[k] += (alive & hits[k]).sum()
            alive = alive & hits[k] & on_argmax[k]

    @property
    def conditional(self) -> np.ndarray:
        """float [K]: accuracy at step k of the slots that got there; 0 where none did."""
        return self.hits / np.maximum(self.at_risk, 1)

    @property
    def length(self) -> float:
        return 1.0 + float(np.cumprod(self.conditional).sum())
