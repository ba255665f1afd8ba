"""What the trainer did beside what each engine makes of an export's config.json, setting by setting.

An engine says nothing of a key that it does not know, and fills in what is missing with a default of its own. So each
setting is read here as the engine's code reads it, default included, and compared with the drafter's own value: where
they differ the export would load, draft and be wrong in silence, and `refuse` says so.

SGLang 0.5.23 as its source reads (PLACES names file and function; its claims on norms, RoPE, biases and heads are held
against the real class by tests/sglang/test_parity.py). vLLM 0.32.0 from the notes and as the source in its wheel reads,
which was not run for this table: model_executor/models/llama_eagle3.py and llama.py, layers/rotary_embedding/,
v1/worker/gpu_model_runner._get_eagle3_aux_layers_from_config, config/speculative.py. Versions before them may ignore
keys.
"""

import math
from contextlib import suppress
from importlib import metadata

from eagle3nb.drafter.model import DraftConfig
from eagle3nb.errors import UserError
from eagle3nb.states.target import TargetFacts, captured_layers

VERSIONS = {"SGLang": "0.5.23", "vLLM": "0.32.0"}  # whose source was read
OFF_BY_ONE = ("MiniMaxM3SparseForConditionalGeneration",)  # SGLang adds one to its default layers too
SHIFTED_FROM_1 = ("Deepseek", "Kimi", "Glm4MoeLite")  # SGLang adds one to explicit ids only if the first is 1
SILENT_WHERE_OLD = ("fc_norm", "norm_output")  # EAGLE-3.1: an engine before them ignores both keys

# setting → (keys of config.json, the engines' defaults where they are missing, where SGLang reads them)
PLACES = {
    "captured layers": ("eagle_config.eagle_aux_hidden_state_layer_ids", "2, n//2, n−3 of n",
                        "spec_aux_hidden_state._resolve_eagle_aux_hidden_state"),
    "layers joined": ("num_aux_hidden_states", "3", "llama_eagle3.LlamaModel"),
    "norm of the joined states": ("norm_before_fc", "false", "llama_eagle3.LlamaModel"),
    "norm of each captured layer": ("fc_norm", "false", "llama_eagle3.LlamaModel"),
    "normed state to the next step": ("norm_output", "false", "llama_eagle3.LlamaModel"),
    "residual of the normed state": ("norm_before_residual", "false; SGLang has no such key",
                                     "llama_eagle3.LlamaDecoderLayer.forward"),
    "eps of the norms": ("rms_norm_eps", "1e-6", "llama_eagle3.LlamaModel"),
    "draft layers": ("num_hidden_layers", "32", "llama_eagle3.LlamaModel"),
    "hidden size": ("hidden_size", "4096", "llama_eagle3.LlamaModel"),
    "MLP width": ("intermediate_size", "11008", "llama_eagle3.LlamaDecoderLayer"),
    "heads, key heads, head size": ("num_attention_heads, num_key_value_heads, head_dim", "32, as heads, h / heads",
                                    "llama.LlamaAttention"),
    "RoPE": ("rope_parameters, rope_scaling, rope_theta", "default, theta 10,000", "llama.LlamaDecoderLayer, get_rope"),
    "biases": ("attention_bias, mlp_bias, bias", "none", "llama_eagle3.LlamaDecoderLayer"),
    "activation": ("hidden_act", "silu", "llama.LlamaMLP"),
    "attention window": ("sliding_window, layer_types", "none", "llama_eagle3.LlamaForCausalLMEagle3"),
    "embedding": ("target_hidden_size", "shared with the target", "llama.LlamaForCausalLM.set_embed"),
    "head": ("tie_word_embeddings", "its own", "llama_eagle3.LlamaForCausalLMEagle3"),
    "scale of the logits": ("logit_scale", "1", "nowhere: llama_eagle3.LlamaForCausalLMEagle3"),
    "vocabulary": ("vocab_size", "32000", "llama_eagle3.LlamaModel"),
    "draft vocabulary": ("draft_vocab_size", "SGLang fails; vLLM: the target's", "llama_eagle3.LlamaForCausalLMEagle3"),
    "positions": ("max_position_embeddings", "2048", "model_config.ModelConfig._derive_context_length"),
    "dtype": ("torch_dtype", "float32", "model_config._get_and_verify_dtype"),
}


