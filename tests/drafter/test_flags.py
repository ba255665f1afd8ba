"""The table of flags: a right export has no row refused, and each planted fault is refused by the row that it is of.

That SGLang really computes so is tested in tests/sglang/test_parity.py. Here the settings of RoPE are also held against
Transformers' own tables, with which training runs.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3nb.drafter import flags
from eagle3nb.drafter.differences import config_differences
from eagle3nb.drafter.export import engine_config, export
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.states.target import TargetFacts

YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64}
SCALINGS = {"none": None, "linear": {"type": "linear", "factor": 4}, "llama3": LLAMA3, "yarn": YARN,
            "Kimi's yarn": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "two mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
            "one mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0},
            "attention_factor": YARN | {"attention_factor": 1.7}, "no truncation": YARN | {"truncate": False},
            "attn_factor": YARN | {"attn_factor": 2.0, "extrapolation_factor": 0.5}, "longrope": LONG}


def facts(**changes) -> TargetFacts:
    return TargetFacts(**{"architecture": "LlamaForCausalLM", "hidden": 32, "layers": 10, "heads": 4, "kv_heads": 2,
                          "head_dim": 8, "intermediate": 40, "vocab": 97, "eps": 1e-5, "max_positions": 256,
                          "eos": (2,), "tie_embedding": False, "rope": {"theta": 50000.0, "scaling": None}, **changes})


def pair(target: TargetFacts, dtype: str = "bfloat16", **settings) -> tuple[DraftConfig, dict]:
    config = DraftConfig.from_target(target, 28, **settings)
    return config, engine_config(config, target.layers, (2,), None, dtype)


def verdicts(rows) -> dict:
    return {row["setting"]: row["verdict"] for row in rows if row["verdict"] != "ok"}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("settings", [{}, {"fc_norm": True, "norm_output": True, "intermediate": 24}])
def test_a_right_export_passes(scaling, settings):
    target = facts(rope={"theta": 5e4, "scaling": SCALINGS[scaling]}, head_dim=8, kv_heads=1)
    config, written = pair(target, **settings)
    rows = flags.table(config, written, target)
    flags.refuse(rows)
    assert verdicts(rows) == ({"RoPE": "amber"} if scaling == "longrope" else {})
    assert [row["setting"] for row in rows] == list(flags.PLACES) and len({tuple(row) for row in rows}) == 1
    assert all(type(value) is str for row in rows for value in row.values())


@pytest.mark.parametrize(("setting", "change"), [
    ("captured layers", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}),
    ("captured layers", {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),                     # vLLM alone reads it
    ("layers joined", {"num_aux_hidden_states": 4}), ("norm of the joined states", {"norm_before_fc": True}),
    ("norm of the joined states", {"eagle_config": {"norm_before_fc": True}}),
    ("norm of each captured layer", {"fc_norm": True}), ("norm of each captured layer", {"use_aux_norm": True}),
    ("normed state to the next step", {"norm_output": True}),
    ("residual of the normed state", {"norm_before_residual": True}), ("eps of the norms", {"rms_norm_eps": 1e-6}),
    ("eps of the norms", {"rms_norm_eps": None}), ("draft layers", {"num_hidden_layers": 2}),
    ("hidden size", {"hidden_size": 64}), ("MLP width", {"intermediate_size": 41}),
    ("heads, key heads, head size", {"num_attention_heads": 8}),
    ("heads, key heads, head size", {"num_key_value_heads": 4}), ("heads, key heads, head size", {"head_dim": 16}),
    ("RoPE", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("RoPE", {"rope_scaling": LLAMA3}), ("RoPE", {"rope_parameters": None, "rope_theta": None}),
    ("biases", {"attention_bias": True}), ("biases", {"mlp_bias": True}), ("biases", {"bias": True}),
    ("activation", {"hidden_act": "gelu"}), ("attention window", {"sliding_window": 64, "layer_types":
                                                                   ["sliding_attention"]}),
    ("embedding", {"target_hidden_size": 64}), ("head", {"tie_word_embeddings": True}),
    ("head", {"draft_vocab_size": None}), ("scale of the logits", {"logit_scale": 0.5}),
    ("vocabulary", {"vocab_size": 98}), ("draft vocabulary", {"draft_vocab_size": 29}),
])
def test_each_planted_fault_is_refused_by_its_row(setting, change):
    config, written = pair(facts())
    for key, value in change.items():  # None: left out, so that the engines' defaults count; null where it is a value
        if value is None and key != "draft_vocab_size":
            written.pop(key)
        else:
            written[key] = value
    rows = flags.table(config, written, facts())
    assert verdicts(rows)[setting] == "refused"
    with pytest.raises(UserError, match=f"silently wrong: .*{setting}") as caught:
        flags.refuse(rows)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_the_engines_default():
    """What Transformers' LlamaConfig fills in, read here from itself."""
    default = LlamaConfig()
    target = facts(hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=32000, eps=1e-6,
                   max_positions=2048, layers=32)
    for engine in (flags.sglang, flags.vllm):
        values = engine({"draft_vocab_size": 9, "torch_dtype": "bfloat16"}, target)
        assert values["eps of the norms"] == default.rms_norm_eps and values["vocabulary"] == default.vocab_size
        assert values["draft layers"] == default.num_hidden_layers and values["activation"] == default.hidden_act
        assert values["heads, key heads, head size"] == (32, default.num_key_value_heads, default.head_dim)
        assert values["MLP width"] == default.intermediate_size and values["hidden size"] == default.hidden_size
        assert values["positions"] == default.max_position_embeddings
        assert values["RoPE"] == {"type": "default", "theta": default.rope_parameters["rope_theta"]}


