"""Acceptance on answers sampled from the target at a temperature, exactly what a server with a sampled decode expects.

Argmax drafts (vLLM's default, SGLang's on CUDA) are accepted iff they are the token that was sampled: the plain walk.
Sampled drafts go through rejection sampling: y ~ q is accepted with min(1, p(y) / q(y)), else a token is drawn from
max(p − q, 0). So a token x comes out as an accepted draft with probability min(p(x), q(x)) and comes out at all with
p(x): given the answer's text, a draft for x was accepted with probability min(1, q(x) / p(x)), whatever happened
elsewhere in it. That makes the walk a chain over the answer's slots whose expectation is a sum, not a simulation: no
draws, so the interval over prompts has no noise of the walk's own.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from eagle3nb.acceptance import benchmarks, offline
from eagle3nb.drafter import metrics, ttt
from eagle3nb.errors import UserError

DRAFTS = ("argmax", "sampled")
ROWS = 256  # rows of logits at a time: 4 · ROWS · V bytes


@dataclass(frozen=True)
class Chances:
    """The drafter's chains over one sampled answer: n slots where a verify may stand, from answer.start − 1 on.

    Trees would enter here as in offline.Chains: several candidates a step, each with its chance.
    """

    answer: object  # benchmarks.Answer
    drafted: np.ndarray  # int32 [K, n]: argmax drafts
    argmax: np.ndarray   # bool [K, n]: the argmax draft is the text's token
    sampled: np.ndarray  # float64 [K, n]: chance that a sampled draft was accepted, given that its earlier ones were

    def walk(self, steps: int, drafts: str) -> "Expected":
        if drafts not in DRAFTS:
            raise UserError(f"drafts is {drafts!r}; choose one of {', '.join(DRAFTS)}")
        return expected(getattr(self, drafts), steps)


@dataclass(frozen=True)
class Expected:
    """Expected counts of one answer's walk. τ = 1 + accepted / verifies, of sums over prompts."""

    verifies: float
    accepted: float
    delivered: int
    per_position: np.ndarray  # float64 [steps]: verifies that accept at least j + 1 drafted tokens


def expected(chances: np.ndarray, steps: int) -> Expected:
    """The expected walk over an answer of n + 1 tokens; chances [K, n] as in Chances (of 0 and 1: the walk itself).

    A verify at slot i accepts j drafts with the chance of exactly j leading ones, and the next stands at i + j + 1.
    Raises ValueError where steps exceeds K.
    """
    K, n = chances.shape
    if not 1 <= steps <= K:
        raise ValueError(f"walk of {steps} steps over chances of {K}")
    joint = np.cumprod(chances[:steps].astype(np.float64), axis=0)                # [steps, n] at least j + 1 accepted
    exactly = -np.diff(joint, axis=0, prepend=1.0, append=0.0)                    # [steps + 1, n]
    stands = np.zeros(n + steps + 1)                                              # chance that a verify stands there
    stands[0] = 1.0
    for i in range(n):
        stands[i + 1:i + steps + 2] += stands[i] * exactly[:, i]
    per_position = joint @ stands[:n]
    return Expected(float(stands[:n].sum()), float(per_position.sum()), n, per_position)


def answers(target, prompts, *, temperature: float, seed: int, max_new_tokens: int, beyond: int, cache_dir,
            stop_ids=None, batch: int = 16) -> list:
    """Answers sampled from the target (top_p 1), in the order of the rendered prompts; kept in `cache_dir` by content.

    What lies beyond an answer's end is sampled as well, since a server would have sampled it. Raises UserError where
    the temperature is not above 0.
    """
    if not temperature > 0:
        raise UserError(f"temperature is {temperature}; sampled answers want one above 0 (greedy ones: benchmarks)")
    return benchmarks.answers(target, prompts, max_new_tokens=max_new_tokens, beyond=beyond, cache_dir=cache_dir,
                              stop_ids=stop_ids, batch=batch, generate=_sampling(target, temperature, seed),
                              made={"temperature": float(temperature), "seed": seed})


def _sampling(target, temperature: float, seed: int):
    """`generate` of benchmarks.answers, sampled: the target's own decodes greedily past an end. Some batches at a time,
    so that a run that dies keeps what it has."""
    def generate(prompts, *, max_new_tokens, stop_ids, beyond, batch, done):
        settings = {"temperature": temperature, "seed": seed, "batch": batch}
        for first in range(0, len(prompts), 4 * batch):
            part = prompts[first:first + 4 * batch]
            ids = target.generate(part, max_new_tokens=max_new_tokens, stop_ids=stop_ids, **settings)
            part = [prompt + answer for prompt, answer in zip(part, ids, strict=True)]
            more = target.generate(part, max_new_tokens=beyond, **settings)
            for i, (answer, rest) in enumerate(zip(ids, more, strict=True)):
                done(first + i, answer + rest)
    return generate


