"""Export to the checkpoint that SGLang and vLLM load as LlamaForCausalLMEagle3, checked before anybody serves it.

Engines skip names they do not know and fill in what config.json leaves out, so a wrong export loads, drafts and is
silently bad. `export` therefore writes, `check` reads back names, shapes, dtypes and the vocabulary mapping, and
`parity` compares the reloaded weights' logits, by a forward written out here a second time, with the drafter's own.

The captured layers stand under a key of ours, `eagle3nb.captured_layers`, as indices into HF `hidden_states`. The
engines' own key (eagle_config.eagle_aux_hidden_state_layer_ids) is left out on purpose: SGLang takes its ids as layer
outputs and adds one, vLLM does not, and both default to the very layers (2, n//2, n−3) that are captured.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3nb.drafter import flags
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.ttt import steps
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, fresh_folder, read_json, replace_folder, shown, write_json
from eagle3nb.states.target import TargetFacts, captured_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "draft_vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "torch_dtype")
FILES = {"config.json", "model.safetensors", "README.md"}  # an export; the card describes these very weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(model: DraftModel, folder: str | Path, *, target_layers: int, eos: tuple[int, ...] = (),
           bos: int | None = None, dtype: str = "float32", target: TargetFacts | None = None, captured=None) -> dict:
    """Write config.json and model.safetensors, check them, put them in `folder`'s place; returns the config.

    What stands there stays whole until then; its model card goes with its weights.

    The embedding is left out: engines share the target's. dtype: float32, bfloat16 or float16. With `target`, and
    `captured` (the layers of the states that trained the drafter), raises UserError before anything is written where
    an engine would load the export and be silently wrong (flags.refuse).
    """
    if dtype not in DTYPES:
        raise UserError(f"an export in {dtype!r} is read by no engine; choose one of {', '.join(DTYPES)}")
    folder = Path(folder)
    config = engine_config(model.config, target_layers, eos, bos, dtype)
    if target is not None:
        flags.refuse(flags.table(model.config, config, target, captured=captured))
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    tensors = {name: x.to(DTYPES[dtype]) if x.is_floating_point() else x for name, x in kept.items()}
    with fresh_folder(folder) as new:
        with atomic_write(new / "model.safetensors", "wb") as handle:
            handle.write(save(tensors, metadata={"format": "pt"}))
        write_json(new / "config.json", config)
        check(new, folder)
        replace_folder(new, folder, FILES)
    return config


def engine_config(c: DraftConfig, target_layers: int, eos, bos, dtype: str) -> dict:
    """What the engines read. RoPE in both spellings: rope_parameters, and the older rope_theta + rope_scaling."""
    rope = flags.portable(c.rope, c.max_positions)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE], "model_type": "llama", "torch_dtype": dtype,
        "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "rms_norm_eps": c.eps, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "vocab_size": c.vocab, "draft_vocab_size": c.draft_vocab, "max_position_embeddings": c.max_positions,
        "rope_parameters": rope, "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "bos_token_id": bos, "eos_token_id": list(eos) if len(eos) != 1 else eos[0],
        "target_hidden_size": c.hidden, "num_aux_hidden_states": 3, "norm_before_residual": False,
        "norm_before_fc": False, "fc_norm": c.fc_norm, "norm_output": c.norm_output,
        "eagle3nb": {"captured_layers": list(captured_layers(target_layers)),
                     "convention": "index into HF hidden_states: the residual stream after that many layers"},
    }


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, from its config alone."""
    h, D, m = config["hidden_size"], config["draft_vocab_size"], config["intermediate_size"]
    queries, keys = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (D, h), "d2t": (D,),
              "t2d": (config["vocab_size"],), "midlayer.self_attn.q_proj.weight": (queries, 2 * h),
              "midlayer.self_attn.k_proj.weight": (keys, 2 * h), "midlayer.self_attn.v_proj.weight": (keys, 2 * h),
              "midlayer.self_attn.o_proj.weight": (h, queries), "midlayer.mlp.gate_proj.weight": (m, h),
              "midlayer.mlp.up_proj.weight": (m, h), "midlayer.mlp.down_proj.weight": (h, m)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}.weight": (h,) for name in norms}
    return shapes | {f"fc_norm.{i}.weight": (h,) for i in range(3 if config.get("fc_norm") else 0)}


