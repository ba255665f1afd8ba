"""The config check: what training would write never differs; every wrong key is named, and nothing else."""

import copy
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3nb.drafter.differences import compared, config_differences, read_config, written_config
from eagle3nb.drafter.export import export
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import project_root, write_json
from eagle3nb.states.target import facts_of

YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "mscale": 1.0,
        "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}
PLAIN = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 1024, "rope_theta": 10000}
TARGETS = {
    "plain": PLAIN, "tied": PLAIN | {"tie_word_embeddings": True}, "head_dim": PLAIN | {"head_dim": 32},
    "new spelling": {k: v for k, v in PLAIN.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "yarn": PLAIN | {"rope_scaling": YARN}, "llama3": PLAIN | {"rope_scaling": LLAMA3},
    "new yarn": PLAIN | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "layer types": PLAIN | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "nested": {"text_config": PLAIN | {"rope_scaling": YARN}, "architectures": ["X"], "tie_word_embeddings": False},
    "video": PLAIN | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "mla": PLAIN | {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                    "rope_interleave": True, "rope_scaling": YARN},
    "no eps": {k: v for k, v in PLAIN.items() if k != "rms_norm_eps"},
    "kimi": json.loads((project_root() / "params/kimi-k2.5/target/config.json").read_text())}


def written(target: dict, folder: Path, draft_vocab=100, **changes) -> dict:
    write_json(folder / "config.json", target)
    facts = facts_of(folder)
    return written_config(DraftConfig.from_target(facts, draft_vocab, **changes), facts)


def keys(listed):
    return [row["key"] for row in listed]


@pytest.mark.parametrize("name", TARGETS)
def test_what_training_writes_never_differs(tmp_path, name):
    target = TARGETS[name]
    draft = written(target, tmp_path)
    limit = (target.get("text_config") or target)["max_position_embeddings"]
    assert config_differences(draft, target, limit) == []
    assert keys(config_differences(draft, target, limit + 1)) == ["max_position_embeddings"]


def test_a_drafter_of_an_mla_target_has_heads_of_its_own(tmp_path):
    for name, its in (("mla", "MLA: 16 + 8, values 16"), ("kimi", "MLA: 128 + 64, values 128")):
        rows = {row["key"]: row for row in compared(written(TARGETS[name], tmp_path), TARGETS[name], 100)}
        assert (rows["head_dim"]["verdict"], rows["head_dim"]["target"]) == ("its own", its)
    rows = {row["key"]: row for row in compared(written(TARGETS["mla"], tmp_path), TARGETS["mla"], 100)}
    assert (rows["rope_interleave"]["draft"], rows["rope_interleave"]["target"]) == ("halves", "neighbours")
    assert rows["rope_interleave"]["verdict"] == "its own" and rows["rope_scaling.beta_slow"]["verdict"] == "same"


@pytest.mark.parametrize(("name", "changes", "expected"), [
    ("plain", {"max_position_embeddings": 600}, ["max_position_embeddings"]),
    ("plain", {"max_position_embeddings": 800}, []), ("plain", {"max_position_embeddings": 4096}, []),
    ("plain", {"rms_norm_eps": 1e-6}, ["rms_norm_eps"]), ("plain", {"rms_norm_eps": 0.00001}, []),
    ("plain", {"head_dim": 32}, ["head_dim"]), ("plain", {"hidden_size": 32}, ["hidden_size"]),
    ("plain", {"vocab_size": 300}, ["vocab_size"]), ("plain", {"target_hidden_size": 7168}, ["target_hidden_size"]),
    ("plain", {"draft_vocab_size": 257}, ["draft_vocab_size"]), ("plain", {"draft_vocab_size": None}, []),
    ("tied", {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    ("tied", {"tie_word_embeddings": True, "draft_vocab_size": 256}, []),
    ("plain", {"rope_interleave": True}, ["rope_interleave"]),
    ("plain", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"])])
def test_every_wrong_key_is_named_alone(tmp_path, name, changes, expected):
    draft = written(TARGETS[name], tmp_path) | changes
    assert keys(config_differences(draft, TARGETS[name], 700)) == expected
    assert all(row["why"] for row in config_differences(draft, TARGETS[name], 700))


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_key_that_is_left_out_counts_as_what_engines_fill_in(tmp_path, missing):
    draft = written(TARGETS["plain"], tmp_path)
    del draft[missing]
    assert set(keys(config_differences(draft, TARGETS["plain"], 2049))) == {missing, "max_position_embeddings"}


def spelled(draft: dict, rope: dict, how: str) -> dict:
    """The draft config with this RoPE, {rope_type, rope_theta, …}, in one of three spellings alone."""
    draft = {k: v for k, v in copy.deepcopy(draft).items() if not k.startswith("rope")}
    if how == "rope_parameters":
        return draft | {"rope_parameters": rope}
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    if rope["rope_type"] == "default":
        return draft | {"rope_theta": rope["rope_theta"]} | ({"rope_scaling": None} if how == "type" else {})
    return draft | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling | {how: rope["rope_type"]}}


def random_rope(rng) -> dict:
    """Few values a key, and keys left out at random: pairs are often the same, or the same by a default."""
    kind = rng.choice(["default", "linear", "yarn", "yarn", "llama3"])
    rope = {"rope_type": kind, "rope_theta": rng.choice([1e4, 5e4])}
    if kind != "default":
        rope["factor"] = rng.choice([4.0, 8.0])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 2.0]),
                 "original_max_position_embeddings": rng.choice([128, 256])}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = rng.choice([128, 1024])
        optional = {"beta_fast": [32, 32.0, 16], "beta_slow": [1, 2], "truncate": [True],
                    "attention_factor": [None, 1.2]}
        rope |= {key: rng.choice(values) for key, values in optional.items() if rng.random() < 0.5}
    return rope


def tables(config: dict) -> torch.Tensor:
    """cos and sin as Transformers makes them from this config alone."""
    allowed = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_parameters",
               "rope_theta", "rope_scaling")
    settings = LlamaConfig(**{k: copy.deepcopy(v) for k, v in config.items() if k in allowed and v is not None})
    return torch.stack(LlamaRotaryEmbedding(settings)(torch.zeros(1, 1), torch.arange(300)[None]))


def test_rope_differs_exactly_where_transformers_makes_another_table(tmp_path):
    draft, rng, seen = written(PLAIN, tmp_path), random.Random(0), {True: 0, False: 0}
    for _ in range(300):
        mine, its = random_rope(rng), random_rope(rng)
        if rng.random() < 0.5:
            its = mine | {k: v for k, v in its.items() if k in mine and rng.random() < 0.2 and k != "rope_type"}
        a = spelled(draft, mine, rng.choice(["rope_parameters", "type", "rope_type"]))
        b = spelled({**PLAIN, "head_dim": 16}, its, rng.choice(["rope_parameters", "type", "rope_type"]))
        alike = torch.equal(tables(a), tables(b))
        listed = keys(config_differences(a, b, 700))
        assert all(key.startswith("rope") for key in listed)
        assert (not listed) == alike, (mine, its, listed)
        seen[alike] += 1
    assert min(seen.values()) > 50


def test_the_published_kimi_drafter_with_another_beta(tmp_path):
    """Two public drafters of one target have beta_fast 32 and 1: one of them has another table than the target."""
    draft = written(TARGETS["kimi"], tmp_path, 163840, intermediate=12288)
    draft["rope_parameters"] = draft["rope_parameters"] | {"beta_fast": 32.0}
    draft["rope_scaling"] = draft["rope_scaling"] | {"beta_fast": 32.0}
    [found] = config_differences(draft, TARGETS["kimi"], 8192)
    assert (found["key"], found["draft"], found["target"]) == ("rope_scaling.beta_fast", 32.0, 1.0)


def test_a_yarn_whose_mscale_was_dropped(tmp_path):
    """Without the pair Transformers scales the attention by 0.1 ln(factor) + 1, with it (both 1) not at all."""
    draft = {k: v for k, v in written(TARGETS["yarn"], tmp_path).items() if k != "rope_parameters"}
    draft["rope_scaling"] = {k: v for k, v in draft["rope_scaling"].items() if "mscale" not in k}
    found = config_differences(draft, TARGETS["yarn"], 700)
    assert keys(found) == ["rope_scaling.mscale", "rope_scaling.mscale_all_dim"]
    assert all(row["draft"] is None and row["target"] == 1.0 for row in found)


def test_two_spellings_that_contradict(tmp_path):
    draft = written(TARGETS["yarn"], tmp_path)
    draft["rope_theta"] = 5e4
    assert keys(config_differences(draft, TARGETS["yarn"], 700)) == ["rope_parameters"]


def test_the_mapping_beside_a_config(tmp_path):
    target = TARGETS["plain"]
    write_json(tmp_path / "config.json", target)
    facts = facts_of(tmp_path)
    model = DraftModel(DraftConfig.from_target(facts, 100), torch.zeros(256, 64), torch.arange(100))
    export(model, tmp_path / "export", target_layers=8)
    for path in (tmp_path / "export", tmp_path / "export/config.json"):
        config, mapping = read_config(path)
        assert mapping == 100 and config_differences(config, target, 700, mapping) == []
    for wrong in (99, 0):
        assert keys(config_differences(config, target, 700, wrong)) == ["draft_vocab_size"]
    whole = config | {"draft_vocab_size": 256}  # needs no mapping
    assert config_differences(whole, target, 700, 0) == []
    assert read_config(tmp_path / "config.json")[1] is None
    for content, message in (("[]", "no config"), ("{", "not valid JSON")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path / "bad.json")
    with pytest.raises(UserError, match="does not exist"):
        read_config(tmp_path / "nowhere")


def test_every_pair_of_targets_differs_somewhere(tmp_path):
    """A drafter of one target held against another: unequal RoPE, eps or sizes never pass."""
    distinct = ["plain", "head_dim", "new spelling", "yarn", "llama3", "new yarn", "layer types", "no eps", "kimi"]
    drafts = {name: written(TARGETS[name], tmp_path) for name in distinct}
    for one, other in itertools.permutations(distinct, 2):
        assert config_differences(drafts[one], TARGETS[other], 10), (one, other)
