"""What the parts of a round cost on this machine: the verify by width, a drafted token, the drafter's catching up.

Every part is timed once a round of measurements, all parts in turn, so that a slow moment of the machine falls on all
of them; a row is the median of its repetitions. One sequence: the same functions that the decode runs. Several at once:
the same passes over a cache with a row for each, every row at a place of its own, as a batching server runs them.
"""

import time
from collections import defaultdict
from copy import deepcopy

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from eagle3nb.acceptance.decode import Chain, DraftCache, choose, decode
from eagle3nb.acceptance.speed import Costs
from eagle3nb.errors import UserError
from eagle3nb.states.generation import ChainCache, SlotCache

START = 16  # tokens of the prompt on which the host's part of a round is measured
TEXT = 8  # and tokens decoded there
STEADY = 0.15  # drafts pay or not by that much


@torch.inference_mode()
def costs(target, drafter, widths=range(1, 9), contexts=(128, 512), repeats: int = 20,
          seconds: float = 60.0, batches=(1,)) -> list[dict]:
    """Rows {what, batch, width, context, seconds, low, high, repeats}: medians and quartiles.

    `what` is "verify" (the target's pass over `width` tokens behind `context`, its lm_head and the choice), "draft"
    (one token; its width is 1), "catch_up" (the drafter over `width` tokens that the target has seen) or "overhead" (of
    a round, what is neither; width and context are 0; of one sequence alone). With a `batch` of several sequences, so
    many tokens of each, in one pass. Ends after `repeats`, or when `seconds` are over; each part is measured once at
    least. What the tokens are does not matter, so they are any. Raises UserError where a context with the widest verify
    passes the target's positions.
    """
    widths, batches = sorted(set(widths)), sorted(set(batches))
    if not widths or widths[0] < 1 or min(contexts, default=0) < 1 or repeats < 1 or min(batches, default=0) < 1:
        raise UserError("costs wants widths, contexts, batches and repeats of 1 and more; correct them")
    if max(contexts) + widths[-1] > target.facts.max_positions:
        raise UserError(f"context {max(contexts)} and {widths[-1]} tokens pass the target's "
                        f"{target.facts.max_positions} positions; measure shorter contexts")
    began, steps = time.perf_counter(), max(widths[-1] - 1, 1)
    parts = {("overhead", 1, 0, 0): lambda: _host(target, drafter, steps)} if 1 in batches else {}
    for context in contexts:
        parts |= _parts(target, drafter, widths, context, steps, batches)
    samples = defaultdict(list)
    for _ in range(repeats):
        for name, measure in parts.items():
            samples[name].append(measure())
        if time.perf_counter() - began > seconds:
            break
    return [{"what": what, "batch": batch, "width": width, "context": context, "seconds": float(np.median(found)),
             "low": float(np.quantile(found, 0.25)), "high": float(np.quantile(found, 0.75)), "repeats": len(found)}
            for (what, batch, width, context), found in samples.items()]


def _parts(target, drafter, widths: list[int], context: int, steps: int, batches=(1,)) -> dict:
    """(what, batch, width, context) → a function that does it once, leaves the caches as they were; its seconds."""
    ids = torch.arange(context + widths[-1]) % target.facts.vocab
    aux, _, cache = target.forward(ids[None, :context], None, widths[-1])
    slots = DraftCache(drafter, context + widths[-1] + steps)
    slots.extend(ids[1:context + 1], aux)
    parts = {}
    for batch in batches:
        pair = (cache, slots) if batch == 1 else (TargetRows(target, [cache] * batch), DraftRows([slots] * batch))
        parts |= _timed(target, drafter, widths, steps, batch, ids[:context + widths[-1]], aux[-1:], *pair)
    return parts


