"""The target as files: facts from either spelling, weights under any prefix, an identity that the files decide."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.errors import UserError
from eagle3nb.states import target as targets

KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "kv_lora_rank": 512, "v_head_dim": 128, "intermediate_size": 18432, "vocab_size": 163840, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "eos_token_id": 163586}}


def write_config(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return targets.facts_of(folder)


def test_facts_of_a_wrapped_config_from_config_json_alone(tmp_path):
    facts = write_config(tmp_path, KIMI, {"eos_token_id": [163586, 163585]})
    assert (facts.hidden, facts.layers, facts.vocab, facts.head_dim, facts.kv_heads) == (7168, 61, 163840, 128, 64)
    assert facts.architecture == "KimiK25ForConditionalGeneration"
    assert facts.eos == (163586, 163585) and facts.max_positions == 262144
    assert facts.rope["theta"] == 50000.0 and facts.rope["scaling"]["factor"] == 64.0
    assert targets.captured_layers(facts.layers) == (2, 30, 58)
    assert targets.bytes_per_token(facts, "bf16") == 57344


def test_rope_reads_the_same_from_both_spellings():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    old = targets.rope_of({"rope_theta": 1e6, "rope_scaling": scaling})
    new = targets.rope_of({"rope_parameters": {"rope_theta": 1e6, **scaling}})
    assert old == new == {"theta": 1e6, "scaling": scaling}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    assert targets.rope_of(plain) == targets.rope_of({"rope_theta": 1e5}) == {"theta": 1e5, "scaling": None}
    a_layer_type = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    assert targets.rope_of(a_layer_type)["theta"] == 5e5


def test_captured_layers_must_differ():
    assert targets.captured_layers(30) == (2, 15, 27)
    assert targets.captured_layers(8) == (2, 4, 5)
    with pytest.raises(UserError, match="too shallow"):
        targets.captured_layers(6)


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "intermediate_size"])
def test_a_config_that_is_no_decoder_is_named(tmp_path, missing):
    config = {**KIMI["text_config"]}
    del config[missing]
    with pytest.raises(UserError, match=missing):
        write_config(tmp_path, config)


@pytest.mark.parametrize("prefix, head", [("language_model.model.", "language_model.lm_head.weight"),
                                          ("model.language_model.", "lm_head.weight")])
def test_weights_are_found_under_a_wrappers_prefix_and_in_shards(tiny_target, tmp_path, prefix, head):
    plain = load_file(tiny_target / "model.safetensors")
    wrapped = {head if name == "lm_head.weight" else prefix + name.removeprefix("model."): value
               for name, value in plain.items()}
    names = sorted(wrapped)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in halves.items():
        save_file({name: wrapped[name] for name in chosen}, tmp_path / file)
    index = {name: file for file, chosen in halves.items() for name in chosen}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text((tiny_target / "config.json").read_text())
    assert torch.equal(targets.embedding(tmp_path), plain["model.embed_tokens.weight"])
    assert torch.equal(targets.lm_head(tmp_path), plain["lm_head.weight"])
    assert torch.equal(targets.final_norm(tmp_path), plain["model.norm.weight"])
    layer = targets.layer_weights(tmp_path, 7)
    assert torch.equal(layer["self_attn.q_proj.weight"], plain["model.layers.7.self_attn.q_proj.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match="missing"):
        targets.read_weights(tmp_path, sorted(plain))


def test_a_tied_targets_head_is_its_embedding(tmp_path):
    import tiny

    folder = tiny.make_target(tmp_path / "tied", tie=True)
    assert targets.facts_of(folder).tie_embedding
    assert torch.equal(targets.lm_head(folder), targets.embedding(folder))


def test_what_is_missing_is_one_line(tiny_target, tmp_path):
    with pytest.raises(UserError, match="no tensor model.nothing"):
        targets.read_weights(tiny_target, ["model.nothing"])
    with pytest.raises(UserError, match="no layer 8"):
        targets.layer_weights(tiny_target, 8)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        targets.target_dir(tmp_path)
    (tmp_path / "config.json").write_text((tiny_target / "config.json").read_text())
    with pytest.raises(UserError, match="no safetensors"):
        targets.embedding(tmp_path)
    with pytest.raises(UserError, match="no usable tokenizer"):
        targets.load_tokenizer(tmp_path)


def test_identity_follows_the_content_not_the_place(tmp_path, monkeypatch):
    import tiny

    monkeypatch.setattr(targets, "project_root", lambda: tmp_path)
    one, same, other = (tiny.make_target(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    first = targets.target_identity(one)
    assert first == targets.target_identity(same)
    changed = targets.target_identity(other)
    assert changed["weights"] != first["weights"] and changed["config"] == first["config"]
    monkeypatch.setattr(targets, "xxh3_file", lambda _: pytest.fail("hashed again"))
    assert targets.target_identity(one) == first
    os.utime(one / "model.safetensors", ns=(1, 1))
    with pytest.raises(pytest.fail.Exception):
        targets.target_identity(one)
