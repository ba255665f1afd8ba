"""How much of the text is the target's own? A drafter learns the target's states under text that serving will show it.

Of a text that the target sampled at temperature 1, at least a share p of the tokens lies within the likeliest tokens
that hold p of its mass, whatever the text; cooler sampling and greedy text lie above. So a share well below p says that
another model wrote it, and no threshold is a matter of taste. The argmax share alone falls with every hard text.
"""

import math

import numpy as np
import torch

LONGEST = 512  # tokens of a row that are looked at
CHUNK = 64  # positions whose logits stand in memory at once
SIGMAS = 4  # below p by that much of the sampling error: tokens of a few rows are no independent draws


def policy(target, corpus, *, tokens: int = 512, top_p: float = 0.9, seed: int = 0) -> list[dict]:
    """A row of a table for each source: shares of its supervised tokens by the target's own logits, from a few rows.

    `tokens`: of each source, what is run through the target at most. "off-policy" is True where the share within top_p
    lies below top_p by more than chance.
    """
    sources = corpus.index["source"].to_numpy()
    order = np.random.default_rng(seed).permutation(len(sources))
    return [source_row(target, corpus, name, order[sources[order] == name], tokens, top_p)
            for name in sorted(set(sources))]


def source_row(target, corpus, name: str, rows, tokens: int, top_p: float) -> dict:
    read, count, hits, within, left = 0, 0, 0, 0, tokens
    for i in rows:
        ids, mask = corpus.row(int(i))
        ids, mask = ids[: min(left, LONGEST)], mask[: min(left, LONGEST)]
        at = np.flatnonzero(mask[1:])  # the position before each supervised token predicts it
        if len(at):
            [(_, last)] = target.capture([ids.tolist()])
            argmax, inside = agreement(target, last[torch.from_numpy(at).to(last.device)], ids[at + 1], top_p)
            read, count, hits, within = read + 1, count + len(at), hits + argmax, within + inside
            left -= len(ids)
        if left < 2:
            break
    share = within / count if count else None
    spread = SIGMAS * math.sqrt(top_p * (1 - top_p) / count) if count else 0.0
    return {"source": name, "rows": read, "supervised tokens": count, "argmax share": hits / count if count else None,
            f"share within top {top_p:g}": share, "expected at least": top_p - spread if count else None,
            "off-policy": bool(count and share < top_p - spread)}


@torch.inference_mode()
def agreement(target, last: torch.Tensor, following, top_p: float) -> tuple[int, int]:
    """Of states [n, h] and the tokens [n] that follow: how many are the argmax, how many lie within top_p."""
    hits = within = 0
    for states, tokens in zip(last.split(CHUNK), torch.as_tensor(following).long().split(CHUNK), strict=True):
        p = target.logits(states).float().softmax(-1)  # [n, V]
        own = p.gather(1, tokens.to(p.device)[:, None])
        likelier = (p * (p > own)).sum(-1)  # mass of the tokens before it; its own need not fit
        hits += int((own[:, 0] >= p.amax(-1)).sum())
        within += int((likelier < top_p).sum())
    return hits, within


def off_policy(table: list[dict]) -> list[str]:
    """The sources of `policy` that another model wrote."""
    return [row["source"] for row in table if row["off-policy"]]


def policy_finding(table: list[dict]) -> str:
    """What `policy` found, for a title."""
    named = off_policy(table)
    if not named:
        return "Every source reads as the target's own text"
    return f"{', '.join(named)} {'reads' if len(named) == 1 else 'read'} as another model's text"


def on_policy(store, corpus) -> list[dict]:
    """Per source, the share of supervised tokens that are the target's own argmax, from the stored teacher: no forward.

    Text that the target sampled lies well above text of another model; it is reported and stops nothing.
    """
    sources = corpus.index["source"].to_numpy()[: len(store)]
    counts = {name: [0, 0, 0] for name in sorted(set(sources))}
    for i, name in enumerate(sources):
        row = store.row(i)
        following = row.ids[row.last_positions + 1]
        counts[name][0] += 1
        counts[name][1] += len(following)
        counts[name][2] += int((following == row.teacher_argmax).sum())
    return [{"source": name, "rows": rows, "teacher positions": n, "on-policy share": hits / n if n else 0.0}
            for name, (rows, n, hits) in counts.items()]


def least_on_policy(table: list[dict]) -> str:
    """The finding of `on_policy`, for a title."""
    least = min(table, key=lambda row: row["on-policy share"])
    return f"{least['source']} is the least the target's own: {least['on-policy share']:.0%}"
