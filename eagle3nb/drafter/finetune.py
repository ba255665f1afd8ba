"""Fine-tuning: training starts from an EAGLE-3 checkpoint that is there already, its draft vocabulary included.

    found = finetune.read(initialise, facts)             # found.vocabulary is the run's: checked, never remade
    rows = finetune.report(found, facts, counts, forced)

Read are folders with config.json and safetensors in SGLang's layout (export.py, SpecForge), the same tensors under
`model.` or `layers.0.` and speculators' nested config, and what stage 4 keeps as drafter/. A checkpoint's heads, width
of the MLP, eps and RoPE are what its weights were trained with, so they stay its own, whatever the target has; the
report names where they differ. What this trainer would compute otherwise than the one that made the checkpoint (other
norms, biases, captured layers, sizes of the target) is refused, all of it in one line.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3nb.corpus.vocabulary import Vocabulary, coverage
from eagle3nb.drafter import flags
from eagle3nb.drafter.export import engine_config, expected_shapes
from eagle3nb.drafter.model import DraftConfig, DraftModel, rope_parameters
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, resolve, shown, xxh3_file
from eagle3nb.states.target import TargetFacts, captured_layers, weight_files

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size")
FREE = ("RoPE", "positions", "dtype")  # of flags.PLACES: the checkpoint's own, read as Transformers does
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # Transformers' types that flags knows
OTHER_ONE = "name a checkpoint of this target, or begin with initialise: fitted"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """tensors: DraftModel's state by its names, dtypes as stored; ids int64 [D] ascending; content: hash of the files.

    embedding: its own copy of the target's [V, h], where it has one, to be compared with the target's.
    """

    folder: Path
    config: DraftConfig
    tensors: dict[str, Tensor]
    ids: np.ndarray
    content: str
    embedding: Tensor | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.ids, self.config.vocab)


def read(folder: str | Path, facts: TargetFacts) -> Checkpoint:
    """The checkpoint in `folder`, checked against the target. UserError names everything that does not fit."""
    folder = resolve(folder)
    given, tensors = as_engines_read(folder, facts), stored(folder)
    if missing := [key for key in SIZES if not isinstance(given.get(key), int)]:
        refuse(folder, [f"config.json has no {', '.join(missing)}"])
    if (kind := flags.rope_config(given)[0]["rope_type"]) not in ROPES:
        refuse(folder, [f"RoPE of type {kind!r} is unknown here; known are {', '.join(ROPES)}"])
    config = draft_config(given, facts)
    faults = other_drafter(given, config, facts)
    if faults:
        refuse(folder, faults)                  # shapes would only repeat it
    own_embedding = tensors.pop(EMBEDDING, None)
    ids, faults = mapping(tensors, config)
    faults += misshapen(tensors, config, facts)
    if faults:
        refuse(folder, faults)
    tensors |= {"d2t": torch.from_numpy(Vocabulary(ids, config.vocab).d2t),
                "t2d": torch.from_numpy(Vocabulary(ids, config.vocab).t2d)}
    return Checkpoint(folder, config, tensors, ids, content(folder), own_embedding)


def start(settings, facts: TargetFacts, embedding: Tensor, ids) -> Checkpoint:
    """What a run with these settings (settings.Settings, initialise a folder) starts from. embedding: the target's.

    Raises UserError where the settings or the run's draft vocabulary `ids` are not the checkpoint's.
    """
    found = read(settings.initialise, facts)
    wanted = {name: getattr(found.config, name) for name in ("norm_output", "fc_norm")}
    wanted |= {"intermediate": found.config.intermediate} if settings.intermediate else {}
    faults = [f"its {name} is {str(value).lower()}, the run's {str(getattr(settings, name)).lower()}"
              for name, value in wanted.items() if getattr(settings, name) != value]
    if not np.array_equal(ids, found.ids):
        faults.append(f"its draft vocabulary of {len(found.ids):,} tokens is not the run's of {len(ids):,}, which must "
                      "be taken from it")
    if faults:
        refuse(found.folder, faults, "give the run what the checkpoint has")
    if found.embedding is not None and not same(found.embedding, embedding):
        refuse(found.folder, [f"its {EMBEDDING} is not the target's, so it drafts for another one"])
    return found


def load(model: DraftModel, checkpoint: Checkpoint) -> None:
    """Its weights into a model of its config, in place, in the model's dtype."""
    model.load_state_dict(checkpoint.tensors)


