"""What the parts of a round cost on this machine: the verify by width, a drafted token, the drafter's catching up.

Every part is timed once a round of measurements, all parts in turn, so that a slow moment of the machine falls on all
of them; a row is the median of its repetitions. One sequence at a time, the same functions that the decode runs.
"""

import time
from collections import defaultdict

import numpy as np
import torch

from eagle3nb.acceptance.decode import Chain, DraftCache, choose, decode
from eagle3nb.acceptance.speed import Costs
from eagle3nb.errors import UserError

START = 16  # tokens of the prompt on which the host's part of a round is measured
TEXT = 8  # and tokens decoded there
STEADY = 0.15  # drafts pay or not by that much


@torch.inference_mode()
def costs(target, drafter, widths=range(1, 9), contexts=(128, 512), repeats: int = 20,
          seconds: float = 60.0) -> list[dict]:
    """Rows {what, width, context, seconds, low, high, repeats}: medians and quartiles.

    `what` is "verify" (the target's pass over `width` tokens behind `context`, its lm_head and the choice), "draft"
    (one token; its width is 1), "catch_up" (the drafter over `width` tokens that the target has seen) or "overhead" (of
    a round, what is neither; width and context are 0). Ends after `repeats`, or when `seconds` are over; each part is
    measured once at least. What the tokens are does not matter, so they are any. Raises UserError where a context with
    the widest verify passes the target's positions.
    """
    widths = sorted(set(widths))
    if not widths or widths[0] < 1 or min(contexts, default=0) < 1 or repeats < 1:
        raise UserError("costs wants widths, contexts and repeats of 1 and more; correct them")
    if max(contexts) + widths[-1] > target.facts.max_positions:
        raise UserError(f"context {max(contexts)} and {widths[-1]} tokens pass the target's "
                        f"{target.facts.max_positions} positions; measure shorter contexts")
    began, steps = time.perf_counter(), max(widths[-1] - 1, 1)
    parts = {("overhead", 0, 0): lambda: _host(target, drafter, steps)}
    for context in contexts:
        parts |= _parts(target, drafter, widths, context, steps)
    samples = defaultdict(list)
    for _ in range(repeats):
        for name, measure in parts.items():
            samples[name].append(measure())
        if time.perf_counter() - began > seconds:
            break
    return [{"what": what, "width": width, "context": context, "seconds": float(np.median(found)),
             "low": float(np.quantile(found, 0.25)), "high": float(np.quantile(found, 0.75)), "repeats": len(found)}
            for (what, width, context), found in samples.items()]


def _parts(target, drafter, widths: list[int], context: int, steps: int) -> dict:
    """(what, width, context) → a function that does it once, leaves the caches as they were, and returns seconds."""
    ids = torch.arange(context + widths[-1]) % target.facts.vocab
    aux, _, cache = target.forward(ids[None, :context], None, widths[-1])
    slots = DraftCache(drafter, context + widths[-1] + steps)
    slots.extend(ids[1:context + 1], aux)
    wrong = int(drafter.vocabulary_ids[0])

    def verify(width: int) -> float:
        chain, start = Chain((wrong,) * (width - 1)), time.perf_counter()
        _, last, _ = target.forward(ids[None, context:context + width], cache)
        choose(target.logits(last), chain, 0.0, None, drafter)
        taken = time.perf_counter() - start
        cache.crop(-width)
        return taken

    def draft() -> float:
        start = time.perf_counter()
        slots.draft(steps)
        return (time.perf_counter() - start) / steps

    def catch_up(width: int) -> float:
        fresh, query, hidden, start = aux[-1:].expand(width, -1), slots.query, slots.hidden, time.perf_counter()
        slots.extend(ids[context:context + width], fresh)
        if slots.keys.is_cuda:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        slots.length, slots.query, slots.hidden = slots.length - width, query, hidden
        return taken

    parts = {("draft", 1, context): draft}
    for width in widths:
        parts["verify", width, context] = lambda width=width: verify(width)
        parts["catch_up", width, context] = lambda width=width: catch_up(width)
    return parts


def _host(target, drafter, steps: int) -> float:
    """Seconds a round outside of both models, in a real decode."""
    found = decode(target, drafter, list(range(START)), steps=steps, max_new_tokens=TEXT, stop_ids=())
    return (found.decode_s - found.draft_s - found.verify_s) / len(found.accepted)


def at(rows: list[dict], context: float, column: str = "seconds") -> Costs:
    """The speed model's costs of one sequence at a context length: on the line between the nearest measured contexts,
    and those of the shortest or longest beyond them.

    `column` "low", the lower quartile, is nearer to the machine's own speed where others work on it at the same time.
    """
    points = defaultdict(list)
    for row in rows:
        points[row["what"], row["width"]].append((row["context"], row[column]))
    def value(what: str, width: int) -> float:
        contexts, seconds = zip(*sorted(points[what, width]), strict=True)
        return float(np.interp(context, contexts, seconds))
    widths = sorted(width for what, width in points if what == "verify")
    return Costs(verify={(1, width): value("verify", width) for width in widths},
                 draft_step={1: value("draft", 1)},
                 catch_up={(1, width): value("catch_up", width) for width in widths},
                 overhead={1: value("overhead", 0)})


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
