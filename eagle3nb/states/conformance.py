"""What must be true of an engine's states, whatever engine it is: each check is a function that returns its figures.

Rows are lists of ids; `states`: (aux [T, 3h], last [T, h]) of each row, on the CPU. A check that fails raises UserError
with one line that says what the states are instead.
"""

import numpy as np
import torch

from eagle3nb.corpus.merged import vocabulary_hash
from eagle3nb.errors import UserError
from eagle3nb.files import shown
from eagle3nb.states import forward
from eagle3nb.states import target as targets
from eagle3nb.states.compare import OTHER_ENGINE, Tolerance, chunks, errors, locate, median, misplaced, over_rows
from eagle3nb.states.reference import logit_changes

AGREE = 0.97  # share of greedy tokens that the right reading of `last` must predict
SAMPLE = 256  # rows of the embedding and the head that are compared
ALONE, CUT, STEP = 8, 128, 12  # rows compared with themselves in a batch: the first has 128 tokens, each next 12 less
UNIT = 0.02  # how far a root mean square may be from 1


def same_vocabulary(corpus, target) -> None:
    """UserError where the corpus's ids are another vocabulary's: by its size and, if the merge noted it, its tokens."""
    again = "merge again with this target"
    if corpus.vocab_size != target.facts.vocab:
        raise UserError(f"the corpus was merged for a vocabulary of {corpus.vocab_size}, the target's is "
                        f"{target.facts.vocab}; {again}")
    if corpus.tokenizer and corpus.tokenizer != vocabulary_hash(targets.load_tokenizer(target.dir)):
        raise UserError(f"the corpus was merged with another tokenizer than that of {shown(target.dir)}: its ids spell "
                        f"other text; {again}")


