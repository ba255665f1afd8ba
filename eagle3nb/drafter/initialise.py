"""Where training starts: random weights, or the target's own.

A drafter guesses the target's next-but-one token: given a[t] and x[t+1] it should produce the target's last hidden
state at t + 1. So the parts that turn such a state into a guess are the target's (final norm, lm_head rows of D), and
fc is the best linear guess of that state from a[t], fitted to the store by ridge regression in a few seconds. The
attention and the MLP start as the target's last layer, damped so that the first steps do not drown fc's guess.
"""

from pathlib import Path

import torch
from torch import Tensor

from eagle3nb.drafter.model import DraftModel
from eagle3nb.errors import UserError
from eagle3nb.states.target import facts_of, read_weights, spelt, weight_files

DAMPING = 0.1       # of o_proj and down_proj taken from the target
RIDGE = 1e-2        # of the mean diagonal of the normal equations
FITTED = 100_000    # positions that the regression reads at most
LAYER = ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
         "mlp.down_proj.weight", *(f"self_attn.{name}_proj.weight" for name in "qkvo"))


def target_weights(folder) -> dict[str, Tensor]:
    """The target's final norm (`norm.weight`) and what its last layer has of LAYER (`layer.<name>`), as stored.

    Reads those tensors alone: a mixture of experts has gigabytes in its last layer that fit nowhere here.
    """
    files, last = weight_files(Path(folder)), facts_of(folder).layers - 1
    names = {f"layer.{name}": f"model.layers.{last}.{name}" for name in LAYER}
    names = {"norm.weight": "model.norm.weight"} | {k: v for k, v in names.items() if spelt(v, files)}
    found = read_weights(folder, names.values())
    return {short: found[name] for short, name in names.items()}


def initialise(model: DraftModel, how: str, *, head: Tensor, weights: dict[str, Tensor], rows, seed: int) -> None:
    """In place. how: "random", "target" (all of the above) or "head" (final norm and lm_head rows alone).

    head [D, h]: the target's lm_head rows of D; weights as from target_weights; rows: an iterable of stored rows, read
    only where fc is fitted. Raises UserError for another name.
    """
    if how not in ("random", "head", "target"):
        raise UserError(f"initialise is {how!r}; choose target, head or random")
    random_weights(model, seed)
    if how == "random":
        return
    with torch.no_grad():
        model.norm.weight.copy_(weights["norm.weight"])
        model.lm_head.weight.copy_(head)
        if how == "target":
            last_layer(model, weights)
            model.fc.weight.copy_(fitted_fc(model, rows))


def random_weights(model: DraftModel, seed: int) -> None:
    """Normal, 1/√fan-in, norms 1; a generator of its own, so that the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)


def last_layer(model: DraftModel, weights: dict[str, Tensor]) -> None:
    """The target's last layer where shapes fit: q, k, v on the half that reads g, o and the MLP damped.

    The half of q, k, v that reads the token's embedding keeps its random weights: no layer of the target reads it.
    Parts whose shapes differ (MLA, another intermediate size) stay random.
    """
    h, layer = model.config.hidden, model.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        source, linear = weights.get(f"layer.self_attn.{name}.weight"), getattr(layer.self_attn, name)
        if source is not None and source.shape == linear.weight[:, h:].shape:
            linear.weight[:, h:].copy_(source)
            linear.weight[:, :h].mul_(source.float().std() * h ** 0.5)     # as large as the other half
    parts = {"self_attn.o_proj": DAMPING, "mlp.gate_proj": 1.0, "mlp.up_proj": 1.0, "mlp.down_proj": DAMPING}
    for name, factor in parts.items():
        source, linear = weights.get(f"layer.{name}.weight"), layer.get_submodule(name)
        if source is not None and source.shape == linear.weight.shape:
            linear.weight.copy_(source)
        linear.weight.mul_(factor)
    norms = {"input_layernorm": layer.hidden_norm, "post_attention_layernorm": layer.post_attention_layernorm}
    for name, norm in norms.items():
        if f"layer.{name}.weight" in weights:
            norm.weight.copy_(weights[f"layer.{name}.weight"])


def fitted_fc(model: DraftModel, rows) -> Tensor:
    """fc [h, 3h] by ridge regression of y on a[t], where norm(y) is the target's last hidden state at t + 1.

    Only slots that count at step 0 enter, so the first token's massive activations (2·10⁴ in SmolLM2) do not. Columns
    are scaled to unit variance before the ridge, since the layers' scales differ by orders of magnitude.
    """
    width, hidden = model.fc.weight.shape[1], model.config.hidden
    A, B, n = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, hidden, dtype=torch.float64), 0
    for row in rows:
        positions = torch.as_tensor(row.last_positions).long()
        keep = positions > 0
        a = row.aux[positions[keep] - 1].float()                                      # a[t], t = p − 1
        a = model.normed_chunks(a)
        y = row.last[keep].float() / model.norm.weight
        A += (a.T @ a).double()
        B += (a.T @ y).double()
        n += len(a)
        if n >= FITTED:
            break
    scale = (A.diagonal() / max(n, 1)).sqrt().clamp(min=1e-6)
    A = A / scale[:, None] / scale[None] + RIDGE * max(n, 1) * torch.eye(width, dtype=torch.float64)
    solution = torch.linalg.solve(A, B / scale[:, None]) / scale[:, None]              # [3h, h]
    return solution.T.to(model.fc.weight.dtype)
