"""The worked examples of docs/explanation, and the plan for Kimi-K2.5: computed by the functions that they explain."""

import numpy as np

from eagle3nb.corpus.masks import counted_slots
from eagle3nb.drafter import metrics

TOKENS = ("<user>", "Capital", "?", "<end>", "<assistant>", "It", "is", "Paris", ".", "<end>", "<user>", "Thanks")
MASK = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0], np.uint8)  # the answer, its end-of-turn token included
OUTSIDE = 7  # "Paris" is not in the draft vocabulary
K = 3
# Leading right drafts of three from each slot of an answer x[5] … x[14], slots 4 … 12.
LEADING = {4: 2, 5: 1, 6: 0, 7: 0, 8: 3, 9: 2, 10: 1, 11: 1, 12: 0}
START, END = 5, 15


def table(head, rows) -> str:
    return "\n".join(["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head),
                      *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def mask() -> str:
    """Which steps of which slots count, with every token in D and with "Paris" outside."""
    in_draft = np.ones(len(TOKENS), bool)
    whole = counted_slots(MASK, in_draft, K)
    in_draft[OUTSIDE] = False
    without = counted_slots(MASK, in_draft, K)
    rows = []
    for t, token in enumerate(TOKENS):
        drafts = " ".join(TOKENS[t + 2:t + 2 + int(whole[:, t].sum())])
        rows.append((t, f"`{token}`", MASK[t], steps(whole[:, t]), f"`{drafts}`" if drafts else "",
                     steps(without[:, t])))
    return table(("t", "x[t]", "l[t]", "steps that count", "what they draft", "with `Paris` outside D"), rows)


def steps(counted) -> str:
    return ", ".join(str(k) for k in np.flatnonzero(counted)) or "–"


def teacher() -> str:
    """Where the teacher is needed."""
    needed = np.flatnonzero(MASK[:-1] & MASK[1:])
    return f"Here p = {', '.join(map(str, needed))}: {len(needed)} of {len(MASK)} positions."


def usual() -> str:
    """Slots that other masks train at step 0, against ours."""
    length = len(TOKENS)
    ours = set(np.flatnonzero(counted_slots(MASK, np.ones(length, bool), 1)[0]).tolist())
    here = {t for t in range(length - 2) if MASK[t]}
    shifted = {t for t in range(length - 2) if MASK[t + 1]}
    rows = [(t, f"`{TOKENS[t + 2]}`", *("yes" if t in slots else "no" for slots in (ours, here, shifted)))
            for t in sorted(ours | here | shifted)]
    head = ("slot t", "step 0 learns to draft", "a server gets there", "l[t] trains it", "l[t+1] trains it")
    return table(head, rows)


def walk() -> str:
    """Every verify of the example, and τ."""
    hits = np.zeros((K, END + K + 1), bool)
    for t, count in LEADING.items():
        hits[:count, t] = True
    found = metrics.walk(hits, START, END, K)
    out, rows = START + 1, []
    for slot, accepted in zip(found.slots.tolist(), found.lengths.tolist(), strict=True):
        brought = min(accepted + 1, END - out)
        rows.append((slot, f"x[{slot + 2}] … x[{slot + 1 + K}]", accepted, f"x[{out}]" if brought == 1 else
                     f"x[{out}] … x[{out + brought - 1}]"))
        out += brought
    return "\n\n".join([
        table(("t", "drafts", "n(t): accepted", "tokens that the user gets"), rows),
        f"{found.verifies} verifies accept {found.accepted} drafts: τ = 1 + {found.accepted} / {found.verifies} = "
        f"{metrics.acceptance_length(found.verifies, found.accepted):.2f}. Delivered are {found.delivered} tokens, "
        f"{found.delivered / found.verifies:.2f} a verify."])


def leading() -> str:
    return table(("t", *LEADING), [("n(t)", *LEADING.values())])


def kimi_plan() -> str:
    """The figures of `eagle3nb run kimi-k2.5 --stages audit`, from the same functions and the same parameters."""
    from pathlib import Path

    from eagle3nb.drafter import plan as drafters
    from eagle3nb.drafter.kernels import shared_memory
    from eagle3nb.drafter.model import DraftConfig
    from eagle3nb.record.params import load
    from eagle3nb.states import plan as states
    from eagle3nb.states import target as targets

    p = load("kimi-k2.5", ("audit",))["audit"].full
    folder = targets.target_dir("params/kimi-k2.5/target")
    facts = targets.facts_of(folder)
    config = DraftConfig.from_target(facts, p["draft_vocab_size"], intermediate=p["intermediate"])
    tokens, taught = p["planned_tokens"], p["planned_supervised"]
    disk = states.disk_plan(facts, tokens, taught, Path("."), p["states_dtype"])["bytes"]
    extraction = states.extraction_memory(
        folder, batch_tokens=p["batch_tokens"], shard_tokens=p["shard_tokens"], states_dtype=p["states_dtype"],
        longest=p["max_seq_len"], weights_dtype=p["weights_dtype"], device="cuda")
    shape = drafters.Shape(p["pack_tokens"], p["ttt_steps"], p["accumulate"], p["max_seq_len"], taught / tokens,
                           p["initialise"], p["states_dtype"], p["freeze_head"], taught, p["compute"])
    training = drafters.training_memory(config, shape, device="cuda")
    seen, rate = tokens * p["epochs"], p["training_rate"]
    times = states.hours(seen, rate, p["training_gpus"])
    kernels = shared_memory.by_gpu(
        shared_memory.rows(config.head_dim, config.heads, config.kv_heads, p["compute"], p["ttt_steps"]))
    worst = max(kernels, key=lambda row: row["shared_kb"] / row["limit_kb"])
    rows = [
        ("captured layers", "after " + ", ".join(map(str, targets.captured_layers(facts.layers))) +
         f" of {facts.layers}; {2 * 4 * facts.hidden:,} bytes a token in bf16"),
        ("disk", f"{disk['bf16'] / 1e12:.2f} TB in bf16, {disk['fp8_e4m3'] / 1e12:.2f} TB in fp8_e4m3, for "
                 f"{tokens / 1e6:,.1f} M tokens in "
                 f"{states.store_files(tokens, p['planned_records'], p['shard_tokens'])} files"),
        ("memory, extraction", f"{extraction['device'] / 1e9:,.0f} GB over {p['extraction_gpus']} GPUs (weights "
                               f"{extraction['parts'][0]['bytes'] / 1e9:,.0f}, without the engine's cache), "
                               f"{extraction['host'] / 1e9:,.0f} GB of host memory"),
        ("drafter", f"{drafters.parameters(config)['trainable'] / 1e9:.2f} B trained parameters with a draft "
                    f"vocabulary of {config.draft_vocab:,}"),
        ("memory, training", f"{training['device'] / 1e9:,.0f} GB a GPU, {training['host'] / 1e9:,.0f} GB of host "
                             "memory in the first process"),
        ("time, training", f"{times['hours']:.1f} h on {p['training_gpus']} GPUs for {p['epochs']} epochs at the "
                           f"reference run's {rate:,.0f} tokens/s, if it saw each token once in 10.8 h"),
        ("shared memory", f"at most {worst['shared_kb']:.0f} of {worst['limit_kb']:.0f} KB ({worst['arch']}: "
                          f"{worst['gpus']}); {'all' if all(k['fits'] for k in kernels) else 'not all'} "
                          f"{len(kernels)} architectures fit")]
    return table(("what", "the plan"), rows)


REGIONS = {"mask-example": mask, "mask-teacher": teacher, "mask-usual": usual, "walk-leading": leading,
           "walk-example": walk, "kimi-plan": kimi_plan}