def test_captured_layers_are_told_apart_by_engine_and_target():
    """SGLang takes explicit ids as layers' outputs and adds one, save where its target's class does not."""
    llama, kimi = facts(), facts(architecture="KimiK25ForConditionalGeneration", layers=61)
    outputs, inputs = [1, 4, 6], [2, 5, 7]
    assert flags.sglang_layers(outputs, llama) == inputs == flags.default_layers(10)
    assert flags.sglang_layers([1, 29, 57], kimi) == [2, 30, 58] == flags.sglang_layers([2, 30, 58], kimi)
    assert flags.sglang_layers([2, 30, 58], facts(layers=61)) == [3, 31, 59]
    both = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs}, "eagle_aux_hidden_state_layer_ids": inputs}
    config, written = pair(llama)
    assert verdicts(flags.table(config, written | both, llama)) == {}  # one key an engine
    rows = flags.table(config, written, llama, captured=[3, 5, 7])
    assert verdicts(rows) == {"captured layers": "refused"}
    odd = facts(architecture="MiniMaxM3SparseForConditionalGeneration")
    with pytest.raises(UserError, match="SGLang would use 3, 6, 8"):
        flags.refuse(flags.table(config, written, odd))


def test_what_is_only_a_limit_is_amber():
    config, written = pair(facts(), "float32")
    assert verdicts(flags.table(config, written, facts())) == {"dtype": "amber"}
    written = written | {"torch_dtype": "bfloat16", "max_position_embeddings": 128}
    rows = flags.table(config, written, facts())
    assert verdicts(rows) == {"positions": "amber"} and "--context-length is at most 128" in str(rows)
    flags.refuse(rows)


def test_older_engines_may_ignore_the_norms_of_eagle_3_1():
    config, written = pair(facts(), norm_output=True)
    for versions, bad in (({"SGLang": "0.5.9"}, True), ({"SGLang": "0.5.23"}, False), ({"vLLM": "0.31.1+cpu"}, True),
                          ({"vLLM": "0.32.0+cpu", "SGLang": "0.6.0"}, False)):
        assert bool(verdicts(flags.table(config, written, facts(), versions=versions))) is bad, versions
    plain = pair(facts())
    assert verdicts(flags.table(*plain, facts(), versions={"SGLang": "0.4.0"})) == {}