def _timed(target, drafter, widths, steps: int, batch: int, ids, aux, cache, slots) -> dict:
    """_parts of one batch: ids [context + widest], the last token's aux [1, 3h], the caches of target and drafter."""
    context, chains = len(ids) - widths[-1], {w: Chain((int(drafter.vocabulary_ids[0]),) * (w - 1)) for w in widths}

    def verify(width: int) -> float:
        start = time.perf_counter()
        if batch == 1:
            _, last, _ = target.forward(ids[None, context:context + width], cache)
            last = last[None]
        else:
            _, last = cache.forward(ids[context:context + width].expand(batch, -1))
        for logits in target.logits(last):  # [width, V] of a sequence
            choose(logits, chains[width], 0.0, None, drafter)
        taken = time.perf_counter() - start
        cache.crop(-width)
        return taken

    def draft() -> float:
        start = time.perf_counter()
        slots.draft(steps)
        return (time.perf_counter() - start) / steps

    def catch_up(width: int) -> float:
        before = slots.length, slots.query, slots.hidden
        tokens, fresh = ids[context:context + width], aux.expand(width, -1)
        if batch > 1:
            tokens, fresh = tokens.expand(batch, -1), fresh.expand(batch, -1, -1)
        start = time.perf_counter()
        slots.extend(tokens, fresh)
        if slots.keys.is_cuda:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        slots.length, slots.query, slots.hidden = before
        return taken

    parts = {("draft", batch, 1, context): draft}
    for width in widths:
        parts["verify", batch, width, context] = lambda width=width: verify(width)
        parts["catch_up", batch, width, context] = lambda width=width: catch_up(width)
    return parts


class TargetRows:
    """The target over B sequences at once, each behind its own `length` (int64 [B], on the CPU) of tokens.

    Made of a cache a sequence, as target.forward returns them. Windows and the like, which Transformers' own cache
    knows, need sequences of one length: there, no row is padded.
    """

    def __init__(self, target, caches: list):
        self.target, self.plain = target, isinstance(caches[0], ChainCache)
        if self.plain:
            self.length = torch.tensor([cache.length for cache in caches])
            self.cache = SlotCache(len(caches), caches[0].width)
            for layer, pair in caches[0].buffers.items():
                self.cache.buffers[layer] = [_stacked([cache.buffers[layer][i] for cache in caches], self.length)
                                             for i in range(len(pair))]
        else:
            self.cache = deepcopy(caches[0])
            for i, layer in enumerate(self.cache.layers):
                layer.keys, layer.values = (torch.cat([getattr(cache.layers[i], name) for cache in caches])
                                            for name in ("keys", "values"))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of each sequence [B, n] → aux [B, n, 3h], last [B, n, h]."""
        target, where = self.target, {}
        if self.plain:
            places, mask = _causal(self.length, ids.shape[1])
            self.cache.aim(slice(0, len(ids)), places.to(target.device), mask.shape[-1])
            where = {"attention_mask": mask.to(target.device), "position_ids": self.cache.places}
            self.length = self.length + ids.shape[1]
        out = target.body(input_ids=ids.to(target.device), past_key_values=self.cache, use_cache=True, **where)
        return target.aux(), out.last_hidden_state

    def crop(self, length: int) -> None:
        """A negative number removes as many tokens of each sequence."""
        if self.plain:
            self.length = self.length + length
        else:
            self.cache.crop(length)


class DraftRows:
    """decode.DraftCache for B sequences at once: keys and values [B, Hkv, capacity, dh], a `length` each (int64 [B], on
    the CPU). Made of a cache a sequence; chains are greedy."""

    def __init__(self, caches: list[DraftCache]):
        self.model, self.angles = caches[0].model, caches[0].angles
        self.length = torch.tensor([cache.length for cache in caches])
        self.keys, self.values = (_stacked([getattr(cache, name) for cache in caches], self.length)
                                  for name in ("keys", "values"))
        self.query = torch.cat([cache.query for cache in caches])  # [B, Hq, dh]
        self.hidden = torch.cat([cache.hidden for cache in caches])  # [B, h]

    def extend(self, tokens: torch.Tensor, aux: torch.Tensor) -> None:
        """n new slots of each sequence: their tokens [B, n] and the target's features [B, n, 3h]."""
        tokens, aux = (x.to(self.keys.device) for x in (tokens, aux))
        g, (places, _) = self.model.fuse(aux.flatten(0, 1)), _causal(self.length, tokens.shape[1])
        self.hidden, self.query = g.view(*tokens.shape, -1)[:, -1], self._enter(tokens.flatten(), g, places)
        self.length = self.length + tokens.shape[1]

    def draft(self, steps: int) -> list[list[int]]:
        """A chain of `steps` target ids for each sequence, from its last slot."""
        model, q, g, tokens = self.model, self.query, self.hidden, []
        for k in range(steps):
            places, mask = _causal(self.length - 1 + k, 1)
            if k:
                q = self._enter(tokens[-1], g, places)
            h2 = model.block(g, self._attended(q, mask.to(q.device)))
            tokens.append(model.to_target(model.logits(h2).argmax(-1)))
            g = model.next_hidden(h2)
        return torch.stack(tokens, 1).tolist()  # to the host once a chain

    def _enter(self, tokens, hidden, places: torch.Tensor) -> torch.Tensor:
        """B·n slots, sequence by sequence, at places [B, n]: keys and values into the cache; the last ones' queries."""
        model, (rows, n), places = self.model, places.shape, places.to(self.keys.device)
        cos, sin = (x[places.flatten(), None] for x in self.angles)  # [B·n, 1, dh]
        u = model.attention_input(model.embed(tokens), hidden)
        at = torch.arange(rows, device=places.device)[:, None]
        for buffer, fresh in zip((self.keys, self.values), model.kv(u, (cos, sin)), strict=True):
            buffer[at, :, places] = fresh.view(rows, n, *fresh.shape[1:])  # [B, n, Hkv, dh]
        last = slice(n - 1, None, n)
        return model.q(u[last], (cos[last], sin[last]))

    def _attended(self, q, mask) -> torch.Tensor:
        """A query a sequence [B, Hq, dh] over the keys that mask [B, 1, 1, seen] allows → [B, Hq·dh]."""
        keys, values = (x[:, :, :mask.shape[-1]] for x in (self.keys, self.values))
        block = q.view(len(q), keys.shape[1], -1, q.shape[-1])  # [B, Hkv, G, dh]: a KV head's keys are read once
        return scaled_dot_product_attention(block, keys, values, attn_mask=mask).flatten(1)


