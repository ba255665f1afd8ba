"""Acceptance length offline: one pass of the drafter over the target's answers tells what a server would count.

The states are computed anew by the same fp32 target, never read from a bf16 or fp8 store: a rounded state may flip a
draft. Chains of the largest length serve all shorter ones. Intervals are percentile bootstraps over prompts of a ratio
of sums, 1 + Σ accepted / Σ verifies: prompts are what was sampled, and their verifies depend on each other.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from eagle3nb.corpus.masks import counted_slots
from eagle3nb.drafter import metrics, ttt
from eagle3nb.errors import UserError
from eagle3nb.progress import progress
from eagle3nb.states.target import digest

COUNTS = ["verifies", "accepted", "delivered"]


@dataclass(frozen=True)
class Chains:
    """The drafter's chains over one answer.

    Trees would enter here: several candidates a step make `hits` bool [K, candidates, T] with each candidate's parent,
    and a walk then accepts the longest path of hits; what reads walks would stay as it is.
    """

    answer: object  # benchmarks.Answer
    hits: np.ndarray  # bool [K, T]: step k from slot t drafted x[t+2+k]
    drafted: np.ndarray | None = None  # int32 [K, n]: what it drafted from the n slots from answer.start − 1 on

    def walk(self, steps: int) -> metrics.Walk:
        return metrics.walk(self.hits, self.answer.start, self.answer.end, steps)


def check_steps(steps: int, steps_max: int) -> None:
    """Raises UserError unless 1 ≤ steps ≤ steps_max."""
    if not 1 <= steps <= steps_max:
        raise UserError(f"steps is {steps}, but the walk is made for 1 to steps_max = {steps_max} drafted tokens; "
                        "change one of them")


def chains(target, drafter, answers, steps_max: int, *, batch_tokens: int = 4096) -> list[Chains]:
    """Chains of `steps_max` drafts from every slot a server could stand at, in the order of `answers`.

    Answers of about `batch_tokens` tokens are captured together, and one pass of the drafter serves them end to end.
    Raises ValueError where an answer was not taken `steps_max` tokens beyond its end: chains that run past it would be
    counted as misses.
    """
    found = [None] * len(answers)
    for group, aux, _last in captured(target, answers, steps_max, batch_tokens):
        for i, drafted in zip(group, drafts(drafter, [answers[i] for i in group], aux, steps_max), strict=True):
            hits = metrics.chain_hits(drafted, answers[i].sequence)
            found[i] = Chains(answers[i], hits, drafted[:, answer_slots(answers[i])].copy())
    return found


def captured(target, answers, steps_max: int, batch_tokens: int):
    """(indices, [aux [T, 3h]], [last [T, h]]) of the answers, a batch of like lengths at a time, with progress."""
    if short := [answer.id for answer in answers if len(answer.beyond) < steps_max]:
        raise ValueError(f"answers {short[:3]} were taken fewer than {steps_max} tokens beyond their end")
    with progress(len(answers), "walk", "answers") as bar:
        for group in length_batches([len(answer.sequence) for answer in answers], batch_tokens):
            aux, last = zip(*target.capture([answers[i].sequence.tolist() for i in group]), strict=True)
            yield group, aux, last
            bar.advance(len(group))


def answer_slots(answer) -> slice:
    """The slots where a verify may stand: it has at least the answer's last token to bring, so none behind end − 3."""
    return slice(answer.start - 1, max(answer.end - 2, answer.start - 1))


