"""What a target's states should be: the checkpoint's own forward by Transformers, float32, on the CPU, a row at a time.

It shares nothing with an engine but the files: loaded anew, in Transformers' own attention, with Transformers' own list
of hidden states. Of a target too large for this machine the first layers are loaded: they tell the first captured ones.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoConfig
from transformers.utils import logging

from eagle3nb.files import read_json
from eagle3nb.states import target as targets
from eagle3nb.states.hf import model_class, text_backbone

LARGEST = 64 << 30  # bytes of float32 weights that are worth loading for a check
FAILURES = (ImportError, OSError, ValueError, KeyError, AttributeError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class Streams:
    """One row. residual [depth + 1, T, h]: after 0, 1, … layers; last [T, h] after the final norm and logits [T, V]:
    None where the model is loaded in part."""

    residual: torch.Tensor
    last: torch.Tensor | None
    logits: torch.Tensor | None


class Reference:
    """The first `depth` of the target's `layers` layers."""

    def __init__(self, model, depth: int, layers: int):
        self.model, self.depth, self.layers = model, depth, layers
        self.whole = depth == layers

    @torch.inference_mode()
    def streams(self, ids) -> Streams:
        raw = []
        hook = text_backbone(self.model).norm.register_forward_pre_hook(lambda module, inputs: raw.append(inputs[0]))
        try:
            out = self.model(input_ids=torch.tensor([list(map(int, ids))]), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        # Transformers' last entry is after the final norm; the norm's input is the last residual stream.
        residual = torch.cat([*out.hidden_states[: self.depth], raw[-1]])
        if not self.whole:
            return Streams(residual, None, None)
        return Streams(residual, out.hidden_states[-1][0], out.logits[0])


def load_reference(folder: str | Path, layers, limit: int | None = None) -> tuple[Reference | None, str]:
    """(the reference or None, what it is or why there is none), within `limit` bytes (None: 70 % of the free memory).

    `layers`: the captured ones. Loaded whole where it fits, else far enough to see them, and the layer after, in turn.
    """
    folder, count = Path(folder), targets.facts_of(folder).layers
    limit = min(LARGEST, int(0.7 * psutil.virtual_memory().available)) if limit is None else limit
    if "quantization_config" in (folder / "config.json").read_text():
        return None, "the checkpoint is quantised: its weights are not what a plain forward reads"
    rest, sizes = parameter_counts(folder, count)
    for depth in (count, *(layer + 1 for layer in reversed(layers) if layer + 1 < count)):
        needed = 4 * (rest + sum(sizes[:depth]))
        if needed > limit:
            continue
        try:
            model = load_layers(folder, count, depth)
        except FAILURES as error:
            return None, f"Transformers cannot load the checkpoint ({str(error).strip().splitlines()[0][:160]})"
        what = f"all {count} layers" if depth == count else f"the first {depth} of {count} layers"
        return Reference(model, depth, count), f"{what}, {needed / 1e9:,.1f} GB in float32"
    return None, f"its first {layers[0] + 1} layers take {needed / 1e9:,.1f} GB, {limit / 1e9:,.1f} GB may be used"


def parameter_counts(folder: Path, count: int) -> tuple[int, list[int]]:
    """(parameters outside the decoder's layers, those of each layer), from the headers of the weights' files."""
    files = targets.weight_files(folder)
    prefix = (targets.spelt("model.embed_tokens.weight", files) or "").removesuffix("embed_tokens.weight")
    place = re.compile(re.escape(prefix) + r"layers\.(\d+)\.")
    rest, sizes, held = 0, [0] * count, {}
    for name, file in files.items():
        held.setdefault(file, []).append(name)
    for file, names in held.items():
        with safe_open(file, "pt") as handle:
            for name in names:
                size = torch.Size(handle.get_slice(name).get_shape()).numel()
                at = place.match(name)
                if not at:
                    rest += size
                elif int(at[1]) < count:  # layers beyond are for multi-token prediction: not loaded
                    sizes[int(at[1])] += size
    return rest, sizes


def load_layers(folder: Path, count: int, depth: int):
    """The checkpoint's model with its first `depth` layers. ValueError for weights that the files have not."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    shorten(config.get_text_config(), count, depth)
    with silence():
        model, info = model_class(folder).from_pretrained(folder, config=config, dtype=torch.float32,
                                                          local_files_only=True, trust_remote_code=False,
                                                          output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"no weights for {min(info['missing_keys'])}")
    return model.eval().requires_grad_(False)


def shorten(config, count: int, depth: int) -> None:
    """A text config for the first `depth` of `count` layers: what it lists a layer is cut as well."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and depth < count:
            setattr(config, key, value[:depth])
    config.num_hidden_layers = depth


@contextmanager
def silence():
    """Without progress bars and the report of weights that a shortened model does not take."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def final_norm(folder: str | Path):
    """The target's final norm as a function of float32 states [., h].

    The norm of the checkpoint's own class (Gemma's adds one to its weight); of a model that Transformers has not, the
    plain RMSNorm of the config's eps.
    """
    weight = targets.final_norm(folder).float()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        shorten(config.get_text_config(), targets.facts_of(folder).layers, 1)
        with silence(), torch.device("meta"):
            norm = text_backbone(model_class(Path(folder))(config)).norm
    except FAILURES:
        eps = targets.facts_of(folder).eps
        return lambda states: F.rms_norm(states.float().cpu(), weight.shape, weight, eps)
    norm = norm.to_empty(device="cpu").float().requires_grad_(False)
    norm.weight.data = weight
    return torch.inference_mode()(lambda states: norm(states.float().cpu()))


def logit_changes(folder: str | Path) -> list[str]:
    """What the config does to logits behind the head (a cap, a scale), as `key value`: the drafter's head does not."""
    config = targets.text_config(folder, read_json(Path(folder) / "config.json"))
    neutral = (None, False, 0, 1, 1.0)
    keys = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return [f"{key} {config[key]}" for key in keys if config.get(key) not in neutral]
