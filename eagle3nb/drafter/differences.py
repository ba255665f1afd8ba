"""A drafter's config.json against its target's: what must be the same, and what a drafter has for itself.

Engines fill in what a config leaves out and check hardly anything, so a wrong RoPE table or eps loads, drafts and is
silently bad. Both spellings of RoPE are read (`rope_theta` + `rope_scaling`, with `type` or `rope_type`, and the one
dict `rope_parameters`), and configs under `text_config`. Values that are left out count as what Transformers fills in.
"""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from eagle3nb.drafter.export import engine_config
from eagle3nb.drafter.model import DraftConfig
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, resolve, shown

FILLED_IN = {"yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True}}  # by Transformers 5.19, where left out
TEXT_ONLY = ("mrope_section", "mrope_interleaved")  # of images and video: for text it is the plain table
SAME, DIFFERS, OWN = "same", "differs", "its own"


def written_config(config: DraftConfig, facts) -> dict:
    """The config.json that the export of such a drafter will have."""
    return engine_config(config, facts.layers, facts.eos, None, "float32")


def read_config(path: str | Path) -> tuple[dict, int | None]:
    """A drafter's config (a file, or the config.json of a folder), and its d2t's length where weights lie beside it.

    The length is 0 where the weights hold no d2t, None where there are none. UserError where there is no config.
    """
    path = resolve(path)
    path = path / "config.json" if path.is_dir() else path
    config, weights = read_json(path), path.with_name("model.safetensors")
    if not isinstance(config, dict):
        raise UserError(f"{shown(path)} is no config of a model; give the drafter's config.json")
    if not weights.is_file():
        return config, None
    try:
        with safe_open(weights, "pt") as handle:
            return config, handle.get_slice("d2t").get_shape()[0] if "d2t" in handle.keys() else 0  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shown(weights)} cannot be read ({error}); copy it again") from None


def config_differences(draft: dict, target: dict, p99_length: int, mapping: int | None = None) -> list[dict]:
    """What is wrong, for the rule draft_config: [{"key", "draft", "target", "why"}]. Arguments as of `compared`."""
    return [{name: row[name] for name in ("key", "draft", "target", "why")}
            for row in compared(draft, target, p99_length, mapping) if row["verdict"] == DIFFERS]


def compared(draft: dict, target: dict, p99_length: int, mapping: int | None = None) -> list[dict]:
    """Every key that is looked at: {"key", "draft", "target", "verdict": same | differs | its own, "why"}.

    p99_length: the rows' length that one in a hundred exceeds, in tokens (0: not known); mapping: the length of d2t
    (read_config).
    """
    d, t = draft.get("text_config") or draft, target.get("text_config") or target
    return [*sizes(d, t), vocabulary(d, t, mapping), tied(d, t, target), positions(d, t, p99_length), head_dim(d, t),
            eps(d, t), *rope(d, t), *rotation(d, t)]


def row(key: str, draft, target, verdict: str, why: str = "") -> dict:
    return {"key": key, "draft": draft, "target": target, "verdict": verdict, "why": why if verdict != SAME else ""}


