"""States against what they should be (reference.py), and where they differ, what they are instead.

An error is relative and of one token: |a − b| / |b|, so that a massive first token cannot hide another's.
`states`: (aux [T, 3h], last [T, h]) of each row; `truth`: the same rows' Streams.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.states import target as targets
from eagle3nb.states.parameters import experts_of

# (of a token, of the median). Rounding moves the median token of SmolLM2's 30 layers by 1e-6, 0.002 and 0.01, single
# ones by 4e-6, 0.01 and 0.14; a rope_theta ten times too small by 0.13, the next layer by 0.2.
LIMITS = {torch.float32: (2e-3, 2e-3), torch.float16: (2e-2, 1e-2), torch.bfloat16: (2e-1, 5e-2)}

OTHER_ENGINE = "use another version of the engine, or the other engine"


@dataclass(frozen=True)
class Tolerance:
    """States are right where a `share` of their tokens is within `limit` and the median within `middle`."""

    limit: float
    middle: float
    share: float

    def fits(self, errors: torch.Tensor) -> bool:
        return bool(len(errors)) and median(errors) <= self.middle and \
            bool((errors <= self.limit).float().mean() >= self.share)


def tolerance(dtype: torch.dtype, folder: str | Path) -> Tolerance:
    """Every token in float32; 9 of 10 where rounding adds up, or where it may send a token to another expert."""
    config = targets.text_config(folder, read_json(Path(folder) / "config.json"))
    exact = dtype == torch.float32 and not experts_of(config)[0]
    return Tolerance(*LIMITS.get(dtype, LIMITS[torch.bfloat16]), 1.0 if exact else 0.9)


def errors(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[T, h], [T, h] → [T]."""
    states, reference = states.float().cpu(), reference.float().cpu()
    return (states - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)


def median(values: torch.Tensor) -> float:
    return float(values.median())


def chunks(states, place: int) -> list[torch.Tensor]:
    """The captured layer at `place` (0, 1, 2) of every row."""
    return [aux.chunk(3, dim=-1)[place] for aux, _ in states]


def over_rows(states, reference) -> torch.Tensor:
    """Errors of all tokens of all rows, one after the other."""
    return torch.cat([errors(a, b) for a, b in zip(states, reference, strict=True)])


def layers_match(states, truth, layers, allowed: Tolerance) -> list[dict]:
    """Each captured layer against the model's stream there and at the layers before and after; a row of a table each.

    Layers that the reference was not loaded for have no figures. UserError says what the states are instead.
    """
    depth = len(truth[0].residual) - 1
    seen = [place for place, layer in enumerate(layers) if layer <= depth]
    table = {place: [over_rows(chunks(states, place), [s.residual[d] for s in truth]) for d in range(depth + 1)]
             for place in range(3)}
    for place in seen:
        own = table[place][layers[place]]
        nearest = min(median(e) for d, e in enumerate(table[place]) if d != layers[place])
        if not allowed.fits(own) or 2 * median(own) > nearest:
            raise UserError(explain_layer(place, table, states, truth, layers, allowed))
    return [layer_row(layer, table[place] if place in seen else None) for place, layer in enumerate(layers)]


def layer_row(layer: int, found) -> dict:
    """`found`: errors at every layer of the reference, or None."""
    beside = {name: median(found[d]) if found and d < len(found) else None
              for name, d in (("one layer earlier", layer - 1), ("one layer later", layer + 1))}
    if found is None:
        return {"layer": layer, "relative error": None, "median": None, **beside, "nearest neighbour": None}
    return {"layer": layer, "relative error": float(found[layer].max()), "median": median(found[layer]), **beside,
            "nearest neighbour": min(v for v in beside.values() if v is not None)}


