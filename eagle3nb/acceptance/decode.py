"""A real decode with drafts: what an engine does, in plain PyTorch, one sequence, a chain of drafted tokens.

Both models keep their keys and values. The target runs once over the prompt and once a verify, over the newest token
and the drafted ones. The drafter's cache holds step-0 keys of true features alone: a slot enters it when the target has
seen its token; the keys that a chain makes of its own outputs lie behind them and the next slots overwrite them.
The counts are an engine's: a drafted token that runs past the end of the answer and is right counts as accepted.

At a temperature the text is distributed as the target's own. Argmax drafts stay iff they equal the token that the
target's own sampling draws there, so the same seed gives the same text with and without drafts; sampled drafts stay by
rejection sampling (rejection.py).
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from eagle3nb.acceptance import rejection
from eagle3nb.errors import UserError
from eagle3nb.progress import progress
from eagle3nb.states import generation

NEAR_TIE = 0.01  # logits; batched and incremental forwards of one fp32 model were seen some 1e-4 apart
DRAFTS = ("argmax", "sampled")


@dataclass(frozen=True)
class Decode:
    """One decoded answer. A margin is the best logit less the second best: near 0, rounding chose; none if sampled."""

    ids: tuple[int, ...]  # up to and with the end-of-turn token, or the limit
    accepted: tuple[int, ...]  # a number a verify, uncapped
    margins: tuple[float, ...]  # of the target, a number a token of ids
    draft_margins: tuple[tuple[float, ...], ...]  # of the drafter, a tuple a verify
    prefill_s: float
    decode_s: float
    draft_s: float = 0.0  # of decode_s: the drafter, its catching up included
    verify_s: float = 0.0  # of decode_s: the target's forwards and the choice among their logits; the rest is the host


@dataclass(frozen=True)
class Chain:
    """What the drafter proposes, n tokens."""

    tokens: tuple[int, ...] = ()  # target ids
    indices: tuple[int, ...] = ()  # the same in D
    margins: tuple[float, ...] = ()  # greedy chains alone
    q: torch.Tensor | None = None  # float64 [n, D] that each was drawn from; sampled chains alone


class DraftCache:
    """Step-0 keys and values [Hkv, capacity, dh] of the slots 0..length−1. Slot t: token x[t+1], hidden fc(a[t])."""

    def __init__(self, model, capacity: int):
        c, weight = model.config, model.fc.weight
        self.model, self.length = model, 0
        self.keys, self.values = (weight.new_empty(c.kv_heads, capacity, c.head_dim) for _ in range(2))
        self.angles = [x[:, 0] for x in model.angles(torch.arange(capacity, device=weight.device))]  # [capacity, dh]

    def extend(self, tokens: torch.Tensor, aux: torch.Tensor) -> None:
        """New slots: their tokens [n] and the target's features [n, 3h]. Keeps the last slot's query, to draft from."""
        first, self.length = self.length, self.length + len(tokens)
        tokens, aux = (x.to(self.model.fc.weight.device) for x in (tokens, aux))
        g = self.model.fuse(aux)
        self.hidden, self.query = g[-1:], self._enter(tokens, g, first)

    def draft(self, steps: int, temperature: float = 0.0, uniforms=()) -> Chain:
        """A chain of `steps` tokens from the last slot: greedy, or at a temperature by as many uniform numbers."""
        model, q, g, slot = self.model, self.query, self.hidden, self.length - 1
        indices, margins, distributions = [], [], []
        for k in range(steps):
            if k:
                q = self._enter(model.to_target(indices[-1]), g, slot + k)  # step k's own key: index length − 1 + k
            h2 = model.block(g, self._attended(q, self.length + k))
            logits = model.logits(h2)  # [1, D]
            if temperature > 0:
                distributions.append(rejection.probabilities(logits, temperature))
                mass = distributions[-1].cumsum(-1)
                indices.append(torch.searchsorted(mass, uniforms[k] * mass[:, -1:], right=True)[:, 0])
            else:
                best = logits.topk(2)
                indices.append(best.indices[:, 0])
                margins.append(best.values[0, 0] - best.values[0, 1])
            g = model.next_hidden(h2)
        if not steps:
            return Chain()
        found = torch.cat(indices)  # to the host once a chain
        return Chain(tuple(model.to_target(found).tolist()), tuple(found.tolist()),
                     tuple(torch.stack(margins).tolist()) if margins else (),
                     torch.cat(distributions) if distributions else None)

    def _enter(self, tokens, hidden, first: int) -> torch.Tensor:
        """n slots from `first` on: their keys and values into the cache; the last one's query [1, Hq, dh]."""
        model, places = self.model, slice(first, first + len(tokens))
        cos, sin = (x[places, None] for x in self.angles)
        u = model.attention_input(model.embed(tokens), hidden)
        k, v = model.kv(u, (cos, sin))
        self.keys[:, places], self.values[:, places] = k.transpose(0, 1), v.transpose(0, 1)
        return model.q(u[-1:], (cos[-1:], sin[-1:]))

    def _attended(self, q, seen: int) -> torch.Tensor:
        """One query [1, Hq, dh] over the first `seen` keys → [1, Hq·dh]; a KV head's queries read its keys once."""
        block = q.view(len(self.keys), -1, q.shape[-1])  # [Hkv, G, dh]: no mask, all keys are earlier ones
        return scaled_dot_product_attention(block[None], self.keys[None, :, :seen],
                                            self.values[None, :, :seen]).reshape(1, -1)