def equal(a, b) -> bool:
    if type(a) in (int, float) and type(b) in (int, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def judged(key: str, draft, target, why: str) -> dict:
    return row(key, draft, target, SAME if equal(draft, target) else DIFFERS, why)


def sizes(d: dict, t: dict) -> list[dict]:
    """fc reads the target's states and the embedding is the target's, so both sizes are given."""
    whys = {"hidden_size": "fc reads three of the target's hidden states: build the drafter with the target's size",
            "vocab_size": "the embedding is the target's own: set it to the target's"}
    rows = [judged(key, d.get(key), t.get(key), why) for key, why in whys.items()]
    if "target_hidden_size" in d:
        rows.append(judged("target_hidden_size", d["target_hidden_size"], t.get("hidden_size"), whys["hidden_size"]))
    return rows


def vocabulary(d: dict, t: dict, mapping: int | None) -> dict:
    V = t.get("vocab_size") or 0
    D = d.get("draft_vocab_size") or d.get("vocab_size") or 0
    if D > V or D < 1:
        return row("draft_vocab_size", D, V, DIFFERS, "a draft vocabulary is a part of the target's: lower it")
    if mapping is not None and mapping != D and (mapping or D != V):
        return row("draft_vocab_size", D, f"d2t of {mapping:,}", DIFFERS, "drafted ids would be mapped wrongly: take "
                   "config.json and model.safetensors of one training")
    return row("draft_vocab_size", D, V, SAME if D == V else OWN, "a part of the target's, mapped by d2t")


def tied(d: dict, t: dict, target: dict) -> dict:
    """The drafter's head has rows of its own over D; the target may tie its head as it likes."""
    mine = bool(d.get("tie_word_embeddings", False))
    its = bool(t.get("tie_word_embeddings", target.get("tie_word_embeddings", False)))
    whole = (d.get("draft_vocab_size") or d.get("vocab_size")) == t.get("vocab_size")
    if mine and not (its and whole):
        return row("tie_word_embeddings", mine, its, DIFFERS, "the drafter's lm_head is trained for itself; tied, it "
                   "would be the embedding: set it to false")
    return row("tie_word_embeddings", mine, its, SAME if mine == its else OWN, "the drafter has its own lm_head")


def positions(d: dict, t: dict, p99_length: int) -> dict:
    """Of the drafter's RoPE table. Left out, Llama's 2048 is filled in."""
    mine, its = d.get("max_position_embeddings", 2048), t.get("max_position_embeddings", 2048)
    if mine < p99_length:
        return row("max_position_embeddings", mine, its, DIFFERS, f"one row in a hundred has more than {p99_length:,} "
                   "tokens, more than the drafter has positions for: set it to the target's")
    if mine < its:
        return row("max_position_embeddings", mine, its, OWN, f"beyond {mine:,} tokens a server drafts no more")
    return row("max_position_embeddings", mine, its, SAME if mine == its else OWN, "more than the target has")


def head_dim(d: dict, t: dict) -> dict:
    mine = d.get("head_dim") or (d.get("hidden_size") or 0) // max(d.get("num_attention_heads") or 1, 1)
    if d.get("kv_lora_rank"):
        return row("head_dim", "MLA", "MLA" if t.get("kv_lora_rank") else t.get("head_dim"), OWN, "an MLA drafter")
    if t.get("kv_lora_rank"):
        its = f"MLA: {t.get('qk_nope_head_dim')} + {t.get('qk_rope_head_dim')}, values {t.get('v_head_dim')}"
        return row("head_dim", mine, its, OWN, "the drafter is a plain layer: it has heads of its own")
    its = t.get("head_dim") or t["hidden_size"] // t["num_attention_heads"]
    return judged("head_dim", mine, its, "RoPE's frequencies follow from it: take the target's")


def eps(d: dict, t: dict) -> dict:
    return judged("rms_norm_eps", d.get("rms_norm_eps", 1e-6), t.get("rms_norm_eps", 1e-6),
                  "the drafter reads states that the target's norms made: take the target's")


def rope(d: dict, t: dict) -> list[dict]:
    """Type, theta and whatever the scaling has, in the union of both sides' keys."""
    mine, its = table_of(d), table_of(t)
    keys = ["rope_type", "rope_theta", *sorted((mine.keys() | its.keys()) - {"rope_type", "rope_theta"})]
    why = "the drafter would rotate its keys by another table than the target: take the target's"
    rows = [judged(key if key.startswith("rope_") else f"rope_scaling.{key}", mine.get(key), its.get(key), why)
            for key in keys]
    if d.get("rope_parameters") and ("rope_theta" in d or "rope_scaling" in d):
        older = table_of({**d, "rope_parameters": None})
        if not all(equal(mine.get(key), older.get(key)) for key in mine.keys() | older.keys()):
            rows.append(row("rope_parameters", brief(mine), brief(older), DIFFERS, "the draft config says two things, "
                            "in rope_parameters and in rope_theta with rope_scaling; engines read either: write one"))
    return rows


def table_of(config: dict) -> dict:
    """RoPE in one form: rope_type, rope_theta and the type's own keys, what is left out filled in."""
    settings = config.get("rope_parameters") or {}
    settings = dict(settings.get("full_attention") or settings or config.get("rope_scaling") or {})
    theta = settings.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old = settings.pop("type", None)
    kind = settings.pop("rope_type", None) or old or "default"
    for key in (*TEXT_ONLY, "partial_rotary_factor"):
        settings.pop(key, None)
    if kind in ("default", "mrope"):
        return {"rope_type": "default", "rope_theta": float(theta)}
    settings = {key: value for key, value in settings.items() if value is not None}
    if kind == "yarn" and "attention_factor" in settings:  # it wins over the two; attn_factor is SGLang's word for it
        settings = {k: v for k, v in settings.items() if k not in ("mscale", "mscale_all_dim", "attn_factor")}
    places = {"original_max_position_embeddings": config.get("original_max_position_embeddings")
              or config.get("max_position_embeddings", 2048)} if kind in ("yarn", "longrope") else {}
    return {"rope_type": kind, "rope_theta": float(theta)} | places | FILLED_IN.get(kind, {}) | settings


def rotation(d: dict, t: dict) -> list[dict]:
    """How much of a head is rotated, and in which pairs: a drafter's heads are its own, rotated whole and by halves."""
    rows = []
    if t.get("rope_interleave") or d.get("rope_interleave"):
        mine, its = ("neighbours" if c.get("rope_interleave") else "halves" for c in (d, t))
        rows.append(row("rope_interleave", mine, its, DIFFERS if d.get("rope_interleave") else OWN,
                        "engines rotate a drafter by halves: remove the key" if d.get("rope_interleave")
                        else "the drafter's own heads are rotated by halves, in training and in serving"))
    parts = [(c.get("rope_parameters") or {}).get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
             for c in (d, t)]
    if not equal(*parts):
        rows.append(row("partial_rotary_factor", *parts, DIFFERS if parts[0] != 1.0 else OWN,
                        "training rotates whole heads: remove the key" if parts[0] != 1.0
                        else "the drafter's own heads are rotated whole"))
    return rows


def brief(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
