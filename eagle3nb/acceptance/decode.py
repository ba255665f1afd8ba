"""A real greedy decode with drafts: what an engine does, in plain PyTorch, one sequence, a chain of drafted tokens.

Both models keep their keys and values. The target runs once over the prompt and once a verify, over the newest token
and the drafted ones. The drafter's cache holds step-0 keys of true features alone: a slot enters it when the target has
seen its token; the keys that a chain makes of its own outputs lie behind them and the next slots overwrite them.
The counts are an engine's: a drafted token that runs past the end of the answer and is right counts as accepted.
"""

import time
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from eagle3nb.errors import UserError
from eagle3nb.progress import progress

NEAR_TIE = 0.01  # logits; batched and incremental forwards of one fp32 model were seen some 1e-4 apart


@dataclass(frozen=True)
class Decode:
    """One decoded answer. A margin is the best logit less the second best: near 0, rounding chose."""

    ids: tuple[int, ...]  # up to and with the end-of-turn token, or the limit
    accepted: tuple[int, ...]  # a number a verify, uncapped
    margins: tuple[float, ...]  # of the target, a number a token of ids
    draft_margins: tuple[tuple[float, ...], ...]  # of the drafter, a tuple a verify
    prefill_s: float
    decode_s: float


class DraftCache:
    """Step-0 keys and values [capacity, Hkv, dh] of the slots 0..length−1. Slot t: token x[t+1], hidden fc(a[t])."""

    def __init__(self, model, capacity: int):
        self.model, self.capacity, self.length, self.keys, self.values = model, capacity, 0, None, None

    def extend(self, tokens: torch.Tensor, aux: torch.Tensor) -> None:
        """New slots: their tokens [n] and the target's features [n, 3h]. Keeps the last slot's query, to draft from."""
        first, self.length = self.length, self.length + len(tokens)
        tokens, aux = (x.to(self.model.fc.weight.device) for x in (tokens, aux))
        g = self.model.fuse(aux)
        q = self._attend(tokens, g, first)
        self.query, self.hidden = q[-1:], g[-1:]

    def draft(self, steps: int) -> tuple[list[int], list[float]]:
        """Greedy chain of `steps` drafted target ids from the last slot, and the drafter's margins."""
        model, q, g, slot = self.model, self.query, self.hidden, self.length - 1
        drafted, margins = [], []
        for k in range(steps):
            if k:
                q = self._attend(token, g, slot + k)  # noqa: F821  (step k's own key lies at index length − 1 + k)
            seen = slice(0, self.length + k)
            attended = scaled_dot_product_attention(
                q.transpose(0, 1)[None], self.keys[seen].transpose(0, 1)[None], self.values[seen].transpose(0, 1)[None],
                enable_gqa=True)[0]  # [Hq, 1, dh]; one query sees every key: no mask
            out = model.block(g, attended.reshape(1, -1))
            best = model.logits(out).topk(2)
            token, g = model.to_target(best.indices[:, 0]), model.next_hidden(out)
            drafted.append(int(token))
            margins.append(float(best.values[0, 0] - best.values[0, 1]))
        return drafted, margins

    def _attend(self, tokens, hidden, position: int) -> torch.Tensor:
        """Queries [n, Hq, dh] of n slots from `position` on; keys and values go to the same places in the cache."""
        positions = torch.arange(position, position + len(tokens), device=hidden.device)
        q, k, v = self.model.qkv(self.model.embed(tokens), hidden, positions)
        if self.keys is None:
            self.keys, self.values = (x.new_empty(self.capacity, *x.shape[1:]) for x in (k, v))
        self.keys[position:position + len(tokens)] = k
        self.values[position:position + len(tokens)] = v
        return q