@torch.inference_mode()
def decode(target, drafter, prompt, *, steps: int, max_new_tokens: int, stop_ids=None, temperature: float = 0.0,
           drafts: str = "argmax", seed: int = 0) -> Decode:
    """The target's answer to `prompt` (ids), decoded with chains of `steps` drafts; 0 is the target alone.

    Greedy at temperature 0, else sampled, with drafts "argmax" or "sampled"; the random numbers are the prompt's own by
    `seed`, the same as target.generate's. Stops as engines do: after a verify, at the first stop token or at the limit,
    whatever was accepted behind it. Raises UserError for settings that say nothing, and where text and drafts would
    pass the target's positions.
    """
    _check(target, drafter, prompt, steps, max_new_tokens, temperature, drafts)
    stops = set(target.facts.eos if stop_ids is None else stop_ids)
    random = generation.own_random(seed, prompt)
    q_temperature = temperature if drafts == "sampled" else 0.0
    began = time.perf_counter()
    aux, last, cache = target.forward(torch.tensor([list(prompt)]), None, max_new_tokens + steps)
    text, margins = choose(target.logits(last[-1:]), Chain(), temperature, random, drafter)
    fed = torch.tensor(list(prompt[1:]) + text)  # the tokens of the new slots: shifted by one
    slots = DraftCache(drafter, len(prompt) + max_new_tokens + steps) if steps else None
    chain, accepted, draft_margins, draft_s, verify_s = Chain(), [], [], 0.0, 0.0
    prefilled = now = time.perf_counter()
    while len(text) < max_new_tokens and not stops.intersection(text):
        if steps:
            slots.extend(fed, aux)
            chain = slots.draft(steps, q_temperature, random.random(steps) if q_temperature else ())
        drafted = time.perf_counter()
        aux, last, cache = target.forward(torch.tensor([[text[-1], *chain.tokens]]), cache)
        fresh, gaps = choose(target.logits(last), chain, temperature, random, drafter)
        draft_s, verify_s, now = draft_s + drafted - now, verify_s + time.perf_counter() - drafted, time.perf_counter()
        n = len(fresh) - 1
        text, margins = text + fresh, margins + gaps
        accepted.append(n)
        draft_margins.append(chain.margins)
        if n < steps:
            cache.crop(n - steps)  # a negative number removes: the rejected drafts' keys
        aux, fed = aux[:n + 1], torch.tensor(fresh)
    length = next((i + 1 for i, token in enumerate(text[:max_new_tokens]) if token in stops), max_new_tokens)
    return Decode(tuple(text[:length]), tuple(accepted), tuple(margins[:length]), tuple(draft_margins),
                  prefilled - began, time.perf_counter() - prefilled, draft_s, verify_s)


def _check(target, drafter, prompt, steps: int, max_new_tokens: int, temperature: float, drafts: str) -> None:
    if steps < 0 or max_new_tokens < 1 or not 0 <= temperature < np.inf:
        raise UserError(f"decode wants steps ≥ 0, max_new_tokens ≥ 1 and a temperature ≥ 0, not {steps}, "
                        f"{max_new_tokens} and {temperature}; correct them")
    if drafts not in DRAFTS:
        raise UserError(f"drafts is {drafts!r}; choose one of {', '.join(DRAFTS)}")
    if steps and drafter is None:
        raise UserError(f"{steps} drafted tokens need a drafter; give one, or steps 0 for the target alone")
    generation.check(target, [prompt], max_new_tokens + steps)


