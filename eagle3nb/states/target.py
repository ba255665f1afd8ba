"""The target model as files: its facts, its tokenizer, and the few weights that a drafter needs.

Everything here reads config.json and safetensors directly, so it costs no model in memory and works for a checkpoint
that this machine could never run. Multimodal wrappers are read through: their text config lies under `text_config`,
their weights under another prefix.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from safetensors import safe_open

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, resolve, shown, write_json, xxh3_file

BYTES = {"fp32": 4, "bf16": 2, "fp8_e4m3": 1}  # a stored value
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "thinker.model.", "")
WRAPPED = ("text_config", "language_config", "llm_config")  # where a multimodal config keeps its language model's
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")


@dataclass(frozen=True)
class TargetFacts:
    """What config.json says. Sizes are counts; `rope` is {"theta": float, "scaling": dict or None}."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    eos: tuple[int, ...]
    tie_embedding: bool
    rope: dict = field(hash=False)


def target_dir(target: str | Path) -> Path:
    """The model directory: a local one, or the embedded target's, unpacked on first use."""
    if str(target) == "embedded":
        from eagle3nb.states.embedded import embedded_dir

        return embedded_dir()
    folder = resolve(target)
    if not (folder / "config.json").is_file():
        raise UserError(f"target {shown(folder)} holds no config.json; give a Hugging Face directory, or 'embedded'")
    return folder


def facts_of(folder: str | Path) -> TargetFacts:
    """Read config.json, and whether a head is among the weights that lie there. UserError for a config without the
    sizes of a decoder."""
    whole = read_json(Path(folder) / "config.json")
    config = text_config(folder, whole)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        layers, vocab = config["num_hidden_layers"], config["vocab_size"]
        # MLA has no head_dim that a plain layer could use; its value heads are the nearest.
        per_head = config.get("v_head_dim") if config.get("kv_lora_rank") else config.get("head_dim")
        return TargetFacts(
            architecture=(whole.get("architectures") or config.get("architectures") or ["unknown"])[0],
            hidden=hidden, layers=layers, heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=per_head or hidden // heads, intermediate=config["intermediate_size"], vocab=vocab,
            eps=config.get("rms_norm_eps", 1e-6), rope=rope_of(config),
            max_positions=config.get("max_position_embeddings", 2048), eos=eos_of(folder, whole, config),
            tie_embedding=tied(Path(folder), whole, config))
    except KeyError as error:
        raise UserError(f"{shown(Path(folder) / 'config.json')} has no {error.args[0]}; give the directory of a "
                        "decoder-only language model") from None


def text_config(folder: str | Path, whole: dict) -> dict:
    """The language model's part of config.json. Sizes that a wrapper leaves out are its class's defaults (LLaVA's)."""
    config = next((whole[key] for key in WRAPPED if isinstance(whole.get(key), dict)), whole)
    if config is whole or all(key in config for key in SIZES):
        return config
    from transformers import AutoConfig

    try:
        known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError):
        return config
    return known.to_dict() | config


def tied(folder: Path, whole: dict, config: dict) -> bool:
    """Is the head the embedding? The files decide where they are there; a wrapper and its text config may disagree."""
    names = weight_files(folder) if any(folder.glob("*.safetensors*")) else {}
    if spelt("model.embed_tokens.weight", names):
        return spelt("lm_head.weight", names) is None
    return bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)))