def table(drafter: DraftConfig, export: dict, target: TargetFacts, *, captured=None, versions=None) -> list[dict]:
    """A row a setting: {setting, trained, key, export, SGLang, vLLM, default, read in, verdict, why}.

    `export` is the export's config.json, `captured` the layers of the states that trained the drafter (default: those
    that are always captured), `versions` the engines' where they are known ({"SGLang": "0.5.23"}). `verdict` is ok,
    amber (it works within limits, or the engine itself refuses) or refused (it would load and be wrong).
    """
    ours = trained(drafter, target, captured)
    theirs = {"SGLang": sglang(export, target), "vLLM": vllm(export, target)}
    return [row(name, export, ours[name], {engine: values[name] for engine, values in theirs.items()},
                target, versions or {}) for name in PLACES]


def row(name: str, export: dict, ours, theirs: dict, target: TargetFacts, versions: dict) -> dict:
    """One setting's row; see `table`."""
    keys, default, place = PLACES[name]
    verdict, why = judged(name, ours, theirs, target, versions)
    written = [f"{key.split('.')[-1]} {said(value)}" for key in keys.split(", ") if (value := at(export, key)) != ()]
    return {"setting": name, "trained": said(ours), "key": keys, "export": "; ".join(written) or "left out",
            **{engine: said(value) for engine, value in theirs.items()}, "default": default, "read in": place,
            "verdict": verdict, "why": why}


def judged(name: str, ours, theirs: dict, target: TargetFacts, versions: dict) -> tuple[str, str]:
    """(verdict, why): equal values are ok; of some settings a difference, or even none, is only a limit."""
    wrong = [f"{engine} would use {said(value)}" for engine, value in theirs.items() if value != ours]
    if name == "positions":  # of the export; nothing silent in either engine, and the table of RoPE has its own row
        written = theirs["SGLang"]
        return ("ok", "") if written >= target.max_positions else (
            "amber", f"the target has {target.max_positions:,}: SGLang does not start unless --context-length is at "
            f"most {written:,}; vLLM drafts on beyond them, where nothing was trained")
    if name == "dtype":
        return ("amber", f"{wrong[0]}, whose largest value is 65,504, unless --dtype says otherwise; export in the "
                "target's dtype") if wrong else ("ok", "")
    if wrong:
        return "refused", f"trained with {said(ours)}, but {' and '.join(wrong)}"
    key = PLACES[name][0]
    if key in SILENT_WHERE_OLD and ours:
        for engine, version in versions.items():
            if numbers(version) < numbers(VERSIONS[engine]):
                return "refused", f"{engine} {version} may ignore {key}; {VERSIONS[engine]} reads it: serve with that"
    if name == "RoPE" and ours["type"] == "longrope":
        return "amber", "the longest text of a batch decides which factors all of it gets, in training and in serving"
    return "ok", ""


def refuse(rows: list[dict]) -> None:
    """Raises UserError that names every row which would load and be wrong in silence."""
    if bad := [f"{row['setting']} ({row['key']}): {row['why']}" for row in rows if row["verdict"] == "refused"]:
        raise UserError(f"not exported, since an engine would load it and be silently wrong: {'; '.join(bad)}; use an "
                        "engine or a target that fits, or train with the settings that engines read")


# ------------------------------------------------------------------------------------------ the three sides