def report(checkpoint: Checkpoint, facts: TargetFacts, counts: np.ndarray, forced: dict[int, str]) -> list[dict]:
    """Rows {what, checkpoint, here} for a table: its vocabulary on this corpus, and what else it has than the target.

    counts int64 [V], of corpus.vocabulary.supervised_counts; forced: token id → text, the chat template's own tokens.
    """
    c, inside = checkpoint.config, set(checkpoint.ids.tolist())
    lacking = [text for token, text in forced.items() if token not in inside]
    share = coverage(counts, checkpoint.vocabulary)
    return [{"what": "draft vocabulary (tokens)", "checkpoint": f"{len(inside):,}", "here": f"of {c.vocab:,}"},
            {"what": "generated tokens in it", "checkpoint": f"{share:.1%}", "here": f"of {counts.sum():,}"},
            {"what": "template's tokens missing", "checkpoint": " ".join(lacking) or "none",
             "here": f"of {len(forced)}"},
            *differences(c, facts)]


def differences(c: DraftConfig, facts: TargetFacts) -> list[dict]:
    """Rows {what, checkpoint, here} of what the checkpoint has otherwise than the target, and keeps."""
    rope = rope_parameters(facts.rope)
    pairs = {"heads, key heads, head size": ((c.heads, c.kv_heads, c.head_dim),
                                             (facts.heads, facts.kv_heads, facts.head_dim)),
             "MLP width": (c.intermediate, facts.intermediate), "eps of the norms": (c.eps, facts.eps),
             "RoPE": (flags.rope_trained(c.rope, c.max_positions), flags.rope_trained(rope, facts.max_positions))}
    return [{"what": name, "checkpoint": flags.said(own), "here": flags.said(target)}
            for name, (own, target) in pairs.items() if own != target]


# ------------------------------------------------------------------------------------------ the files


def as_engines_read(folder: Path, facts: TargetFacts) -> dict:
    """config.json as an engine's: speculators' nested one laid flat, stage 4's own drafter written as its export."""
    if not (folder / "config.json").is_file():
        raise UserError(f"initialise: {shown(folder)} holds no config.json; name the folder of an EAGLE-3 checkpoint")
    given = read_json(folder / "config.json")
    if "draft" in given:
        return engine_config(DraftConfig.from_json(given["draft"]), facts.layers, (), None, "float32")
    return given | (given.get("transformer_layer_config") or {})


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors by DraftModel's names. UserError for a torn file, or none."""
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"initialise: {shown(folder)} holds no safetensors; a pytorch_model.bin must be saved as one "
                        "first (safetensors.torch.save_file)")
    given, found = {}, {}
    try:
        for name, file in weight_files(folder).items():
            with safe_open(file, "pt") as handle:
                given[name] = handle.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"initialise: the weights in {shown(folder)} are torn ({error}); copy them again") from None
    for name, tensor in given.items():
        if not name.endswith("rotary_emb.inv_freq"):            # follows from the config
            if plain(name) in found:
                refuse(folder, [f"{plain(name)} stands there twice, once as {name}"])
            found[plain(name)] = tensor
    return found