def chances(target, drafter, taken, steps_max: int, *, temperature: float, batch_tokens: int = 4096) -> list[Chances]:
    """Chances of `steps_max` drafts at every slot where a verify may stand, in the order of `taken`; the answers were
    sampled at this temperature, and drafts are sampled at it too.

    Memory: ROWS rows of logits at a time. Raises ValueError where an answer was not taken steps_max tokens beyond its
    end.
    """
    found = [None] * len(taken)
    for group, aux, last in offline.captured(target, taken, steps_max, batch_tokens):
        batch = [taken[i] for i in group]
        ids, starts, slots = offline.packed(batch)
        device = drafter.fc.weight.device
        text = torch.from_numpy(ids).to(device)
        judged = np.unique(slots[:, None] + 2 + np.arange(steps_max))
        p = text_log_probabilities(target, torch.cat(list(last)), ids, judged, temperature).to(device)
        drafted = np.full((steps_max, len(ids)), -1, dtype=np.int32)
        chance = np.zeros((steps_max, len(ids)))
        for k, (at, h2) in enumerate(ttt.chain_states(drafter, ids, torch.cat(list(aux)), steps_max, slots, starts)):
            best, q = draft_log_probabilities(drafter, h2, text[at + 2 + k], temperature)
            where = at.cpu().numpy()
            drafted[k, where] = best.cpu().numpy()
            chance[k, where] = (q - p[at + 2 + k]).clamp(max=0).double().exp().cpu().numpy()
        for i, begin in zip(group, np.unique(starts), strict=True):
            found[i] = _chances(taken[i], drafted, chance, int(begin))
    return found


def _chances(answer, drafted: np.ndarray, chance: np.ndarray, begin: int) -> Chances:
    """The answer that begins at slot `begin` of the packed drafts [K, T]."""
    text, slots = slice(begin, begin + len(answer.sequence)), offline.answer_slots(answer)
    hits = metrics.chain_hits(drafted[:, text], answer.sequence)
    return Chances(answer, drafted[:, text][:, slots].copy(), hits[:, slots].copy(), chance[:, text][:, slots].copy())


@torch.no_grad()
def text_log_probabilities(target, last: torch.Tensor, ids: np.ndarray, places: np.ndarray,
                           temperature: float) -> torch.Tensor:
    """float32 [T]: log p of the packed tokens at `places` (none of them a text's first), by the target's last hidden
    states [T, h]; 0 elsewhere."""
    found, ids = torch.zeros(len(ids), device=last.device), torch.from_numpy(ids)
    for at in torch.from_numpy(places).split(ROWS):
        logits = target.logits(last[(at - 1).to(last.device)]).float() / temperature
        found[at.to(last.device)] = _log_softmax_at(logits, ids[at].to(logits.device)).to(last.device)
    return found


@torch.no_grad()
def draft_log_probabilities(drafter, h2: torch.Tensor, wanted: torch.Tensor, temperature: float):
    """(argmax draft, target ids int64 [N]; log q of the target ids `wanted` [N], −∞ outside the draft vocabulary)."""
    to_draft = torch.cumsum(drafter.t2d, 0) - 1
    best, found = [], []
    for rows, ids in zip(h2.split(ROWS), wanted.split(ROWS), strict=True):
        logits = drafter.logits(rows).float()
        best.append(drafter.to_target(logits.argmax(-1)))
        q = _log_softmax_at(logits / temperature, to_draft[ids].clamp(min=0))
        found.append(q.masked_fill(~drafter.t2d[ids], float("-inf")))
    return (torch.cat(best), torch.cat(found)) if best else (wanted, wanted.float())


def _log_softmax_at(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N, V] at one index a row, [N]."""
    return logits.gather(1, index[:, None])[:, 0] - logits.logsumexp(-1)


def counts(found: list[Chances], steps: list[int], drafts: str) -> pd.DataFrame:
    """Rows as of offline.counts, so that offline.acceptance makes rows and intervals of them; counts are expected ones.

    drafts: "argmax" or "sampled".
    """
    return pd.DataFrame([offline.tally(chain.answer, number, chain.walk(number, drafts))
                         for chain in found for number in steps])
