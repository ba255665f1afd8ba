"""The conformance probe: is what the engine hands out what the drafter will be fed in serving?

Wrong layers, a norm too many, a shifted batch or another head leave training losses that fall and drafts that nobody
accepts. So before any bulk work the target answers a few prompts itself, and its states are held against what must be
true of them on any engine (conformance.py), and against an independent forward of the checkpoint, as far as this
machine can load it (reference.py, compare.py). Every number is returned, with the checks that could not run; a failure
is one UserError and stops the stage.

An engine is asked for no more than `facts`, `layers`, `dir`, `dtype`, `capture`, `logits` and `generate`.
"""

import numpy as np
import torch

from eagle3nb.errors import UserError
from eagle3nb.states import conformance
from eagle3nb.states.compare import chunks, last_matches, layers_match, tolerance
from eagle3nb.states.policy import (  # noqa: F401 (the notebook's names)
    least_on_policy,
    off_policy,
    on_policy,
    policy,
    policy_finding,
)
from eagle3nb.states.reference import final_norm, load_reference

LONG = 512  # tokens of the one row that shows what RoPE does beyond the first


def probe(target, corpus, *, rows: int = 16, new_tokens: int = 24, seed: int = 0, policy_tokens: int = 512,
          top_p: float = 0.9, memory: int | None = None) -> dict:
    """Run every check on `rows` rows that the target generates greedily after prompts of the corpus.

    policy_tokens: of each source, what is read for its on-policy share (0: none). memory: bytes that the independent
    forward may take (None: see reference.py). Returns tables: "checks" (all of them), "layers", "last", "batch",
    "on_policy", "residual", and figures: "norm", "weights", "reference", "rows", "new_tokens". Raises UserError naming
    the check that fails.
    """
    conformance.same_vocabulary(corpus, target)
    torch.manual_seed(seed)
    allowed = tolerance(target.dtype, target.dir)
    weights = conformance.weights_identity(target, allowed)
    prompts = prompts_of(corpus, rows, new_tokens, target.facts, seed)
    sequences, starts = greedy_rows(target, prompts, new_tokens)
    states = conformance.captured(target, sequences)
    apart = conformance.distinct_layers(target, states, allowed)
    batch = conformance.batch_rows(target, corpus, seed, allowed)
    order = conformance.order_of_tokens(target, sequences, allowed)
    reference, what = load_reference(target.dir, target.layers, memory)
    norm, layers, last, logits = final_norm(target.dir), [], [], None
    if reference:
        long = long_row(corpus, target.facts, seed)
        every = [*states, *conformance.captured(target, [long])]
        truth = [reference.streams(ids) for ids in [*sequences, long]]
        layers = layers_match(every, truth, target.layers, allowed)
        if reference.whole:
            last = last_matches(every, truth, norm, allowed)
            logits = conformance.logits_error(target, states, truth, allowed)
    convention = conformance.norm_convention(target, sequences, starts, states, norm, allowed, known=bool(last))
    table = conformance.table(target, allowed, what, weights=weights, apart=apart, batch=batch, order=order,
                              layers=layers, last=last, logits=logits, norm=convention)
    sources = policy(target, corpus, tokens=policy_tokens, top_p=top_p, seed=seed) if policy_tokens else []
    return {"rows": len(sequences), "new_tokens": convention["tokens"], "reference": what, "checks": table,
            "weights": weights, "layers": layers, "last": last, "batch": batch, "norm": convention,
            "on_policy": sources, "residual": residual_norms(target, states)}


def prompts_of(corpus, count: int, new_tokens: int, facts, seed: int) -> list[list[int]]:
    """The beginnings of corpus rows up to their first answer; of a sample of rows, the shortest."""
    chosen = np.random.default_rng(seed).permutation(len(corpus))[: 4 * count]
    found = []
    for i in chosen:
        ids, mask = corpus.row(int(i))
        end = int(np.argmax(mask)) if mask.any() else 0
        if 0 < end <= facts.max_positions - new_tokens:
            found.append(ids[:end].tolist())
    if not found:
        raise UserError("no row of the corpus begins with a prompt that fits the target; run the audit")
    return sorted(found, key=len)[:count]


def greedy_rows(target, prompts, new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """(prompt + greedy answer) of each prompt, and where the answer starts. Nothing stops it early."""
    answers = target.generate(prompts, max_new_tokens=new_tokens, stop_ids=())
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], [len(p) for p in prompts]


def long_row(corpus, facts, seed: int) -> list[int]:
    """The longest of 32 random rows, up to LONG tokens of it."""
    chosen = np.random.default_rng(seed + 1).permutation(len(corpus))[:32]
    return corpus.row(int(max(chosen, key=lambda i: corpus.lengths[i])))[0][: min(LONG, facts.max_positions)].tolist()


def residual_norms(target, states) -> list[dict]:
    """Mean norm of the residual stream by captured layer, the first token apart: it is often a hundred times larger."""
    table = []
    for place, layer in enumerate(target.layers):
        norms = [part.float().norm(dim=-1) for part in chunks(states, place)]
        table.append({"layer": layer, "first token": float(torch.stack([n[0] for n in norms]).mean()),
                      "other tokens": float(torch.cat([n[1:] for n in norms]).mean())})
    return table


def massive(found: dict) -> str:
    """The finding of `residual_norms`, for a title."""
    largest = max(found["residual"], key=lambda row: row["first token"] / row["other tokens"])
    times = largest["first token"] / largest["other tokens"]
    return f"After layer {largest['layer']} the first token is {times:,.1f} times the others"
