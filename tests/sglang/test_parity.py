"""Exports in SGLang's own LlamaForCausalLMEagle3: equal for every variant, and unequal as soon as one flag or name is.

One process computes them all. Tolerance: 1e-4 of the largest logit (engine_parity.BOUND); both sides compute in float32
and sum in other orders, which was 3e-6 on SmolLM2's shapes. A flag that is read otherwise is off by more than 1e-2.
"""

import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.drafter import engine_parity, flags
from eagle3nb.drafter.export import engine_config, export
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, write_json
from eagle3nb.states.target import TargetFacts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for the CPU; on a GPU box notebook 5 checks")

YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64}

VARIANTS = {  # target's facts, drafter's flags, export's dtype
    "plain": ({}, {}, "float32"),
    "fc_norm": ({}, {"fc_norm": True}, "float32"),
    "norm_output": ({}, {"norm_output": True}, "float32"),
    "EAGLE-3.1": ({}, {"fc_norm": True, "norm_output": True, "intermediate": 24}, "bfloat16"),
    "head_dim": ({"heads": 4, "kv_heads": 1, "head_dim": 16}, {}, "float32"),
    "llama3": ({"rope": {"theta": 5e5, "scaling": LLAMA3}}, {}, "float32"),
    "linear": ({"rope": {"theta": 1e4, "scaling": {"type": "linear", "factor": 4}}}, {}, "float32"),
    "yarn": ({"rope": {"theta": 5e4, "scaling": YARN}}, {}, "float32"),
    "yarn, Kimi's": ({"rope": {"theta": 5e4, "scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}}, {}, "float32"),
    "yarn, one mscale": ({"rope": {"theta": 5e4, "scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}}}, {},
                         "float32"),
    "yarn, attention_factor": ({"rope": {"theta": 5e4, "scaling": YARN | {"attention_factor": 1.7}}}, {}, "float16"),
    "longrope": ({"rope": {"theta": 1e4, "scaling": LONG}}, {}, "float32"),
}


def facts(**changes) -> TargetFacts:
    return TargetFacts(**{"architecture": "LlamaForCausalLM", "hidden": 32, "layers": 10, "heads": 4, "kv_heads": 2,
                          "head_dim": 8, "intermediate": 40, "vocab": 97, "eps": 1e-5, "max_positions": 256,
                          "eos": (2,), "tie_embedding": False, "rope": {"theta": 10000.0, "scaling": None}, **changes})


def drafter(target: TargetFacts, **settings) -> DraftModel:
    """Random, with norms that are no ones, so that a norm too many or one without its weight shows."""
    torch.manual_seed(0)
    ids = torch.tensor([0, 3, *range(10, 60, 2), 96])
    model = DraftModel(DraftConfig.from_target(target, len(ids), **settings), torch.randn(97, 32), ids)
    for name, weight in model.named_parameters():
        weight.data = torch.exp(0.5 * torch.randn_like(weight)) if "norm" in name else torch.randn_like(weight) * 0.3
    return model


def config(**changes):
    return lambda settings, tensors: settings.update(changes)


def dropped(name):
    return lambda settings, tensors: tensors.pop(name)


def renamed(settings, tensors):
    tensors["midlayer.mlp.gate.weight"] = tensors.pop("midlayer.mlp.gate_proj.weight")


def absolute(settings, tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


FAULTS = {  # what is done to the export of which variant, and what is said of it
    "fc_norm off": ("fc_norm", config(fc_norm=False), "no parameter takes fc_norm.0.weight"),
    "fc_norm on": ("plain", config(fc_norm=True), "no tensor reaches model.fc_norm.0.weight"),
    "norm_output off": ("norm_output", config(norm_output=False), "logits differ by"),
    "norm_before_fc": ("plain", config(norm_before_fc=True), "no tensor reaches model.input_norm.weight"),
    "eps": ("plain", config(rms_norm_eps=0.1), "logits differ by"),
    "theta": ("plain", config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "other angles"),
    "scaling left out": ("llama3", config(rope_parameters=None, rope_scaling=None), "other angles"),
    "scaling of two minds": ("yarn", config(rope_scaling=YARN | {"factor": 4.0}), "other angles"),
    "dynamic": ("plain", config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
                "other angles"),
    "attention_bias": ("plain", config(attention_bias=True), "no tensor reaches model.layers.0.self_attn.o_proj.bias"),
    "tied": ("plain", config(tie_word_embeddings=True), "no parameter takes lm_head.weight"),
    "activation": ("plain", config(hidden_act="gelu"), "Unsupported activation: gelu"),
    "no draft vocabulary": ("plain", lambda settings, tensors: settings.pop("draft_vocab_size"), "draft_vocab_size"),
    "renamed": ("plain", renamed, "no parameter takes midlayer.mlp.gate.weight"),
    "a norm is missing": ("plain", dropped("midlayer.hidden_norm.weight"), "no tensor reaches .*hidden_norm.weight"),
    "no mapping": ("plain", dropped("d2t"), "mapped to other tokens"),
    "absolute ids": ("plain", absolute, "mapped to other tokens"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory, times):
    """Name → report: every variant, and every fault in a copy of its variant's export."""
    root, pairs = tmp_path_factory.mktemp("exports"), {}
    for name, (changes, settings, dtype) in VARIANTS.items():
        model = drafter(facts(**changes), **settings)
        export(model, root / name, target_layers=10, dtype=dtype)
        pairs[name] = model, root / name
    for name, (variant, spoil, _) in FAULTS.items():
        model, folder = pairs[variant]
        settings, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        spoil(settings, tensors)
        (root / f"fault, {name}").mkdir()
        write_json(root / f"fault, {name}" / "config.json", settings)
        save_file(tensors, root / f"fault, {name}" / "model.safetensors")
        pairs[f"fault, {name}"] = model, root / f"fault, {name}"
    began = time.perf_counter()
    found = engine_parity.sglang_all(list(pairs.values()))
    times.append(f"{len(pairs)} exports in SGLang's own class: {time.perf_counter() - began:.0f} s")
    return dict(zip(pairs, found, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_sglang_computes_what_the_drafter_does(reports, name):
    report = reports[name]
    assert engine_parity.faults(report) == [] and report["max_relative"] < 2e-5
    assert report["argmax_equal"] == report["compared"] == 72
    assert report["context"] == (1024 if name == "linear" else 256)  # there SGLang multiplies by the factor
    assert engine_parity.check(report, "export").startswith(f"SGLang {report['version']}'s own class gives")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(reports, name):
    with pytest.raises(UserError, match=FAULTS[name][2]):
        engine_parity.check(reports[f"fault, {name}"], "export")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_of_flags_says_so_too(name, tmp_path):
    """What really computes the same is not refused; what SGLang takes otherwise by default is what the table says."""
    changes, settings, dtype = VARIANTS[name]
    model = drafter(facts(**changes), **settings)
    written = export(model, tmp_path, target_layers=10, dtype=dtype, target=facts(**changes))
    rows = {row["setting"]: row for row in flags.table(model.config, written, facts(**changes))}
    assert rows["dtype"]["verdict"] == ("amber" if dtype == "float32" else "ok")


OF_TENSORS = ("renamed", "a norm is missing", "no mapping", "absolute ids")  # export.check refuses those


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in OF_TENSORS])
def test_the_table_of_flags_refuses_every_fault_of_the_config(name):
    variant, spoil, _ = FAULTS[name]
    changes, settings, _ = VARIANTS[variant]
    model = drafter(facts(**changes), **settings)
    written = engine_config(model.config, 10, (2,), None, "bfloat16")
    flags.refuse(flags.table(model.config, written, facts(**changes)))
    spoil(written, {})
    with pytest.raises(UserError, match="silently wrong"):
        flags.refuse(flags.table(model.config, written, facts(**changes)))


def test_dtypes_that_sglang_takes_by_itself(reports):
    assert {name: reports[name]["dtype_auto"] for name in ("plain", "EAGLE-3.1", "yarn, attention_factor")} == {
        "plain": "float16", "EAGLE-3.1": "bfloat16", "yarn, attention_factor": "float16"}
    assert np.isinf(reports["fault, a norm is missing"]["max_relative"])