def trained(c: DraftConfig, target: TargetFacts, captured=None) -> dict:
    """Setting → what the drafter was trained with (drafter/model.py)."""
    return {
        "captured layers": list(captured or captured_layers(target.layers)), "layers joined": 3,
        "norm of the joined states": False, "norm of each captured layer": c.fc_norm,
        "normed state to the next step": c.norm_output, "residual of the normed state": False,
        "eps of the norms": c.eps, "draft layers": 1, "hidden size": target.hidden, "MLP width": c.intermediate,
        "heads, key heads, head size": (c.heads, c.kv_heads, c.head_dim), "RoPE": rope_trained(c.rope, c.max_positions),
        "biases": "none", "activation": "silu", "attention window": "none", "embedding": "the target's",
        "head": "its own", "scale of the logits": 1.0, "vocabulary": target.vocab, "draft vocabulary": c.draft_vocab,
        "positions": c.max_positions, "dtype": "any",
    }


def sglang(e: dict, target: TargetFacts) -> dict:
    """Setting → what SGLang 0.5.23 computes with, given an export's config.json."""
    eagle = e.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    bias = e.get("attention_bias", False) or e.get("bias", False)
    draft = e.get("draft_vocab_size", "missing: it does not load")
    return both(e, target) | {
        "captured layers": sglang_layers(ids, target),
        "layers joined": e.get("num_aux_hidden_states") or len(ids or ()) or 3,
        "norm of the joined states": bool(eagle.get("norm_before_fc", e.get("norm_before_fc", False))),
        "norm of each captured layer": bool(e.get("fc_norm") or e.get("use_aux_norm", False)),
        "residual of the normed state": False,
        "RoPE": rope_sglang(e),
        "biases": "of fc" if e.get("bias") else "of o_proj, from nowhere" if bias else "none",
        "attention window": "none",
        "embedding": "the target's" if e.get("target_hidden_size", e.get("hidden_size")) == e.get("hidden_size")
                     else "its own, from nowhere",
        "head": "the embedding" if e.get("tie_word_embeddings") else "the target's" if draft is None else "its own",
        "scale of the logits": 1.0,
        "draft vocabulary": e.get("vocab_size") if draft is None else draft,
    }