def rope_of(config: dict) -> dict:
    """RoPE from either spelling: `rope_theta` + `rope_scaling`, or transformers 5's one dict `rope_parameters`."""
    settings = config.get("rope_parameters") or {}
    settings = settings.get("full_attention") or settings  # a dict a layer type: the global layers' counts
    scaling = dict(settings) if settings else dict(config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {"theta": float(theta), "scaling": None if kind == "default" else scaling}


def eos_of(folder: str | Path, whole: dict, config: dict) -> tuple[int, ...]:
    """Every id that ends an answer, generation_config.json's included (chat models often list theirs only there)."""
    found = [whole.get("eos_token_id"), config.get("eos_token_id")]
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        found.append(read_json(generation).get("eos_token_id"))
    ids = [i for value in found if value is not None for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(ids))


def captured_layers(layers: int) -> tuple[int, int, int]:
    """The three captured layers, as indices into HF `hidden_states`: the residual stream after that many layers."""
    chosen = (2, layers // 2, layers - 3)
    if not chosen[0] < chosen[1] < chosen[2]:
        raise UserError(f"a target of {layers} layers is too shallow: the layers {chosen} must differ; use 7 or more")
    return chosen


def bytes_per_token(facts: TargetFacts, dtype: str) -> int:
    """Bytes of states of one token that needs a teacher: three captured layers, the last hidden state, fp8's scales."""
    if dtype not in BYTES:
        raise UserError(f"states_dtype {dtype!r} is unknown; choose one of {', '.join(BYTES)}")
    return BYTES[dtype] * 4 * facts.hidden + (4 * 4 if dtype == "fp8_e4m3" else 0)


# ---------------------------------------------------------------------------------------------------- weights


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name → safetensors file. Sharded checkpoints have an index; a single file names its own tensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"target {shown(folder)} holds no safetensors weights; convert it (save_pretrained) first")
    found = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            found.update(dict.fromkeys(handle.keys(), file))
    return found


def spelt(name: str, names) -> str | None:
    """The checkpoint's spelling of `model.<rest>` or `lm_head.weight`, whatever wrapper it lies in."""
    rest, key = name.removeprefix("model."), "embed_tokens.weight"
    # The usual places first; then wherever an embedding and a final norm lie side by side.
    other = sorted({n.removesuffix(key) for n in names if n.endswith(key)} - set(PREFIXES), key=lambda p: (len(p), p))
    prefixes = [*PREFIXES, *(p for p in other if p + "norm.weight" in names)]
    if name == "lm_head.weight":  # beside the backbone or above it
        home = next((p for p in prefixes if p + key in names), "")
        prefixes = [home, *(".".join(home.split(".")[:n]) + "." if n else "" for n in reversed(range(home.count("."))))]
    return next((p + rest for p in prefixes if p + rest in names), None)


def read_weights(folder: str | Path, names) -> dict:
    """Tensors by their plain names (`model.norm.weight`), as stored, on the CPU. UserError names a missing one."""
    folder = Path(folder)
    files = weight_files(folder)
    tensors = {}
    for name in names:
        actual = spelt(name, files)
        if actual is None:
            raise UserError(f"target {shown(folder)} has no tensor {name} under any known prefix; copy all of it")
        if not files[actual].is_file():
            raise UserError(f"{shown(files[actual])} is missing, though the index names it; copy the whole checkpoint")
        with safe_open(files[actual], "pt") as handle:
            tensors[name] = handle.get_tensor(actual)
    return tensors


def embedding(folder: str | Path):
    """The input embedding [V, h], as stored."""
    return read_weights(folder, ["model.embed_tokens.weight"])["model.embed_tokens.weight"]


def lm_head(folder: str | Path):
    """The output head [V, h], as stored; of a tied target, its embedding."""
    if facts_of(folder).tie_embedding:
        return embedding(folder)
    return read_weights(folder, ["lm_head.weight"])["lm_head.weight"]


def final_norm(folder: str | Path):
    """The weight [h] of the norm before the head, as stored."""
    return read_weights(folder, ["model.norm.weight"])["model.norm.weight"]


def layer_weights(folder: str | Path, layer: int) -> dict:
    """One decoder layer's tensors by short names (`self_attn.q_proj.weight` …), as stored."""
    folder = Path(folder)
    files = weight_files(folder)
    for prefix in PREFIXES:
        start = f"{prefix}layers.{layer}."
        names = sorted(name for name in files if name.startswith(start))
        if names:
            tensors = {}
            for name in names:
                with safe_open(files[name], "pt") as handle:
                    tensors[name.removeprefix(start)] = handle.get_tensor(name)
            return tensors
    raise UserError(f"target {shown(folder)} has no layer {layer} under any known prefix")


# ---------------------------------------------------------------------------------------------------- identity


def load_tokenizer(folder: str | Path):
    """The target's tokenizer from local files alone; code that came with a checkpoint is never run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"no usable tokenizer in {shown(folder)} ({first}); put its tokenizer.json there") from None


def target_identity(folder: str | Path) -> dict:
    """{"config", "weights", "tokenizer"}: hashes that say which target this is, wherever it lies.

    Hashing reads all weights once (a second a gigabyte or so); the figures are kept under <root>/.cache by size and
    modification time of every file.
    """
    folder = resolve(folder).resolve()
    files = [file for pattern in ("*.safetensors", "tokenizer*.json", "chat_template*", "*.model")
             for file in sorted(folder.glob(pattern))]
    state = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    beside = project_root() / ".cache" / "identity" / f"{xxhash.xxh3_64_hexdigest(str(folder).encode())}.json"
    known = read_json(beside) if beside.is_file() else {}
    if known.get("files") != state:
        hashes = [[file.name, xxh3_file(file)] for file in files]
        known = {"files": state, "weights": digest([h for h in hashes if h[0].endswith(".safetensors")]),
                 "tokenizer": digest([h for h in hashes if not h[0].endswith(".safetensors")])}
        write_json(beside, known)
    config = read_json(folder / "config.json")
    # These two say how a checkpoint was saved, not what it computes.
    config = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    return {"config": digest(config), "weights": known["weights"], "tokenizer": known["tokenizer"]}


def digest(value) -> str:
    """xxh3-128 of a value's canonical JSON, in hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, ensure_ascii=False).encode())
