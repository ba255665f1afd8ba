"""The target run by Transformers: hidden states, logits, decoding. Float32 on a CPU, or on one GPU.

Right padding needs no attention mask here: with causal attention a real token never sees the pads behind it, and
without a mask the fast causal kernel runs. Only the three captured layers are kept, by hooks, and the lm_head runs
only where logits are asked for.

Shapes: B rows, T tokens, h hidden, V vocabulary; aux [T, 3h] = HF hidden_states[i] for the captured layers i, side by
side; last [T, h] = after the final norm (probed, not assumed: see probe.py).
"""

import time
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.utils import logging

from eagle3nb.errors import UserError
from eagle3nb.files import shown
from eagle3nb.states import generation
from eagle3nb.states.target import captured_layers, facts_of


class TransformersTarget:
    """A target that is loaded. `.facts`, `.layers` (captured), `.dtype`, `.device`; `.version` of Transformers.

    `.load_s`: the seconds that loading took.
    """

    engine, version = "transformers", transformers.__version__

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32, device: str | None = None):
        began = time.perf_counter()
        self.dir = Path(folder)
        self.facts = facts_of(folder)
        self.layers = captured_layers(self.facts.layers)
        self.dtype = dtype
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = load(self.dir, dtype).to(self.device).eval().requires_grad_(False)
        self.body = text_backbone(self.model)
        self.body.config.output_hidden_states = False  # some checkpoints ask for all layers, whoever calls
        self.head = self.model.get_output_embeddings()
        self.kept = {}  # captured layer → its last output [B, T, h]
        for layer in self.layers:  # hidden_states[i] is the output of layer i − 1
            self.body.layers[layer - 1].register_forward_hook(self.keep(layer))
        self.load_s = time.perf_counter() - began

    def keep(self, layer: int):
        def hook(module, inputs, output):
            self.kept[layer] = output[0] if isinstance(output, tuple) else output
        return hook

    def aux(self) -> torch.Tensor:
        """The captured layers of the last forward, side by side [B, T, 3h]."""
        return torch.cat([self.kept.pop(layer) for layer in self.layers], dim=-1)

    @torch.inference_mode()
    def capture(self, rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(aux [T, 3h], last [T, h]) of each row of ids, in one right-padded batch. The lm_head is not run."""
        width = max(len(ids) for ids in rows)
        # Pinned for a GPU, so that the copy does not wait for the forward before.
        batch = torch.zeros(len(rows), width, dtype=torch.long, pin_memory=self.device.type == "cuda")
        for ids, row in zip(rows, batch, strict=True):
            row[: len(ids)] = torch.as_tensor(ids)
        ids = batch.to(self.device, non_blocking=True)
        last = self.body(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, h]
        aux = self.aux()
        return [(aux[i, : len(ids)], last[i, : len(ids)]) for i, ids in enumerate(rows)]

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[., h] after the final norm → [., V], in the target's dtype. The caller bounds the rows: 4 V bytes each."""
        return self.head(last.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, cache=None, room: int = 0):
        """The decode's step: ids [1, n] after what `cache` holds → (aux [n, 3h], last [n, h], cache).

        Give the returned cache back with the next tokens; `cache.crop(n)` keeps its first n positions, and a negative n
        removes as many. With `room`, tokens that will follow at most, a plain model's keys and values are written in
        place; Transformers' own cache, which knows every kind of layer, is copied at each step.
        """
        ids = ids.to(self.device)
        if cache is None and room and generation.batched(self):
            cache = generation.ChainCache(ids.shape[1] + room)
        if isinstance(cache, generation.ChainCache):
            mask = cache.grow(ids.shape[1], self.device)
            out = self.body(input_ids=ids, attention_mask=mask, position_ids=cache.places, past_key_values=cache,
                            use_cache=True)
        else:
            cache = DynamicCache(config=self.body.config) if cache is None else cache
            out = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
        return self.aux()[0], out.last_hidden_state[0], cache

    @torch.inference_mode()
    def generate(self, prompts, *, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed=0,
                 stop_ids=(), beyond: int = 0, batch: int = 24, done=None) -> list[list[int]]:
        """New tokens for each prompt (ids), greedy at temperature 0, else sampled; see generation.generate."""
        return generation.generate(self, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
                                   seed=seed, stop_ids=stop_ids, beyond=beyond, batch=batch, done=done)

    def close(self) -> None:
        """What both engines have: after it the target is of no use, and its memory is free."""
        self.model = self.body = self.head = None
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def load(folder: Path, dtype: torch.dtype):
    """The checkpoint's language model in `dtype`; one line when Transformers cannot."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # "Loading weights" would be one output a refresh in a record
    try:
        kind = model_class(folder)
        # Attention sinks (gpt-oss) are in no SDPA kernel: such a model says so, and runs in plain attention.
        attention = generation.ATTENTION if kind._supports_sdpa else "eager"
        model, info = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention, local_files_only=True,
                                           trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"]:  # Transformers would go on with random ones
            raise ValueError(f"it has no weights for {min(info['missing_keys'])}; copy the whole checkpoint")
        return model
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"Transformers cannot load the target {shown(folder)}: {first}") from error
    finally:
        if bars:
            logging.enable_progress_bar()


def model_class(folder: Path):
    """Transformers' class for the checkpoint: a multimodal wrapper as a whole, since its weights are spelt for that.

    Raises ValueError for a model that Transformers has not; code that came with a checkpoint is never run.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for kind in kinds if config.get_text_config() is config else reversed(kinds):
        if type(config) in kind._model_mapping:
            return kind._model_mapping[type(config)]
    raise ValueError(f"{type(config).__name__} has no language model class; use engine=sglang")


def text_backbone(model):
    """The module that holds `.layers` and `.norm`: the model's body, through the wrappers around it."""
    body = model.get_decoder()
    while body is not None and not (hasattr(body, "layers") and hasattr(body, "norm")):
        body = getattr(body, "language_model", None) or getattr(body, "model", None)
    if body is None:
        raise UserError(f"{type(model).__name__} has no plain stack of layers with a final norm; its states "
                        "cannot be captured by engine=transformers")
    return body