@torch.inference_mode()
def decode(target, drafter, prompt, *, steps: int, max_new_tokens: int, stop_ids=None) -> Decode:
    """The target's greedy answer to `prompt` (ids), decoded with chains of `steps` drafts; 0 is the target alone.

    Stops as engines do: after a verify, at the first stop token or at the limit, whatever was accepted behind it.
    """
    stops = set(target.facts.eos if stop_ids is None else stop_ids)
    began = time.perf_counter()
    aux, last, cache = target.forward(torch.tensor([list(prompt)]), None)
    text, margins = _greedy(target.logits(last[-1:]))
    fed = torch.tensor(list(prompt[1:]) + text)  # the tokens of the new slots: shifted by one
    drafts = DraftCache(drafter, len(prompt) + max_new_tokens + 2 * steps + 1) if steps else None
    prefilled, accepted, draft_margins = time.perf_counter(), [], []
    while len(text) < max_new_tokens and not stops.intersection(text):
        drafted, doubts = [], []
        if steps:
            drafts.extend(fed, aux)
            drafted, doubts = drafts.draft(steps)
        aux, last, cache = target.forward(torch.tensor([[text[-1], *drafted]]), cache)
        greedy, gaps = _greedy(target.logits(last))
        n = next((i for i, token in enumerate(drafted) if token != greedy[i]), len(drafted))
        text, margins = text + greedy[:n + 1], margins + gaps[:n + 1]
        accepted.append(n)
        draft_margins.append(tuple(doubts))
        if n < len(drafted):
            cache.crop(n - len(drafted))  # a negative number removes: the rejected drafts' keys
        aux, fed = aux[:n + 1], torch.tensor(greedy[:n + 1])
    length = next((i + 1 for i, token in enumerate(text[:max_new_tokens]) if token in stops), max_new_tokens)
    return Decode(tuple(text[:length]), tuple(accepted), tuple(margins[:length]), tuple(draft_margins),
                  prefilled - began, time.perf_counter() - prefilled)


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Argmax and margin of each row of [n, V]."""
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def difference(answer, decoded: Decode, walked) -> dict:
    """A row that compares a real decode with the answer's text and the walk's counts, verify by verify.

    `walked`: accepted counts of the walk, one a verify. Where they differ, `where` says the first place and `margin`
    the margin there: under NEAR_TIE it was a tie that two orders of the same sums broke differently. It still counts
    as unequal.
    """
    walked, where, margin = tuple(int(n) for n in walked), "", None
    same_text, same_counts = decoded.ids == answer.ids, decoded.accepted == walked
    if not same_text:
        i = _first_difference(decoded.ids, answer.ids)
        where, margin = f"answer token {i}", decoded.margins[min(i, len(decoded.margins) - 1)]
    elif not same_counts:
        j = _first_difference(decoded.accepted, walked)
        where = f"verify {j}"
        if j < min(len(decoded.accepted), len(walked)):
            margin = decoded.draft_margins[j][min(decoded.accepted[j], walked[j])]
    return {"id": answer.id, "source": answer.source, "verifies": len(decoded.accepted),
            "accepted": sum(decoded.accepted), "delivered": max(len(decoded.ids) - 1, 0),
            "walk_verifies": len(walked), "walk_accepted": sum(walked), "same_text": same_text,
            "same_counts": same_counts, "equal": same_text and same_counts, "where": where, "margin": margin}


def _first_difference(a: tuple, b: tuple) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def decode_all(target, drafter, answers, steps: int, max_new_tokens: int) -> list[Decode]:
    """A real decode of each answer's prompt, one after another."""
    decodes = []
    with progress(len(answers), "decode", "prompts") as bar:
        for answer in answers:
            decodes.append(decode(target, drafter, answer.prompt, steps=steps, max_new_tokens=max_new_tokens))
            bar.advance(1, f"{len(decodes[-1].ids)} tokens in {len(decodes[-1].accepted)} verifies")
    return decodes


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


def against_alone(target, answers, decodes: list[Decode], steps: int, max_new_tokens: int) -> list[dict]:
    """`speeds` of the decodes and of the target alone on the same prompts (pass a few: this decodes them again)."""
    if not answers:
        return []
    alone = decode_all(target, None, answers, 0, max_new_tokens)
    return speeds({"target alone": alone, f"{steps} drafted tokens": decodes})


def speeds(runs: dict[str, list[Decode]]) -> list[dict]:
    """Rows of tokens a second after the prefill, one a run of the same prompts; speed-up against the first run.

    One sequence at a time and plain PyTorch: it tells the machine's ratio of drafts to verifies, not an engine's speed.
    """
    rows = []
    for name, decodes in runs.items():
        tokens, seconds = sum(len(d.ids) - 1 for d in decodes), sum(d.decode_s for d in decodes)
        rate = tokens / seconds if seconds else 0.0
        first = rows[0]["tokens_per_s"] if rows else rate
        rows.append({"decode": name, "prompts": len(decodes), "tokens": tokens,
                     "verifies": sum(len(d.accepted) for d in decodes), "seconds": seconds, "tokens_per_s": rate,
                     "speedup": rate / first if first else None})
    return rows