def vllm(e: dict, target: TargetFacts) -> dict:
    """Setting → what vLLM 0.32.0 computes with, given an export's config.json."""
    eagle = e.get("eagle_config") or {}
    ids = e.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    biases = [key for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias") if e.get(key)]
    return both(e, target) | {
        "captured layers": list(ids or default_layers(target.layers)),
        "layers joined": e.get("num_aux_hidden_states")
                         or len(eagle.get("eagle_aux_hidden_state_layer_ids") or ()) or 3,
        "norm of the joined states": bool(e.get("norm_before_fc") or eagle.get("norm_before_fc", False)),
        "norm of each captured layer": bool(e.get("fc_norm", False)),
        "residual of the normed state": bool(e.get("norm_before_residual", False)),
        "RoPE": rope_vllm(e),
        "biases": "from nowhere" if biases else "none",
        "attention window": e.get("sliding_window") or ("by layer" if e.get("layer_types") else "none"),
        "embedding": "the target's",
        "head": "its own", "scale of the logits": e.get("logit_scale", 1.0),
        "draft vocabulary": e.get("draft_vocab_size") or e.get("vocab_size"),
        "dtype": "any",  # the target's
    }


def both(e: dict, target: TargetFacts) -> dict:
    """What both engines read alike; the defaults are those of Transformers' LlamaConfig."""
    h, heads = e.get("hidden_size", 4096), e.get("num_attention_heads", 32)
    return {
        "normed state to the next step": bool(e.get("norm_output", False)), "eps of the norms":
        e.get("rms_norm_eps", 1e-6), "draft layers": e.get("num_hidden_layers", 32), "hidden size": h,
        "MLP width": e.get("intermediate_size", 11008), "heads, key heads, head size":
        (heads, e.get("num_key_value_heads") or heads, e.get("head_dim") or h // heads),
        "activation": e.get("hidden_act", "silu"),
        "vocabulary": e.get("vocab_size", 32000), "positions": e.get("max_position_embeddings", 2048),
        "dtype": "float16" if (e.get("dtype") or e.get("torch_dtype") or "float32") == "float32" else "any",
    }


def default_layers(n: int) -> list[int]:
    """Both engines' choice where an export names no layers: for a target of n layers, as HF `hidden_states` counts."""
    return [2, n // 2, n - 3]


def sglang_layers(ids, target: TargetFacts) -> list[int]:
    """What SGLang captures, as HF `hidden_states` counts: explicit ids are layers' outputs, though not everywhere."""
    if ids is None:
        return [i + (target.architecture in OFF_BY_ONE) for i in default_layers(target.layers)]
    as_they_are = (target.architecture.startswith(SHIFTED_FROM_1) and ids[0] != 1
                   or target.architecture == "GptOssForCausalLM" and max(ids) == target.layers)
    return [i if as_they_are else i + 1 for i in ids]


# ------------------------------------------------------------------------------------------ RoPE


def rope_trained(rope: dict, max_positions: int) -> dict:
    """What Transformers' LlamaRotaryEmbedding, with which training runs, makes of `rope`; yarn's cos and sin are
    multiplied by `magnitude`."""
    kind, found = rope["rope_type"], {"type": rope["rope_type"], "theta": float(rope["rope_theta"])}
    original = rope.get("original_max_position_embeddings", max_positions)
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        found["factor"] = float(rope.get("factor") or max_positions / original)
    if kind == "dynamic":
        found["grows"] = f"beyond {max_positions}"
    if kind in ("llama3", "yarn", "longrope"):
        found["original"] = original
    if kind == "llama3":
        found |= {"low": rope["low_freq_factor"], "high": rope["high_freq_factor"]}
    if kind == "yarn":
        found |= {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1,
                  "truncate": rope.get("truncate", True), "extrapolation": 1,
                  "magnitude": rounded(magnitude_of(rope, found["factor"]))}
    if kind == "longrope":
        factor, given = rope.get("factor") or max_positions / original, rope.get("attention_factor")
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        found |= {"short": list(rope["short_factor"]), "long": list(rope["long_factor"]),
                  "magnitude": rounded(grown if given is None else given)}
    return found


def rope_config(e: dict) -> tuple[dict, int]:
    """(RoPE's settings, positions) as Transformers' LlamaConfig, which both engines read, merges the two spellings."""
    given = dict(e.get("rope_scaling") or e.get("rope_parameters") or {})
    positions = e.get("max_position_embeddings", 2048)
    given.setdefault("rope_theta", e.get("rope_theta", 10000.0))
    given.setdefault("rope_type", given.get("type", "default"))
    if given["rope_type"] in ("llama3", "yarn", "longrope"):
        given.setdefault("original_max_position_embeddings", positions)
    return given, positions


def rope_sglang(e: dict) -> dict:
    """What SGLang's get_rope makes of it."""
    rope, positions = rope_config(e)
    found = engines_rope(rope, positions)
    if rope["rope_type"] == "yarn":
        scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
        own = magnitude(found["factor"], *scales) if None not in scales else magnitude(found["factor"])
        found["magnitude"] = rounded(own * rope.get("attn_factor", 1))
    return found


def rope_vllm(e: dict) -> dict:
    """What vLLM's get_rope makes of it: yarn by Transformers' keys, dynamic with no growth up to the positions."""
    rope, positions = rope_config(e)
    found = engines_rope(rope, positions)
    if rope["rope_type"] == "yarn":
        found |= {"extrapolation": 1, "magnitude": rounded(magnitude_of(rope, found["factor"]))}
    if rope["rope_type"] == "dynamic" and "alpha" not in rope:
        found["grows"] = f"beyond {rope.get('max_trained_positions', positions)}"
    return found


def engines_rope(rope: dict, positions: int) -> dict:
    """What the two get_rope have in common. A key that only Transformers reads, attention_factor, is read by none."""
    kind, found = rope["rope_type"], {"type": rope["rope_type"], "theta": float(rope["rope_theta"])}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        found["factor"] = float(rope.get("factor") or 1.0)
    if kind == "dynamic":
        found["grows"] = "by alpha" if "alpha" in rope else "at once"  # vLLM's own: see rope_vllm
    if kind in ("llama3", "yarn", "longrope"):
        found["original"] = rope["original_max_position_embeddings"]
    if kind == "llama3":
        found |= {"low": rope.get("low_freq_factor", 1.0), "high": rope.get("high_freq_factor", 4.0)}
    if kind == "yarn":
        found |= {"beta_fast": rope.get("beta_fast", 32), "beta_slow": rope.get("beta_slow", 1),
                  "truncate": rope.get("truncate", True), "extrapolation": rope.get("extrapolation_factor", 1)}
    if kind == "longrope":
        original = found["original"]
        scale = positions / original
        own = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        given = {rope.get("short_mscale") or own, rope.get("long_mscale") or own}
        found |= {"short": list(rope["short_factor"]), "long": list(rope["long_factor"]),
                  "magnitude": rounded(own) if given == {own} else "by short_mscale and long_mscale"}
    return found


def portable(rope: dict, max_positions: int) -> dict:
    """`rope` spelt so that Transformers, SGLang and vLLM compute the same from it, where there is such a spelling.

    yarn's magnitude: Transformers and vLLM read attention_factor, then mscale and mscale_all_dim; SGLang reads
    attn_factor, which it multiplies with what the two mscale come to. A linear factor must not be an integer in SGLang.
    """
    rope = {key: value for key, value in rope.items() if value is not None}
    if "factor" in rope:
        rope["factor"] = float(rope["factor"])
    if rope["rope_type"] != "yarn":
        return rope
    ours = rope_trained(rope, max_positions)
    rope = {key: value for key, value in rope.items() if key not in ("attn_factor", "extrapolation_factor")}
    rope |= {"factor": ours["factor"], "original_max_position_embeddings": ours["original"]}
    if rope_sglang({"rope_parameters": rope, "max_position_embeddings": max_positions}) == ours:
        return rope
    plain = {key: value for key, value in rope.items() if key not in ("mscale", "mscale_all_dim")}
    return plain | {"attention_factor": ours["magnitude"], "attn_factor": ours["magnitude"] / magnitude(ours["factor"])}


def magnitude_of(rope: dict, factor: float) -> float:
    """YaRN's factor on cos and sin as Transformers chooses it."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
    return magnitude(factor, *scales) if all(scales) else magnitude(factor)


def magnitude(factor: float, mscale: float | None = None, all_dim: float | None = None) -> float:
    """YaRN's factor on cos and sin: 0.1 ln(factor) + 1, or a ratio of two such with weights."""
    def one(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return one(1.0) if mscale is None else one(mscale) / one(all_dim)


# ------------------------------------------------------------------------------------------ words


def at(config: dict, key: str):
    """The value of a dotted key; () where there is none."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return ()
        config = config[part]
    return config


def said(value) -> str:
    """A value as a cell of the table shows it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {said(one)}" for key, one in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(said, value)) if len(value) <= 4 else f"{len(value)} values"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rounded(value: float) -> float:
    """To 9 digits: the engines' formulas round differently in the last ones."""
    return float(f"{value:.9g}")


def installed() -> dict[str, str]:
    """Versions of the engines that lie in this environment, for `table`; what lies in another one it does not know."""
    found = {}
    for engine in VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            found[engine] = metadata.version(engine.lower())
    return found


def numbers(version: str) -> tuple[int, ...]:
    """0.5.23 → (0, 5, 23); a suffix is left out."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
