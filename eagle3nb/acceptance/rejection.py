"""Speculative sampling: which drafted tokens stay, so that the text is distributed as the target's own.

Pure: probabilities and uniform numbers in, tokens out. Leviathan et al. (arXiv 2211.17192, theorem 1 and appendix A.1)
and Chen et al. (arXiv 2302.01318, algorithm 2). p is the target's distribution over V, q the drafter's over D ⊂ V; a
token outside D has q = 0: it cannot be drafted, and comes through the residual alone.

Shapes: n drafted tokens, V target vocabulary, D draft vocabulary; `ids` int64 [D] are the target ids of D, ascending.
Probabilities are float64: the residual is a difference, and what rounding leaves of it must not be drawn.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, float64."""
    return (logits.double() / temperature).softmax(-1)


def acceptance(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """[D]: the probability min(1, p/q) that a drafted token stays; 1 where q is 0, which is never drafted."""
    return (p[ids] / q).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1)


def residual(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """[V]: the distribution max(p − q, 0), normalised, of the token that replaces a rejected one.

    Where p equals q nothing is left and nothing is rejected but by rounding: then p itself.
    """
    left = p.index_add(0, ids, q, alpha=-1).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def quantile(p: Tensor, u: float) -> int:
    """The token at quantile u in [0, 1) of p, in the vocabulary's order; never one of probability 0."""
    mass = p.cumsum(-1)
    return int(torch.searchsorted(mass, u * mass[-1], right=True))


def verify(p: Tensor, q: Tensor, ids: Tensor, drafted: list[int], uniform: Callable[[], float]) -> list[int]:
    """The tokens that one verify gives, 1 to n + 1: the drafted ones that stay and one of the target's behind them.

    p [n + 1, V] behind the text and behind each drafted token; q [n, D] that each was drawn from; `drafted` indices
    into D; `uniform()` a new number in [0, 1) at each call. The first rejected token ends the chain: the residual's
    token takes its place. Where all stay, the last one is drawn from p[n].
    """
    kept = []
    for i, x in enumerate(drafted):
        if uniform() >= acceptance(p[i], q[i], ids)[x]:
            return [*kept, quantile(residual(p[i], q[i], ids), uniform())]
        kept.append(int(ids[x]))
    return [*kept, quantile(p[len(drafted)], uniform())]