def captured(target, rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The engine's states of some rows, on the CPU: as many as there are tokens, of the right width, finite."""
    states = [(aux.cpu(), last.cpu()) for aux, last in target.capture(rows)]
    if len(states) != len(rows):
        raise UserError(f"probe: {len(rows)} rows went into the engine, the states of {len(states)} came back; "
                        f"{OTHER_ENGINE}")
    for i, (ids, (aux, last)) in enumerate(zip(rows, states, strict=True)):
        for name, part, width in (("aux", aux, 3 * target.facts.hidden), ("last", last, target.facts.hidden)):
            if len(part) < len(ids):
                raise UserError(f"probe: row {i} has {len(ids)} tokens, the engine gave {len(part)} states ({name}): a "
                                "prefix cache or chunked prefill cuts them off; switch both off")
            if part.shape != (len(ids), width):
                raise UserError(f"probe: {name} of row {i} has shape {list(part.shape)}, not [{len(ids)}, {width}]; "
                                "give the engine three layers to capture")
        if bad := not_finite(aux, last, target.layers):
            raise UserError(f"probe: row {i}, {bad}; check the target's weights and dtype (fp16 overflows)")
    return states


def not_finite(aux: torch.Tensor, last: torch.Tensor, layers) -> str:
    """"token 4: layer 2 holds nan", of the first value that is no number; empty where all are."""
    bad = forward.not_finite(aux, last, layers)
    return f"token {bad[0]}: {bad[1]} holds {bad[2]}" if bad else ""


# ---------------------------------------------------------------------------------------------------- the engine alone


def distinct_layers(target, states, allowed: Tolerance) -> float:
    """Three captured layers that are three: how far the nearest two are from one another, in the median."""
    apart = {(a, b): median(over_rows(chunks(states, a), chunks(states, b))) for a, b in ((0, 1), (1, 2), (0, 2))}
    a, b = min(apart, key=apart.get)
    if apart[a, b] <= allowed.middle:
        raise UserError(f"probe: what is captured as layers {target.layers[a]} and {target.layers[b]} is one stream "
                        "twice; give the engine three different layer ids")
    return apart[a, b]


def batch_rows(target, corpus, seed: int, allowed: Tolerance) -> list[dict]:
    """Random rows in one batch and each alone: the largest error of a token, a row of a table each."""
    chosen = np.random.default_rng(seed + 2).permutation(len(corpus))[:ALONE].tolist()
    cuts = [min(CUT, target.facts.max_positions) - STEP * place for place in range(ALONE)]
    rows = [corpus.row(i)[0][: max(1, cut)].tolist() for i, cut in zip(chosen, cuts, strict=False)]
    together, alone = captured(target, rows), [captured(target, [ids])[0] for ids in rows]
    table = [{"row": i, "tokens": len(ids), "captured layers": 0.0, "last": 0.0}
             for i, ids in zip(chosen, rows, strict=True)]
    for place in range(4):
        mine, right = ([last for _, last in s] if place == 3 else chunks(s, place) for s in (together, alone))
        found = [errors(a, b) for a, b in zip(mine, right, strict=True)]
        what = "the last hidden state" if place == 3 else f"layer {target.layers[place]}"
        if not all(allowed.fits(e) for e in found):
            raise UserError(f"probe: in a batch of {len(rows)} rows, "
                            + explain_batch(what, mine, right, found, chosen, allowed))
        for line, e in zip(table, found, strict=True):
            column = "last" if place == 3 else "captured layers"
            line[column] = max(line[column], float(e.max()))
    return table


def explain_batch(what: str, mine, right, found, chosen, allowed: Tolerance) -> str:
    kind, i, j = misplaced(mine, right, allowed)
    if kind == "row":
        return (f"row {chosen[i]} of the corpus gets the states of row {chosen[j]} at {what}: the engine gives a batch "
                f"back in another order; {OTHER_ENGINE}")
    if kind:
        return f"the states of {what} stand one token too {kind}: the engine's padding shifts them; {OTHER_ENGINE}"
    row, token = locate(torch.cat(found), mine)
    return (f"row {chosen[row]} of the corpus is not what it is alone: {what} is off by {float(found[row].max()):.2g} "
            f"at token {token} (at most {allowed.limit:g} is rounding): the engine's batching mixes rows; "
            f"{OTHER_ENGINE}")


def order_of_tokens(target, sequences, allowed: Tolerance) -> dict:
    """Another token at t changes the states from t on, and none before: so states stand where their tokens do.

    {"token": t, "error": the least of the four states' changes there}.
    """
    ids = max(sequences, key=len)
    t = len(ids) // 2
    other = [*ids[:t], (ids[t] + 1) % target.facts.vocab, *ids[t + 1 :]]
    one, two = captured(target, [ids])[0], captured(target, [other])[0]
    least = float("inf")
    for place, (a, b) in enumerate(zip([*one[0].chunk(3, -1), one[1]], [*two[0].chunk(3, -1), two[1]], strict=True)):
        moved = errors(b, a)
        changed = (moved > allowed.limit).nonzero()[:, 0].tolist()
        what = "the last hidden state" if place == 3 else f"what is captured as layer {target.layers[place]}"
        if not allowed.fits(moved[:t]):
            raise UserError(f"probe: token {t} of a row was changed, and {what} changed from token {changed[0]} on: "
                            f"states stand before their tokens, or tokens see what comes after them; {OTHER_ENGINE}")
        if moved[t] <= allowed.limit:
            where = f"only from token {changed[0]} on" if changed else "nowhere"
            raise UserError(f"probe: token {t} of a row was changed, and {what} changed {where}: states stand behind "
                            f"their tokens, or belong to another row; {OTHER_ENGINE}")
        least = min(least, float(moved[t]))
    return {"token": t, "error": least}


# ---------------------------------------------------------------------------------------------------- the checkpoint


def weights_identity(target, allowed: Tolerance) -> dict:
    """Rows of the embedding and the head against the checkpoint's files.

    Bit for bit after the load's cast where the engine shows its weights (`target.model`); else the head by its logits,
    and the embedding not at all: what the layers above make of it is compared.
    """
    ids, h = torch.randperm(target.facts.vocab)[:SAMPLE], target.facts.hidden
    model, found = getattr(target, "model", None), {}
    for name, stored in (("embedding", targets.embedding(target.dir)), ("lm_head", targets.lm_head(target.dir))):
        if stored.shape != (target.facts.vocab, h):
            raise UserError(f"probe: the checkpoint's {name} has shape {list(stored.shape)}, config.json says "
                            f"[{target.facts.vocab}, {h}]; copy the whole checkpoint again")
        error = None
        if model is not None:
            module = model.get_input_embeddings() if name == "embedding" else model.get_output_embeddings()
            same = module.weight.shape == stored.shape and torch.equal(module.weight[ids].cpu(),
                                                                       stored[ids].to(target.dtype))
            error = 0.0 if same else float("inf")
        elif name == "lm_head":
            state = torch.randn(4, h).to(target.dtype)
            error = float(errors(target.logits(state)[:, ids], state.float() @ stored[ids].float().T).max())
        if error is not None and error > allowed.limit:
            raise UserError(f"probe: the engine's {name} is not the checkpoint's; give the engine the directory of "
                            "`target`, unchanged")
        found[name] = {"rows_compared": len(ids), "equal": None if error is None else True, "error": error,
                       "shape": list(stored.shape)}
    return found


@torch.inference_mode()
def norm_convention(target, sequences, starts, states, norm, allowed: Tolerance, known: bool) -> dict:
    """Does argmax lm_head(last) continue the greedy text as `last` is, or only through the final norm?

    known: `last` has been compared with the checkpoint's own.
    A token within rounding of the argmax counts as it: a decode and a prefill in bf16 choose differently now and then.
    """
    agree, count = {"as it is": 0, "through the final norm": 0}, 0
    for ids, start, (_, last) in zip(sequences, starts, states, strict=True):
        last, truth = last[start - 1 : -1], torch.tensor(ids[start:])  # f[t] predicts x[t+1]
        for name, value in zip(agree, (last, norm(last).to(last.dtype)), strict=True):
            logits = target.logits(value).float().cpu()
            behind = logits.amax(-1) - logits.gather(1, truth[:, None])[:, 0]
            agree[name] += int((behind <= 2 * allowed.limit * logits.std(-1)).sum())
        count += len(truth)
    shares = {name: hits / count for name, hits in agree.items()}
    plain, normed = shares.values()
    weight = targets.final_norm(target.dir).float()
    spread, rms = float(weight.std() / weight.abs().mean()), root_mean_square(states, norm, target.facts)
    said = (f"probe: lm_head(last) continues the target's own greedy text in {plain:.1%} of {count} tokens as it is, "
            f"in {normed:.1%} through the final norm")
    if plain < AGREE:
        raise UserError(said + ("; the store needs states after that norm" if normed >= AGREE else
                                ": that text comes from another head or another last state than these; give the engine "
                                "the directory of `target`, unchanged"))
    # Norms whose weights are nearly alike change little twice: then the root mean square tells, or the checkpoint did.
    if normed >= plain and spread >= 1e-3 and rms is None and not known:
        raise UserError(said + ": which reading is right cannot be told; give the probe more new_tokens")
    if rms is not None and abs(rms - 1) > UNIT:
        raise UserError(f"probe: last over the final norm's weight has root mean square {rms:.3g}, not 1: it has not "
                        "gone through that norm; the store needs states after it")
    return {**shares, "tokens": count, "norm_weight_spread": spread, "rms over the norm's weight": rms}


def root_mean_square(states, norm, facts) -> float | None:
    """Median over tokens of rms(last / w), w the weight of an RMSNorm: 1 after the norm, as a rule far from it before.

    None where the norm is another, or has weights near 0, at which last says nothing.
    """
    gain, doubled = norm(torch.ones(1, facts.hidden))[0], norm(2 * torch.ones(1, facts.hidden))[0]
    if not torch.allclose(gain, doubled, rtol=1e-3) or gain.abs().min() <= 1e-3 * gain.abs().mean():
        return None
    last = torch.cat([last for _, last in states]).float()
    return median((last / gain).square().mean(-1).sqrt())


def logits_error(target, states, truth, allowed: Tolerance) -> float:
    """lm_head(last) against the checkpoint's own logits, the worst token. UserError where something lies between.

    A cap or a scale behind the head that the config tells (logit_changes) is none: the teacher goes without it.
    """
    found = torch.cat([errors(target.logits(last), s.logits) for (_, last), s in zip(states, truth, strict=False)])
    if not allowed.fits(found) and not logit_changes(target.dir):
        raise UserError(f"probe: lm_head(last) differs from the checkpoint's logits by {median(found):.2g} a token: "
                        "something lies between head and logits that the drafter's teacher would lack; take a target "
                        "without it")
    return float(found.max())


# ---------------------------------------------------------------------------------------------------- all of them


def table(target, allowed: Tolerance, what: str, *, weights, apart, batch, order, layers, last, logits,
          norm) -> list[dict]:
    """A row for each check: what it compares with, its figure and limit, and whether it holds or could not run.

    `what`: the independent forward that there was, or why there was none. `layers` and `last` are empty without it.
    """
    changes = logit_changes(target.dir)
    unread = "the engine shows no weights" + ("; the layers above are made of them" if layers else "")
    rms = norm["rms over the norm's weight"]
    bare = layers or [{"layer": layer, "median": None} for layer in target.layers]
    alone, files = "the engine itself", "the checkpoint's files"
    return [
        line("as many states as tokens, every value finite", alone, None, None, "holds"),
        line("three different layers (median of the nearest two, above)", alone, apart, allowed.middle),
        line(f"{len(batch)} rows in a batch are what they are alone (worst token)", alone,
             max(max(row["captured layers"], row["last"]) for row in batch), allowed.limit),
        line(f"token {order['token']} changed: so do its states, none before (its change, above)", alone,
             order["error"], allowed.limit),
        *(line(f"layer {row['layer']} is the stream after {row['layer']} layers (median)", what, row["median"],
               allowed.middle, unless="not loaded that far") for row in bare),
        line("last is the stream after the final norm (median)", what, last[0]["median"] if last else None,
             allowed.middle, unless="not loaded to the end"),
        line("lm_head(last) is the model's logits (worst token)", what, logits, allowed.limit,
             f"differs: {', '.join(changes)} is left out of the teacher" if changes else "holds",
             unless="not loaded to the end"),
        *(line(f"{name}: {w['rows_compared']} rows", files, w["error"], allowed.limit if w["error"] else 0.0,
               unless=unread) for name, w in weights.items()),
        line("last continues the target's greedy text (share, above)", "the head", norm["as it is"], AGREE),
        line("last over the final norm's weight has root mean square 1 (off by)", files,
             None if rms is None else abs(rms - 1), UNIT, unless="no plain RMSNorm")]


def line(name: str, against: str, figure, limit, result: str = "", unless: str = "") -> dict:
    """`unless`: why there is no figure, where there is none."""
    told = result or "holds"
    return {"check": name, "against": against, "figure": figure, "limit": limit,
            "result": f"not run: {unless}" if figure is None and unless else told}