def test_versions_of_what_is_installed(tmp_path, monkeypatch):
    for name, version in (("vllm", "0.31.0+cpu"), ("sglang", "0.5.23")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flags.installed() == {"SGLang": "0.5.23", "vLLM": "0.31.0+cpu"}


def test_the_audit_takes_the_portable_spelling_for_the_targets_own():
    scaling = SCALINGS["attention_factor"]
    _, written = pair(facts(rope={"theta": 5e4, "scaling": scaling}))
    target = {key: written[key] for key in ("hidden_size", "vocab_size", "num_attention_heads", "head_dim",
                                            "rms_norm_eps", "max_position_embeddings")}
    target |= {"rope_theta": 5e4, "rope_scaling": scaling, "tie_word_embeddings": False}
    assert "attn_factor" in written["rope_scaling"] and config_differences(written, target, 100) == []
    target["rope_scaling"] = scaling | {"attention_factor": 1.8}
    assert [row["key"] for row in config_differences(written, target, 100)] == ["rope_scaling.attention_factor"]


def test_nothing_is_written_that_is_refused(tmp_path):
    target = facts(rope={"theta": 1e4, "scaling": {"type": "dynamic", "factor": 2.0}})
    config = DraftConfig.from_target(target, 28)
    model = DraftModel(config, torch.randn(97, 32), torch.arange(28))
    with pytest.raises(UserError, match="RoPE .*grows beyond 256, but SGLang would use .*grows at once"):
        export(model, tmp_path, target_layers=10, target=target)
    assert list(tmp_path.iterdir()) == []


def tables(rope: dict, positions: int) -> tuple[np.ndarray, float]:
    """Transformers' inverse frequencies and magnitude for these settings."""
    made = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8,
                                            max_position_embeddings=positions, rope_parameters=dict(rope)))
    return made.inv_freq.numpy(), float(made.attention_scaling)


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "attn_factor"])
def test_the_portable_spelling_is_the_same_to_transformers(scaling):
    """The table by which training turned, and the one of the export's config; and the magnitude that the row states."""
    config = DraftConfig.from_target(facts(rope={"theta": 5e4, "scaling": SCALINGS[scaling]}), 28)
    (ours, magnitude), (spelt, again) = tables(config.rope, 256), tables(flags.portable(config.rope, 256), 256)
    np.testing.assert_array_equal(ours, spelt)
    assert again == pytest.approx(magnitude, rel=1e-8)
    assert flags.rope_trained(config.rope, 256).get("magnitude", 1.0) == pytest.approx(magnitude, rel=1e-8)


def test_random_yarn_settings_are_the_same_to_all_three():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rope = {"rope_type": "yarn", "rope_theta": float(rng.choice([1e4, 5e4])), "factor": float(rng.integers(1, 65)),
                "original_max_position_embeddings": int(rng.integers(32, 5000))}
        for key, values in {"mscale": [0, 0.5, 1.0], "mscale_all_dim": [0, 0.5, 1.0], "attention_factor": [0.8, 1.3],
                            "attn_factor": [2.0], "beta_fast": [16.0, None], "truncate": [False]}.items():
            if rng.random() < 0.4:
                rope[key] = values[rng.integers(len(values))]
        spelt = flags.portable(rope, 4096)
        ours, written = flags.rope_trained(rope, 4096), {"rope_parameters": spelt, "max_position_embeddings": 4096}
        theirs = [flags.rope_sglang(written), flags.rope_vllm(written), flags.rope_trained(spelt, 4096)]
        for other in theirs:
            assert math.isclose(other.pop("magnitude"), ours["magnitude"], rel_tol=1e-8)
            assert other == {key: value for key, value in ours.items() if key != "magnitude"}
        assert tables(rope, 4096)[1] == pytest.approx(ours["magnitude"], rel=1e-8)


def test_sglang_takes_an_mscale_of_nought_as_given():
    """0.1 · 0.7 · ln 8 + 1 over 1, where Transformers and vLLM go by the factor alone."""
    written = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7,
                                   "mscale_all_dim": 0.0, "original_max_position_embeddings": 32}}
    assert flags.rope_sglang(written)["magnitude"] == pytest.approx(0.07 * math.log(8) + 1)
    assert flags.rope_vllm(written)["magnitude"] == pytest.approx(0.1 * math.log(8) + 1)


def test_rows_are_of_the_drafter_not_of_the_target():
    """A narrower MLP and other heads are the drafter's own affair; another hidden size is not."""
    target = facts()
    config, written = pair(target, heads=8, kv_heads=8, intermediate=16)
    assert verdicts(flags.table(config, written, target)) == {}
    other = dataclasses.replace(target, hidden=64)
    assert set(verdicts(flags.table(config, written, other))) == {"hidden size"}
