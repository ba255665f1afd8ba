"""Where training starts. Every choice but "random" takes the final norm and the lm_head rows of D from the target.

    fitted   fc, attention and MLP by closed-form regression on the store (fitting.py), gate and up from the last layer
    target   fc by regression, the last layer's attention and MLP with their outputs at nothing (o_proj, down_proj zero)
    head     norm and head alone, the rest random
    random   everything random
"""

from pathlib import Path

import torch
from torch import Tensor

from eagle3nb.drafter.fitting import fit, fit_fc
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.settings import CHOICES
from eagle3nb.errors import UserError
from eagle3nb.states.target import facts_of, read_weights, spelt, weight_files

LAYER = ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
         *(f"self_attn.{name}_proj.weight" for name in "qkv"))


def target_weights(folder) -> dict[str, Tensor]:
    """The target's final norm (`norm.weight`) and what its last layer has of LAYER (`layer.<name>`), as stored.

    Reads those tensors alone: a mixture of experts has gigabytes in its last layer that fit nowhere here.
    """
    files, last = weight_files(Path(folder)), facts_of(folder).layers - 1
    names = {f"layer.{name}": f"model.layers.{last}.{name}" for name in LAYER}
    names = {"norm.weight": "model.norm.weight"} | {k: v for k, v in names.items() if spelt(v, files)}
    found = read_weights(folder, names.values())
    return {short: found[name] for short, name in names.items()}


def initialise(model: DraftModel, how: str, *, head: Tensor, weights: dict[str, Tensor], rows, steps: int,
               seed: int) -> None:
    """In place, on the CPU. UserError for another choice.

    head [D, h]: the target's lm_head rows of D; weights as from target_weights; rows: an iterable of stored rows, read
    only where something is fitted; steps: K of the chain that is fitted.
    """
    if how not in CHOICES:
        raise UserError(f"initialise is {how!r}; choose one of {', '.join(CHOICES)}")
    random_weights(model, seed)
    if how == "random":
        return
    with torch.no_grad():
        model.norm.weight.copy_(weights["norm.weight"])
        model.lm_head.weight.copy_(head)
        if how == "head":
            return
        last_layer(model, weights, attention=how == "target")
        if how == "fitted":
            fit(model, rows, steps)
        else:
            fit_fc(model, rows)


def random_weights(model: DraftModel, seed: int) -> None:
    """Normal, 1/√fan-in, norms 1; a generator of its own, so that the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)


def last_layer(model: DraftModel, weights: dict[str, Tensor], attention: bool) -> None:
    """The target's last layer where shapes fit; o_proj and down_proj zero.

    Zero, since the target's residual stream is some fifty times larger than what is fitted here (unit variance): its o
    and down weights, even damped tenfold, drown the guess of fc (measured: accuracy 0.26 against 0.01). q, k, v are
    taken on the half that reads g; no layer of the target reads the token's embedding, so that half stays random.
    Parts whose shapes differ (MLA, experts, another intermediate size) stay random.
    """
    h, layer = model.config.hidden, model.midlayer
    parts = {"mlp.gate_proj": layer.mlp.gate_proj.weight, "mlp.up_proj": layer.mlp.up_proj.weight,
             "post_attention_layernorm": layer.post_attention_layernorm.weight}
    if attention:
        parts |= {f"self_attn.{x}_proj": layer.self_attn.get_submodule(f"{x}_proj").weight[:, h:] for x in "qkv"}
        parts["input_layernorm"] = layer.hidden_norm.weight
    for name, here in parts.items():
        source = weights.get(f"layer.{name}.weight")
        if source is not None and source.shape == here.shape:
            here.copy_(source)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