def choose(logits: torch.Tensor, chain: Chain, temperature: float, random, drafter) -> tuple[list[int], list[float]]:
    """The tokens that a verify gives (accepted drafts and one of the target's), and greedy ones' margins.

    logits [n + 1, V] behind the text and behind each drafted token.
    """
    if chain.q is not None:
        p = rejection.probabilities(logits, temperature).to(chain.q.device)
        return rejection.verify(p, chain.q, drafter.vocabulary_ids, chain.indices, random.random), []
    if temperature > 0:
        fresh = []
        for i, row in enumerate(logits):  # a number a token of the text, whatever was drafted
            fresh.append(generation.sample(row, temperature, 1.0, random.random()))
            if i == len(chain.tokens) or fresh[-1] != chain.tokens[i]:
                return fresh, []
    best = logits.topk(2)
    greedy, margins = best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
    n = next((i for i, token in enumerate(chain.tokens) if token != greedy[i]), len(chain.tokens))
    return greedy[:n + 1], margins[:n + 1]


def difference(answer, decoded: Decode, walked) -> dict:
    """A row that compares a real decode with the answer's text and the walk's counts, verify by verify.

    `walked`: accepted counts of the walk, one a verify. Where they differ, `where` says the first place and `margin`
    the margin there: under NEAR_TIE it was a tie that two orders of the same sums broke differently. It still counts
    as unequal.
    """
    walked, where, margin = tuple(int(n) for n in walked), "", None
    same_text, same_counts = decoded.ids == answer.ids, decoded.accepted == walked
    if not same_text:
        i = first_difference(decoded.ids, answer.ids)
        where, margin = f"answer token {i}", decoded.margins[min(i, len(decoded.margins) - 1)]
    elif not same_counts:
        j = first_difference(decoded.accepted, walked)
        where = f"verify {j}"
        if j < min(len(decoded.accepted), len(walked)):
            margin = decoded.draft_margins[j][min(decoded.accepted[j], walked[j])]
    return {"id": answer.id, "source": answer.source, "verifies": len(decoded.accepted),
            "accepted": sum(decoded.accepted), "delivered": max(len(decoded.ids) - 1, 0),
            "walk_verifies": len(walked), "walk_accepted": sum(walked), "same_text": same_text,
            "same_counts": same_counts, "equal": same_text and same_counts, "where": where, "margin": margin}


def first_difference(a: tuple, b: tuple) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def decode_all(target, drafter, answers, steps: int, max_new_tokens: int) -> list[Decode]:
    """A real decode of each answer's prompt, one after another."""
    decodes = []
    with progress(len(answers), "decode", "prompts") as bar:
        for answer in answers:
            decodes.append(decode(target, drafter, answer.prompt, steps=steps, max_new_tokens=max_new_tokens))
            bar.advance(1, f"{len(decodes[-1].ids)} tokens in {len(decodes[-1].accepted)} verifies")
    return decodes


def decode_by_steps(target, drafter, answers, steps: list[int], max_new_tokens: int,
                    seconds: float = float("inf")) -> dict[int, list[Decode]]:
    """Decodes of the same prompts with each number of steps, 0 for the target alone, to compare their speed.

    Prompt by prompt, each number in turn, so that a slow moment of the machine falls on all; ends with the prompt at
    which `seconds` are over.
    """
    runs, began = {number: [] for number in steps}, time.perf_counter()
    with progress(len(answers), "decode by steps", "prompts") as bar:
        for answer in answers:
            for number, decodes in runs.items():
                decodes.append(decode(target, drafter, answer.prompt, steps=number, max_new_tokens=max_new_tokens))
            bar.advance(1)
            if time.perf_counter() - began > seconds:
                bar.expect([bar.done])
                break
    return runs


def compare(chains, decodes: list[Decode], steps: int) -> list[dict]:
    """`difference` of each decode and its chains' walk."""
    return [difference(c.answer, d, c.walk(steps).lengths) for c, d in zip(chains, decodes, strict=True)]


def summary(rows: list[dict]) -> dict:
    """One row over all prompts that were compared."""
    sums = ("verifies", "accepted", "delivered", "walk_verifies", "walk_accepted", "same_text", "same_counts", "equal")
    return {"prompts": len(rows), **{name: sum(int(row[name]) for row in rows) for name in sums}}


def verdict(rows: list[dict]) -> str:
    """One sentence. Raises UserError where the two differ and no near tie explains it: one of them counts wrong."""
    if not rows:
        return "not compared with a real decode"
    for row in rows:
        if not row["equal"] and (row["margin"] is None or row["margin"] > NEAR_TIE):
            raise UserError(f"prompt {row['id']}: walk and real decode differ at {row['where']} (margin "
                            f"{row['margin']}), which no rounding explains; do not trust the figures, report it")
    equal = sum(row["equal"] for row in rows)
    if equal == len(rows):
        return f"a real decode of {equal} prompts gave the same text and counts, verify by verify"
    return f"a real decode equals the walk on {equal} of {len(rows)} prompts; {len(rows) - equal} parted at a near tie"