def _stacked(parts: list[torch.Tensor], lengths) -> torch.Tensor:
    """[(1,) Hkv, width, dh] each → [B, Hkv, width, dh]; zeros behind a length, since a masked NaN is a NaN still."""
    out = parts[0].new_zeros(len(parts), *parts[0].shape[-3:])
    for row, part, length in zip(out, parts, lengths.tolist(), strict=True):
        row[:, :length] = part[..., :length, :]
    return out


def _causal(lengths: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places [B, n] of the next n tokens behind `lengths` [B], and what each may look at, bool [B, 1, n, seen]."""
    places = lengths[:, None] + torch.arange(n)
    return places, (torch.arange(int(lengths.max()) + n) <= places[..., None])[:, None]


def _host(target, drafter, steps: int) -> float:
    """Seconds a round outside of both models, in a real decode."""
    found = decode(target, drafter, list(range(START)), steps=steps, max_new_tokens=TEXT, stop_ids=())
    return (found.decode_s - found.draft_s - found.verify_s) / len(found.accepted)


def at(rows: list[dict], context: float, column: str = "seconds") -> Costs:
    """The speed model's costs of every batch measured, at a context length: on the line between the nearest measured
    contexts, and those of the shortest or longest beyond them.

    `column` "low", the lower quartile, is nearer to the machine's own speed where others work on it at the same time.
    A row without a batch, as older records have them, is of one sequence. The host's part of several sequences is not
    measured, since no decode here runs them, and left out.
    """
    points = defaultdict(list)
    for row in rows:
        points[row["what"], row.get("batch", 1), row["width"]].append((row["context"], row[column]))
    seconds = defaultdict(dict)  # what → (batch, width) → seconds
    for (what, batch, width), found in sorted(points.items()):
        seconds[what][batch, width] = float(np.interp(context, *zip(*sorted(found), strict=True)))
    by_batch = {what: {batch: s for (batch, _), s in seconds[what].items()} for what in ("draft", "overhead")}
    return Costs(seconds["verify"], by_batch["draft"], seconds["catch_up"], by_batch["overhead"])


def steadiness(rows: list[dict]) -> str:
    """One sentence on how far the verify's timings can be trusted: the width of their middle half, at the worst part.

    On a busy machine one width meets a slow moment more often than another, and the best number of steps is by chance.
    """
    worst = max((row["high"] - row["low"]) / row["seconds"] for row in rows if row["what"] == "verify")
    if worst <= STEADY:
        return f"the middle half of a verify's timings lies within {worst:.0%} of their median"
    return (f"the middle half of a verify's timings spreads over {worst:.0%} of their median: the machine was busy, "
            "and the best number of steps may be by chance; measure again when it is not")


def mean_context(answers) -> float:
    """Tokens that a verify of these answers (benchmarks.Answer) has before it, on average over their tokens."""
    tokens = np.array([len(a.ids) for a in answers])
    return float(((np.array([a.start for a in answers]) + tokens / 2) * tokens).sum() / tokens.sum())