def explain_layer(place: int, table, states, truth, layers, allowed: Tolerance) -> str:
    """One line: what the states at `place` are, since they are not the model's after `layers[place]` layers."""
    layer, what = layers[place], f"probe: what is captured as layer {layers[place]}"
    own = table[place][layer]
    best = [min(range(len(found)), key=lambda d, found=found: median(found[d])) for found in table.values()]
    fitting = [allowed.fits(found[d]) for found, d in zip(table.values(), best, strict=True)]
    if all(fitting) and sorted(best) == list(layers) and best != list(layers):
        return (f"probe: the captured layers come in the order {', '.join(map(str, best))} instead of "
                f"{', '.join(map(str, layers))}; hand them over in ascending order")
    if fitting[place] and best[place] != layer:
        found = best[place]
        by = {-1: "one layer too early", 1: "one layer too late"}.get(found - layer, "another layer")
        return (f"{what} is the residual stream after {found} layers, {by}; give the engine the ids of its own "
                f"convention for {', '.join(map(str, layers))} (ids that count layer outputs are one less)")
    mine, right = chunks(states, place), [s.residual[layer] for s in truth]
    kind, i, j = misplaced(mine, right, allowed)
    if kind == "row":
        return f"{what} of row {i} is that of row {j}: the engine gives rows back in another order; {OTHER_ENGINE}"
    if kind:
        return (f"{what} is that layer's, but one token too {kind}: states and tokens are shifted against one another; "
                f"{OTHER_ENGINE}")
    if median(own) <= allowed.middle:
        row, token = locate(own, mine)
        return (f"{what} is that layer's, but off by {float(own.max()):.2g} at row {row}, token {token} (at most "
                f"{allowed.limit:g} is rounding): a kernel or the batching is at fault; {OTHER_ENGINE}")
    starts = torch.tensor([0, *(len(part) for part in mine[:-1])]).cumsum(0)
    if median(own[starts]) <= allowed.middle:
        return (f"{what} agrees at the first token of each row and is off by {median(own):.2g} at the others: "
                "attention or positions are not the checkpoint's; compare the engine's RoPE (theta, scaling) with "
                "config.json")
    return (f"{what} differs from every layer of the checkpoint, by {median(own):.2g} a token from layer {layer}; the "
            "engine runs other weights; give it the directory of `target`, unchanged")


def misplaced(mine, right, allowed: Tolerance) -> tuple[str, int, int]:
    """("late" or "early", 0, 0) where states stand a token off, ("row", i, j) where row i has row j's, else ("", 0, 0).
    """
    late = torch.cat([errors(a[1:], b[:-1]) for a, b in zip(mine, right, strict=True)])
    early = torch.cat([errors(a[:-1], b[1:]) for a, b in zip(mine, right, strict=True)])
    if allowed.fits(late) or allowed.fits(early):
        return "late" if allowed.fits(late) else "early", 0, 0
    for i, states in enumerate(mine):
        if allowed.fits(errors(states, right[i])):
            continue
        for j, other in enumerate(right):
            n = min(len(states), len(other))
            if i != j and allowed.fits(errors(states[:n], other[:n])):
                return "row", i, j
    return "", 0, 0


def last_matches(states, truth, norm, allowed: Tolerance) -> list[dict]:
    """The last hidden state against the checkpoint's in three readings, a row each. UserError names a wrong one.

    norm: the target's final norm, as a function.
    """
    mine, right = [last for _, last in states], [s.last for s in truth]
    readings = {"after the final norm": right, "before it": [s.residual[-1] for s in truth],
                "after it twice": [norm(last) for last in right]}
    found = {name: over_rows(mine, reference) for name, reference in readings.items()}
    own = found["after the final norm"]
    if not allowed.fits(own):
        raise UserError(explain_last(found, mine, right, allowed))
    return [{"last is the stream": name, "relative error": float(e.max()), "median": median(e)}
            for name, e in found.items()]


def explain_last(found, mine, right, allowed: Tolerance) -> str:
    if allowed.fits(found["before it"]):
        return ("probe: the last hidden state is the stream before the final norm (vLLM's convention); the store needs "
                "states after that norm, as Transformers and SGLang give them")
    if allowed.fits(found["after it twice"]):
        return "probe: the last hidden state has gone through the final norm twice; the store needs it once"
    kind, i, j = misplaced(mine, right, allowed)
    if kind == "row":
        return (f"probe: the last state of row {i} is that of row {j}: the engine gives rows back in another order; "
                f"{OTHER_ENGINE}")
    if kind:
        return (f"probe: the last hidden state stands one token too {kind}: states and tokens are shifted against one "
                f"another; {OTHER_ENGINE}")
    own = found["after the final norm"]
    if median(own) <= allowed.middle:
        row, token = locate(own, mine)
        return (f"probe: the last hidden state is off by {float(own.max()):.2g} at row {row}, token {token} (at most "
                f"{allowed.limit:g} is rounding): a kernel or the batching is at fault; {OTHER_ENGINE}")
    return (f"probe: the last hidden state differs by {median(own):.2g} a token from the checkpoint's, with or without "
            "the final norm: the engine runs another final norm or other last layers; give it the directory of "
            "`target`, unchanged")


def locate(values: torch.Tensor, rows) -> tuple[int, int]:
    """(row, token) of the largest of all rows' values."""
    at = int(values.argmax())
    for row, part in enumerate(rows):
        if at < len(part):
            return row, at
        at -= len(part)
    raise IndexError(at)