def plain(name: str) -> str:
    """A tensor's name here."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def content(folder: Path) -> str:
    """Hash of the files that are read, wherever they lie."""
    files = sorted({folder / "config.json", *weight_files(folder).values()})
    return xxhash.xxh3_128_hexdigest("".join(f"{file.name} {xxh3_file(file)}\n" for file in files).encode())


# ------------------------------------------------------------------------------------------ what must fit


def draft_config(e: dict, facts: TargetFacts) -> DraftConfig:
    """An engine's config.json → the draft layer's sizes; what is missing is Transformers' default, as in the engines.

    The target's positions where they are more and RoPE is the same up to there: published drafters often say 2,048.
    """
    rope, positions = flags.rope_config(e)
    rope = {key: value for key, value in rope.items() if key not in ("type", "attn_factor")}   # not Transformers'
    more = max(positions, facts.max_positions)
    if flags.rope_trained(rope, more) == flags.rope_trained(rope, positions):
        positions = more
    heads = e["num_attention_heads"]
    return DraftConfig(
        hidden=e["hidden_size"], heads=heads, kv_heads=e.get("num_key_value_heads") or heads,
        head_dim=e.get("head_dim") or e["hidden_size"] // heads, intermediate=e["intermediate_size"],
        vocab=e["vocab_size"], draft_vocab=e["draft_vocab_size"], eps=e.get("rms_norm_eps", 1e-6), rope=rope,
        max_positions=positions, norm_output=bool(e.get("norm_output", False)),
        fc_norm=bool(e.get("fc_norm") or e.get("use_aux_norm", False)))


def other_drafter(e: dict, c: DraftConfig, facts: TargetFacts) -> list[str]:
    """In what the checkpoint, as SGLang or vLLM reads it, is another drafter than the one that would be trained."""
    ours, theirs = flags.trained(c, facts), [flags.sglang(e, facts), flags.vllm(e, facts)]
    faults = []
    for name in (name for name in flags.PLACES if name not in FREE):
        values = [engine[name] for engine in theirs]
        if name == "captured layers":           # the engines count explicit ids differently: one of the two is right
            wrong = ours[name] not in values
        else:
            wrong = any(value != ours[name] for value in values)
        if wrong:
            other = next(value for value in values if value != ours[name])
            faults.append(f"{name} ({flags.PLACES[name][0]}): {flags.said(other)}, here {flags.said(ours[name])}")
    layers = (e.get("eagle3nb") or {}).get("captured_layers")
    if layers and list(layers) != list(captured_layers(facts.layers)):
        faults.append(f"it was trained on the layers {flags.said(layers)}, the states hold "
                      f"{flags.said(captured_layers(facts.layers))}")
    return faults


def mapping(tensors: dict[str, Tensor], c: DraftConfig) -> tuple[np.ndarray, list[str]]:
    """(ids int64 [D], faults) of d2t, and of t2d where it is there; both are taken out of `tensors`.

    A checkpoint without d2t drafts over the whole vocabulary.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and c.draft_vocab != c.vocab:
        return np.empty(0, np.int64), ["it has no d2t, which says what its draft tokens are"]
    d2t = torch.zeros(c.vocab, dtype=torch.int64) if d2t is None else d2t
    if d2t.shape != (c.draft_vocab,) or d2t.is_floating_point():
        return np.empty(0, np.int64), [f"d2t is {d2t.dtype} {tuple(d2t.shape)}, not {c.draft_vocab} whole numbers"]
    ids = d2t.long().numpy() + np.arange(c.draft_vocab)
    if ids.min() < 0 or ids.max() >= c.vocab:
        wrong = ids[(ids < 0) | (ids >= c.vocab)]
        return ids, [f"d2t maps to {wrong[0]}, outside the target's {c.vocab:,} ids (d2t holds offsets: id − index)"]
    if (np.diff(ids) <= 0).any():
        i = int(np.argmax(np.diff(ids) <= 0))
        return ids, [f"d2t does not ascend: {ids[i]} is followed by {ids[i + 1]}"]
    if t2d is not None and not np.array_equal(t2d.float().nonzero()[:, 0].numpy(), ids):
        return ids, ["t2d and d2t disagree"]
    return ids, []


def misshapen(tensors: dict[str, Tensor], c: DraftConfig, facts: TargetFacts) -> list[str]:
    """Tensors that are unknown, missing, of another shape than config.json makes them, or not finite."""
    shapes = expected_shapes(engine_config(c, facts.layers, (), None, "float32"))
    shapes = {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    faults = [f"{name} is not part of this drafter" for name in sorted(set(tensors) - set(shapes))]
    for name, shape in shapes.items():
        if name not in tensors:
            faults.append(f"{name} is missing")
        elif tuple(tensors[name].shape) != shape:
            faults.append(f"{name} is {tuple(tensors[name].shape)}, config.json makes it {shape}")
        elif not tensors[name].is_floating_point() or not torch.isfinite(tensors[name]).all():
            faults.append(f"{name} has values that are not finite")
    return faults


def same(own: Tensor, target: Tensor) -> bool:
    """Equal embeddings, [V, h] each, whichever of the two was rounded to the other's dtype."""
    return own.shape == target.shape and (torch.equal(own.to(target.dtype), target)
                                          or torch.equal(own, target.to(own.dtype)))


def refuse(folder: Path, faults: list[str], advice: str = OTHER_ONE):
    raise UserError(f"initialise: {shown(folder)} cannot be trained on here: {'; '.join(faults)}; {advice}")