def packed(answers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The answers end to end, as ttt.chain takes them: ids [T], starts [T] and the slots of all verifies [N], int64."""
    lengths = np.array([len(answer.sequence) for answer in answers])
    begins = np.cumsum(lengths) - lengths
    ids = np.concatenate([answer.sequence for answer in answers]).astype(np.int64)
    slots = [np.arange(len(answer.sequence))[answer_slots(answer)] + begin
             for answer, begin in zip(answers, begins, strict=True)]
    return ids, np.repeat(begins, lengths), np.concatenate(slots)


def drafts(drafter, answers, aux: list[torch.Tensor], K: int) -> list[np.ndarray]:
    """For each answer int32 [K, T], drafted target ids from features aux [T, 3h]; −1 outside the slots of verifies."""
    ids, starts, slots = packed(answers)
    predicted = ttt.chain(drafter, ids, torch.cat(list(aux)), K, slots, starts)
    return np.split(predicted, np.flatnonzero(np.diff(starts)) + 1, axis=1)


def length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices in groups of like length, at most `batch_tokens` a group with its padding (one row at least)."""
    groups, group = [], []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and lengths[i] * (len(group) + 1) > batch_tokens:
            groups.append(group)
            group = []
        group.append(i)
    return [*groups, group] if group else groups


def counts(found: list[Chains], steps: list[int]) -> pd.DataFrame:
    """A row a prompt and number of steps: id, text, source, looping, steps, tokens, verifies, accepted, delivered."""
    return pd.DataFrame([tally(chain.answer, number, chain.walk(number)) for chain in found for number in steps])


def tally(answer, steps: int, walk) -> dict:
    """A row of `counts`. `text`: hash of prompt and answer, by which another run's row is known to be of the same."""
    return {"id": answer.id, "text": digest([answer.prompt, answer.ids]), "source": answer.source,
            "looping": answer.looping, "steps": steps, "tokens": len(answer.ids), "verifies": walk.verifies,
            "accepted": walk.accepted, "delivered": walk.delivered}


def interval(accepted, verifies, *, bootstrap: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of 1 + Σ accepted / Σ verifies over resampled prompts: prompts of a very small number give
    too narrow a one, and a single prompt's says nothing (see `row`).

    One seed draws the same prompts for every number of steps, so that intervals beside each other are paired.
    """
    return ends(resampled(accepted, verifies, resamples(len(accepted), bootstrap, seed)), level)


def resamples(prompts: int, bootstrap: int, seed: int) -> np.ndarray:
    """int64 [bootstrap, prompts]: which prompts each resample holds."""
    return np.random.default_rng(seed).integers(prompts, size=(bootstrap, prompts))


def resampled(accepted, verifies, drawn: np.ndarray) -> np.ndarray:
    """1 + Σ accepted / Σ verifies of each resample, float64; those without a verify are left out."""
    accepted, verifies = np.asarray(accepted, dtype=np.float64), np.asarray(verifies, dtype=np.float64)
    below = verifies[drawn].sum(axis=1)
    return 1 + accepted[drawn].sum(axis=1)[below > 0] / below[below > 0]


def ends(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The percentiles between which the share `level` of the values lies."""
    return tuple(float(q) for q in np.quantile(values, [(1 - level) / 2, (1 + level) / 2]))


def row(table: pd.DataFrame, *, bootstrap: int, seed: int, **keys) -> dict:
    """Sums over prompts, τ with its interval, and tokens delivered a verify; None where nothing was verified.

    `low` and `high` are None where one prompt alone was verified: it has no spread to resample.
    """
    sums = {name: table[name].sum().item() for name in COUNTS}  # whole numbers, or expected ones (sampled.py)
    measured = {"tau": None, "low": None, "high": None, "delivered_per_verify": None}
    if sums["verifies"]:
        measured["tau"] = metrics.acceptance_length(sums["verifies"], sums["accepted"])
        measured["delivered_per_verify"] = sums["delivered"] / sums["verifies"]
    if (table["verifies"] > 0).sum() > 1:
        measured["low"], measured["high"] = interval(table["accepted"], table["verifies"], bootstrap=bootstrap,
                                                     seed=seed)
    return {**keys, **measured, "prompts": len(table), "tokens": int(table["tokens"].sum()), **sums}


def acceptance(table: pd.DataFrame, *, bootstrap: int, seed: int) -> list[dict]:
    """Rows {steps, source, tau, low, high, …} of `counts`: source "all" is the total, then each source by name.

    Raises UserError where no answer has a second token, so that nothing was verified.
    """
    if not table["verifies"].sum():
        raise UserError("no answer is longer than one token, so nothing is verified; raise max_new_tokens")
    rows = []
    for steps, part in table.groupby("steps"):
        groups = [("all", part), *part.groupby("source")]
        rows += [row(group, bootstrap=bootstrap, seed=seed, steps=int(steps), source=name) for name, group in groups]
    return rows


def degenerate(table: pd.DataFrame, *, bootstrap: int, seed: int) -> list[dict]:
    """Rows {steps, answers: "looping" | "not looping", …}: a loop is easy to draft, so it flatters the total."""
    rows = []
    for steps, part in table.groupby("steps"):
        for loops, name in ((False, "not looping"), (True, "looping")):
            group = part[part["looping"] == loops]
            rows.append(row(group, bootstrap=bootstrap, seed=seed, steps=int(steps), answers=name))
    return rows


def select(rows: list[dict], **keys) -> pd.DataFrame:
    """The rows whose `keys` have these values, as a table."""
    table = pd.DataFrame([r for r in rows if all(r[key] == value for key, value in keys.items())])
    return table.astype({name: "float64" for name in ("tau", "low", "high") if name in table})


def sentence(total: dict) -> str:
    """A row of `acceptance` in words."""
    between = "" if total["low"] is None else f" [{total['low']:.2f}, {total['high']:.2f}]"
    return (f"acceptance length {total['tau']:.2f}{between} with {total['steps']} "
            f"drafted tokens, {total['accepted']:,.0f} accepted in {total['verifies']:,.0f} verifies, "
            f"{total['prompts']} prompts")


def by_position(found: list[Chains], steps: int) -> list[dict]:
    """Rows {position 1..steps, reached, accepted, conditional, joint}: where in the chain drafts fail.

    `reached`: verifies whose earlier drafts were all right. conditional = accepted / reached, joint = accepted /
    verifies; None without any.
    """
    walks = [chain.walk(steps) for chain in found]
    accepted = sum((walk.per_position for walk in walks), np.zeros(steps, dtype=np.int64))
    return positions(sum(walk.verifies for walk in walks), accepted)


def positions(verifies, accepted: np.ndarray) -> list[dict]:
    """The rows of `by_position` from the verifies and the number [steps] that accepted each position."""
    rows, reached = [], verifies
    for position, right in enumerate(accepted.tolist(), start=1):
        rows.append({"position": position, "reached": reached, "accepted": right,
                     "conditional": right / reached if reached else None,
                     "joint": right / verifies if verifies else None})
        reached = right
    return rows


def formulas(found: list[Chains], in_draft: np.ndarray, steps: int) -> list[dict]:
    """What others print for the same drafts, beside the walk: rows {figure, value, who}. `in_draft` bool [V]."""
    hits = np.concatenate([chain.hits[:steps] for chain in found], axis=1)
    counted = np.concatenate([_counted(chain.answer, in_draft, steps) for chain in found], axis=1)
    others = metrics.formulas(hits, counted)
    walks = [chain.walk(steps) for chain in found]
    verifies, accepted = sum(w.verifies for w in walks), sum(w.accepted for w in walks)
    tokens = sum(len(chain.answer.ids) for chain in found)
    return [
        {"figure": "1 + accepted / verifies", "value": metrics.acceptance_length(verifies, accepted),
         "who": "this walk; SGLang's sums, vLLM"},
        {"figure": "delivered / verifies", "value": sum(w.delivered for w in walks) / max(verifies, 1),
         "who": "what the user gets"},
        {"figure": "completion tokens / verifies", "value": tokens / max(verifies, 1),
         "who": "SGLang spec_accept_length (counts the prefill's token)"},
        {"figure": "Σ Π marginals", "value": others["product"], "who": "SpecForge, TorchSpec (no +1)"},
        {"figure": "1 + Σ Π marginals", "value": others["one_plus_product"], "who": "Model-Optimizer"},
        {"figure": "1 + Σ joint prefix", "value": others["one_plus_joint"], "who": "NeMo Automodel"}]


def _counted(answer, in_draft: np.ndarray, K: int) -> np.ndarray:
    """bool [K, T]: slots and steps inside the answer that a server can reach."""
    ids, mask = answer.sequence, np.zeros(len(answer.sequence), dtype=np.uint8)
    mask[answer.start:answer.end] = 1
    return counted_slots(mask, in_draft[ids], K)


def console(rows: list[dict], steps: int) -> list[str]:
    """Table lines for a terminal: the total by number of draft steps, then each source at `steps`."""
    lines = ["Acceptance length (walk over the target's greedy answers, 95 % interval over prompts)",
             f"  {'draft steps':<20}{'tau':>6}   {'interval':<15}{'verifies':>9}{'accepted':>9}{'delivered':>10}"]
    chosen = [(str(r["steps"]), r) for r in rows if r["source"] == "all"]
    chosen += [(None, None)] + [(r["source"], r) for r in rows if r["source"] != "all" and r["steps"] == steps]
    for name, r in chosen:
        if r is None:
            lines.append(f"  by source, {steps} draft steps")
        elif r["tau"] is None:
            lines.append(f"  {name:<20}{'–':>6}   {'no verify':<15}{0:>9}{0:>9}{0:>10}")
        else:
            between = "one prompt" if r["low"] is None else f"{r['low']:.2f} – {r['high']:.2f}"
            lines.append(f"  {name:<20}{r['tau']:>6.2f}   {between:<15}"
                         f"{r['verifies']:>9.0f}{r['accepted']:>9.0f}{r['delivered']:>10}")
    return lines
