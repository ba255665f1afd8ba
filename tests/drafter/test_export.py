"""The export: what it writes, what its check refuses, and equal logits after a reload."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import gone

from eagle3nb.drafter import engine_parity
from eagle3nb.drafter.export import check, expected_shapes, export, parity, rounded, tensor_table
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, write_json

YARN = {"theta": 50000.0, "scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                                      "beta_fast": 32.0, "beta_slow": 1.0}}


def drafter(facts, **flags):
    torch.manual_seed(0)
    ids = torch.tensor([0, 3, *range(10, 60, 2), 96])
    return DraftModel(DraftConfig.from_target(facts, len(ids), **flags), torch.randn(97, 32), ids)


@pytest.mark.parametrize(("facts", "flags"), [
    ({}, {}), ({"rope": YARN}, {}),
    ({"rope": {"theta": 5e4, "scaling": YARN["scaling"] | {"attention_factor": 1.7}}}, {}),
    ({}, {"fc_norm": True, "norm_output": True}),
    ({"heads": 4, "kv_heads": 4, "head_dim": 16}, {"intermediate": 24}),
])
def test_reloaded_logits_are_equal(tmp_path, tiny_facts, facts, flags):
    model = drafter(tiny_facts(**facts), **flags)
    export(model, tmp_path, target_layers=30, eos=(2,), bos=1)
    assert parity(model, tmp_path) < 1e-5
    with torch.no_grad():
        model.midlayer.self_attn.q_proj.weight.mul_(1.5)
    assert parity(model, tmp_path) > 1e-3, "parity must see a change of one matrix"


def test_layout_is_that_of_sglang(tmp_path, tiny_facts):
    """The names and shapes of SGLANG.md, written out here."""
    export(drafter(tiny_facts()), tmp_path, target_layers=30, eos=(2, 7))
    config, tensors = read_json(tmp_path / "config.json"), load_file(tmp_path / "model.safetensors")
    h, D = 32, 28
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (h, 3 * h), "midlayer.input_layernorm.weight": (h,), "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,), "midlayer.self_attn.q_proj.weight": (32, 2 * h),
        "midlayer.self_attn.k_proj.weight": (16, 2 * h), "midlayer.self_attn.v_proj.weight": (16, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, 32), "midlayer.mlp.gate_proj.weight": (40, h),
        "midlayer.mlp.up_proj.weight": (40, h), "midlayer.mlp.down_proj.weight": (h, 40), "norm.weight": (h,),
        "lm_head.weight": (D, h), "d2t": (D,), "t2d": (97,)}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["eos_token_id"] == [2, 7]
    assert config["draft_vocab_size"] == D and config["vocab_size"] == 97 and config["num_hidden_layers"] == 1
    assert config["eagle3nb"]["captured_layers"] == [2, 15, 27] and "eagle_config" not in config
    assert (tensors["d2t"].numpy() + np.arange(D) == np.flatnonzero(tensors["t2d"].numpy())).all()
    assert {row["tensor"] for row in tensor_table(tmp_path)} == set(tensors)


def test_sixteen_bits(tmp_path, tiny_facts):
    model = drafter(tiny_facts())
    config = export(model, tmp_path, target_layers=8, dtype="bfloat16")
    assert config["torch_dtype"] == "bfloat16" and parity(model, tmp_path) < 1e-5  # of the drafter, rounded alike
    rounding = (rounded(model, "bfloat16").fc.weight - model.fc.weight).abs().max() / model.fc.weight.abs().max()
    assert 1e-5 < rounding < 0.01


def spoil_name(config, tensors):
    tensors["midlayer.self_attn.qkv_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def spoil_shape(config, tensors):
    config["intermediate_size"] = 48


def spoil_dtype(config, tensors):
    tensors["d2t"] = tensors["d2t"].float()


def spoil_absolute_ids(config, tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def spoil_order(config, tensors):
    tensors["d2t"][[3, 4]] = torch.tensor([tensors["d2t"][4] + 1, tensors["d2t"][3] - 1])


def spoil_nan(config, tensors):
    tensors["norm.weight"][0] = float("nan")


def spoil_residual(config, tensors):
    config["norm_before_residual"] = True


def spoil_missing(config, tensors):
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(("spoil", "message"), [
    (spoil_name, "known to no engine"), (spoil_shape, "config.json makes it"), (spoil_dtype, "d2t is torch.float32"),
    (spoil_absolute_ids, "t2d and d2t disagree|ascending"), (spoil_order, "ascending"), (spoil_nan, "not finite"),
    (spoil_residual, "norm_before_residual"), (spoil_missing, "lm_head.weight is missing"),
])
def test_check_refuses_what_would_load_and_be_wrong(tmp_path, tiny_facts, spoil, message):
    export(drafter(tiny_facts()), tmp_path, target_layers=8)
    config = read_json(tmp_path / "config.json")
    tensors = {name: x.clone() for name, x in load_file(tmp_path / "model.safetensors").items()}  # not the mapped file
    check(tmp_path)
    spoil(config, tensors)
    write_json(tmp_path / "config.json", config)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        check(tmp_path)


def test_a_torn_file_is_one_line(tmp_path, tiny_facts):
    export(drafter(tiny_facts()), tmp_path, target_layers=8)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(UserError, match="no whole model.safetensors"):
        check(tmp_path)


def test_shapes_follow_the_config(tiny_facts):
    model = drafter(tiny_facts(), fc_norm=True)
    from eagle3nb.drafter.export import engine_config

    config = engine_config(model.config, 8, (), None, "float32")
    assert expected_shapes(config) == {name: tuple(x.shape) for name, x in model.state_dict().items()}


def interpreter(path, lines):
    """A stand-in for SGLang's Python."""
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)
    return str(path)