def check(folder: str | Path, called: Path | None = None) -> dict:
    """Names, shapes, dtypes, mapping and flags of an export; returns its config. UserError says what is wrong.

    called: what the folder is to be, where it is not there yet.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")

    def refuse(what: str):
        raise UserError(f"{shown(called or folder)} would load and be wrong: {what}; export it again")

    for key, value in {"architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1,
                       "tie_word_embeddings": False, "norm_before_residual": False, "norm_before_fc": False}.items():
        if config.get(key) != value:
            refuse(f"config.json has {key} {config.get(key)!r} instead of {value!r}")
    if missing := [key for key in NEEDED if key not in config]:
        refuse(f"config.json lacks {', '.join(missing)}")
    shapes, kind = expected_shapes(config), DTYPES[config["torch_dtype"]]
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shown(folder)} holds no whole model.safetensors ({error}); export it again") from None
    if unknown := sorted(set(tensors) - set(shapes)):
        refuse(f"tensors {', '.join(unknown)} are known to no engine")
    for name, shape in shapes.items():
        if name not in tensors:
            refuse(f"tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            refuse(f"{name} is {tuple(tensors[name].shape)}, config.json makes it {shape}")
        wanted = {"d2t": torch.int64, "t2d": torch.bool}.get(name, kind)
        if tensors[name].dtype != wanted:
            refuse(f"{name} is {tensors[name].dtype}, not {wanted}")
        if tensors[name].is_floating_point() and not torch.isfinite(tensors[name]).all():
            refuse(f"{name} has values that are not finite")
    ids = tensors["d2t"].numpy() + np.arange(len(tensors["d2t"]))
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config["vocab_size"]:
        refuse("d2t does not map to ascending target ids")
    if not np.array_equal(np.flatnonzero(tensors["t2d"].numpy()), ids):
        refuse("t2d and d2t disagree")
    return config


def rounded(model: DraftModel, dtype: str) -> DraftModel:
    """The drafter with its weights rounded as an export in `dtype` has them; float32, on the CPU."""
    made = DraftModel(model.config, model.embed_tokens.cpu(), model.vocabulary_ids.cpu()).float()
    made.load_state_dict({name: tensor.cpu().to(DTYPES[dtype]).float() if tensor.is_floating_point() else tensor.cpu()
                          for name, tensor in model.state_dict().items()})
    return made


@torch.no_grad()
def parity(model: DraftModel, folder: str | Path, *, tokens: int = 24, seed: int = 0) -> float:
    """Largest difference between the drafter's logits and those of the export, reloaded, on random states; step 0.

    Relative to the largest logit; 1e-5 is what float32 allows. The export's side uses only what lies in `folder` and
    the target's embedding. Of an export in half precision the drafter's side is rounded alike.
    """
    model = rounded(model, read_json(Path(folder) / "config.json")["torch_dtype"])
    generator = torch.Generator().manual_seed(seed)
    c = model.config
    ids = torch.randint(c.vocab, (tokens + 1,), generator=generator)
    aux = torch.randn(tokens, 3 * c.hidden, generator=generator)
    ours = model.logits(steps(model, ids, torch.cat([aux, aux[-1:]]), torch.zeros(tokens + 1, dtype=torch.int64),
                              [torch.arange(tokens)])[0])
    reloaded = forward(read_json(Path(folder) / "config.json"), load_file(Path(folder) / "model.safetensors"),
                       model.embed_tokens[ids[1:]].float(), aux)
    return float((ours - reloaded).abs().max() / ours.abs().max())


def forward(config: dict, tensors: dict[str, Tensor], e: Tensor, aux: Tensor) -> Tensor:
    """Logits [N, D] of one causal pass over N slots, as an engine computes them: e [N, h] embeddings, aux [N, 3h]."""
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor.float() for name, tensor in tensors.items()}
    h, dh, N = config["hidden_size"], config["head_dim"], len(e)

    def norm(x, weight):
        return F.rms_norm(x, (h,), weight, config["rms_norm_eps"])

    if config["fc_norm"]:
        aux = torch.cat([norm(aux[:, i * h:(i + 1) * h], w[f"fc_norm.{i}"]) for i in range(3)], -1)
    g = F.linear(aux, w["fc"])
    u = torch.cat([norm(e, w["input_layernorm"]), norm(g, w["hidden_norm"])], -1)
    q, k, v = (F.linear(u, w[f"self_attn.{x}_proj"]).view(N, -1, dh).transpose(0, 1)[None] for x in "qkv")
    llama = LlamaConfig(**{key: config[key] for key in NEEDED if key not in ("draft_vocab_size", "torch_dtype")})
    cos, sin = LlamaRotaryEmbedding(llama)(e, torch.arange(N)[None])
    turn = torch.cat([torch.eye(dh)[dh // 2:], -torch.eye(dh)[:dh // 2]])              # x @ turn = (−second, first)
    q, k = (x * cos + (x @ turn) * sin for x in (q, k))
    attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).reshape(N, -1)
    x = g + F.linear(attn, w["self_attn.o_proj"])
    y = norm(x, w["post_attention_layernorm"])
    x = x + F.linear(F.silu(F.linear(y, w["mlp.gate_proj"])) * F.linear(y, w["mlp.up_proj"]), w["mlp.down_proj"])
    return F.linear(norm(x, w["norm"]), w["lm_head"])


def tensor_table(folder: str | Path) -> list[dict]:
    """Name, shape, dtype of every tensor, for the record."""
    with safe_open(Path(folder) / "model.safetensors", "pt") as handle:
        return [{"tensor": name, "shape": " × ".join(map(str, handle.get_slice(name).get_shape())),
                 "dtype": handle.get_slice(name).get_dtype()} for name in handle.keys()]  # noqa: SIM118 (no mapping)
