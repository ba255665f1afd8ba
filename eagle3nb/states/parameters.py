"""How many parameters a target has, and what its weights take in memory: from config.json, or from the files there."""

from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import read_json

# Bytes of a parameter, and of one in a routed expert; int4 has a bf16 scale for each 32 values.
WEIGHTS = {"fp32": (4, 4), "bf16": (2, 2), "fp8": (1, 1), "int4": (2, 4.5 / 8)}


def parameters(config: dict) -> dict:
    """Parameters of a decoder from config.json (its text_config), by part, with "total" and "active" (a token's).

    Dense and mixture-of-experts layers, plain and MLA attention, by the names that DeepSeek, Qwen and Mixtral use.
    Biases, norms inside attention, a vision tower and multi-token-prediction layers are left out: below 0.1 % of text
    backbones. UserError where a size is missing.
    """
    c = config.get("text_config") or config
    try:
        h, layers, vocab = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
        sparse = sum(is_sparse(c, layer) for layer in range(layers))
        expert = c.get("moe_intermediate_size") or c["intermediate_size"]
        experts, chosen = experts_of(c)
        shared = c.get("shared_expert_intermediate_size") or (c.get("n_shared_experts") or 0) * expert
        tied = c.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        parts = {"embedding": vocab * h, "head": 0 if tied else vocab * h, "attention": layers * attention_of(c),
                 "dense MLP": (layers - sparse) * 3 * h * c["intermediate_size"],
                 "routed experts": sparse * experts * 3 * h * expert,
                 "shared experts": sparse * 3 * h * shared, "routers": sparse * experts * h,
                 "norms": (2 * layers + 1) * h}
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]}; the target's memory cannot be told without it") from None
    total = sum(parts.values())
    idle = parts["routed experts"] * (experts - chosen) // max(experts, 1) + (0 if tied else parts["embedding"])
    return parts | {"total": total, "active": total - idle}


def experts_of(c: dict) -> tuple[int, int]:
    """(routed experts of a layer, those that a token takes)."""
    count = c.get("n_routed_experts") or c.get("num_local_experts") or c.get("num_experts") or 0
    return count, c.get("num_experts_per_tok") or 0


def is_sparse(c: dict, layer: int) -> bool:
    """Does the layer hold experts? DeepSeek: all but the first few; Qwen: every n-th but those listed."""
    every = c.get("moe_layer_freq") or 1
    step = c.get("decoder_sparse_step") or 1
    return (experts_of(c)[0] > 0 and layer >= (c.get("first_k_dense_replace") or 0) and (layer + 1) % step == 0
            and (not isinstance(every, int) or layer % every == 0) and layer not in (c.get("mlp_only_layers") or ()))


def attention_of(c: dict) -> int:
    """Weights of one layer's attention."""
    h, heads = c["hidden_size"], c["num_attention_heads"]
    if rank := c.get("kv_lora_rank"):  # MLA: queries and keys through low ranks, a part of each key shared by all heads
        rope, nope, v = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        queries = heads * (nope + rope)
        down = c.get("q_lora_rank")
        return ((h + queries) * down + down if down else h * queries) + h * (rank + rope) + rank \
            + rank * heads * (nope + v) + heads * v * h
    per_head = c.get("head_dim") or h // heads
    return 2 * h * per_head * (heads + (c.get("num_key_value_heads") or heads))


def weights_bytes(folder: str | Path, dtype: str) -> tuple[int, str]:
    """(bytes of the loaded target, how that is told). dtype: fp32, bf16, fp8, int4 (routed experts) or stored."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if dtype == "stored" and files:
        return sum(file.stat().st_size for file in files), f"{len(files)} safetensors files, as they are"
    if dtype not in WEIGHTS:
        known = ", ".join(WEIGHTS)
        raise UserError(f"weights_dtype {dtype!r} is unknown, or the weights are not there; choose one of {known}")
    counts, (size, expert) = parameters(read_json(folder / "config.json")), WEIGHTS[dtype]
    experts = counts["routed experts"]
    rest = counts["total"] - experts
    if expert == size or not experts:
        return round(size * counts["total"]), f"{counts['total'] / 1e6:,.0f} M parameters × {size:g} bytes"
    return (round(expert * experts + size * rest),
            f"{experts / 1e9:,.1f} B in routed experts × {expert:g} + {rest / 1e9:,.2f} B × {size:g} bytes")