def test_without_sglang_the_export_is_not_checked_there(tmp_path, tiny_facts, monkeypatch):
    """Missing, failing as it starts, or hanging: a reason in a line, no exception, nothing left running."""
    model = drafter(tiny_facts())
    export(model, tmp_path, target_layers=8)
    monkeypatch.setattr(engine_parity, "new_log", lambda name: tmp_path / "log")
    monkeypatch.setenv("EAGLE3NB_SGLANG_PYTHON", str(tmp_path / "nowhere"))
    report = engine_parity.sglang(model, tmp_path)
    assert report["checked"] is False and "which cannot be run" in engine_parity.check(report, tmp_path)
    monkeypatch.setenv("EAGLE3NB_SGLANG_PYTHON", interpreter(
        tmp_path / "failing", "echo Traceback >&2; echo 'ImportError: no such kernel' >&2; exit 1\n"))
    assert "not checked in SGLang: SGLang ended: ImportError: no such kernel; its log is " in engine_parity.sglang(
        model, tmp_path)["reason"]
    mark = tmp_path / "pid"
    monkeypatch.setenv("EAGLE3NB_SGLANG_PYTHON", interpreter(
        tmp_path / "hanging", f"sleep 300 & echo $! > {mark}.part; mv {mark}.part {mark}; wait\n"))
    for seconds in (2, 8, 32, 128):  # until its child had begun: that is ended with the group
        told = engine_parity.sglang_all([(model, tmp_path)] * 2, seconds=seconds)[1]["reason"]
        assert f"took longer than {seconds} s" in told
        if mark.exists():
            break
    assert gone(int(mark.read_text()))


def test_what_sglang_refuses_or_computes_otherwise_is_an_error(tmp_path):
    good = {"engine": "SGLang", "checked": True, "version": "0.5.23", "unused": [], "unset": [], "max_relative": 2e-6,
            "by_step": [1e-6, 2e-6], "argmax_equal": 48, "compared": 48, "rope": 0.0, "ids_equal": True}
    assert "within 2.0e-06" in engine_parity.check(good, tmp_path)
    for change, message in ({"unused": ["a.weight"]}, "no parameter takes a.weight"), (
            {"unset": ["b", "c"]}, "no tensor reaches b, c"), ({"ids_equal": False}, "other tokens"), (
            {"rope": 1.01}, "other angles"), ({"rope": float("nan")}, "other angles"), (
            {"max_relative": 1.1e-4}, "1.1e-04 of the largest, 1e-04 is allowed"), (
            {"max_relative": float("inf")}, "inf of the largest"), ({"refused": "ValueError: no"}, "ValueError: no"):
        with pytest.raises(UserError, match=message):
            engine_parity.check(good | change, tmp_path)


def test_a_refused_export_leaves_the_one_that_stands(tmp_path, tiny_facts):
    model = drafter(tiny_facts())
    export(model, tmp_path / "export", target_layers=8)
    (tmp_path / "export" / "README.md").write_text("of these weights")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()}
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"export would load and be wrong: fc.weight has values that are not finite"):
        export(model, tmp_path / "export", target_layers=8)
    with pytest.raises(UserError, match="float32, bfloat16, float16"):
        export(model, tmp_path / "export", target_layers=8, dtype="float64")
    assert {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()} == whole
    assert [file.name for file in tmp_path.iterdir()] == ["export"]
    export(drafter(tiny_facts()), tmp_path / "export", target_layers=8)
    assert not (tmp_path / "export" / "README.md").exists()  # it told of other weights
