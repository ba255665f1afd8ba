"""The plan of the extraction against real models, a real run, and the reference run's figures."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, write_json
from eagle3nb.states import plan, store
from eagle3nb.states.parameters import parameters, weights_bytes
from eagle3nb.states.plan import extraction_memory, hours, memory_needs, standing_bytes, states_bytes, store_files
from eagle3nb.states.rate import probe_rate
from eagle3nb.states.target import bytes_per_token, facts_of

KIMI = project_root() / "params/kimi-k2.5/target"
COMMON = {"hidden_size": 256, "intermediate_size": 600, "num_hidden_layers": 6, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 1000}
MLA = COMMON | {"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 12, "num_experts_per_tok": 4,
                "n_shared_experts": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 2, "n_group": 1,
                "topk_group": 1}
MODELS = {
    "llama": LlamaConfig(**COMMON), "llama tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama head_dim": LlamaConfig(**COMMON, head_dim=64), "qwen2": Qwen2Config(**COMMON),
    "deepseek": DeepseekV3Config(**MLA), "deepseek dense q": DeepseekV3Config(**MLA | {"q_lora_rank": None}),
    "qwen3 moe": Qwen3MoeConfig(**COMMON, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96, head_dim=32,
                                decoder_sparse_step=2, mlp_only_layers=[3]),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=6, num_experts_per_tok=2)}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_models(name):
    config = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    actual = sum(p.numel() for p in model.parameters())
    assert parameters(config.to_dict())["total"] == pytest.approx(actual, rel=2e-3)  # biases and small norms left out


def test_the_parameters_that_a_token_uses():
    """Naive: a token meets every weight but the experts that it is not sent to and the other rows of the embedding."""
    counts = parameters(MODELS["deepseek"].to_dict())
    assert counts["total"] - counts["active"] == 1000 * 256 + 4 * (12 - 4) * 3 * 256 * 128
    assert parameters(MODELS["llama tied"].to_dict())["active"] == parameters(MODELS["llama tied"].to_dict())["total"]


def test_the_reference_target():
    counts, facts = parameters(json.loads((KIMI / "config.json").read_text())), facts_of(KIMI)
    assert counts["total"] == pytest.approx(1.03e12, rel=0.01) and counts["active"] == pytest.approx(32e9, rel=0.02)
    assert weights_bytes(KIMI, "int4")[0] == pytest.approx(594e9, rel=0.01)
    assert bytes_per_token(facts, "bf16") == 57_344
    of_states = {dtype: bytes_per_token(facts, dtype) * 87_800_000 for dtype in ("bf16", "fp8_e4m3")}
    assert round(of_states["bf16"] / 1e12, 2) == 5.03 and round(of_states["fp8_e4m3"] / 1e12, 1) == 2.5
    assert bytes_per_token(facts, "bf16") * 10_000 * 1611 == pytest.approx(924e9, rel=0.001)
    whole = states_bytes(facts, 87_800_000, 87_800_000, "bf16")  # ids, masks, the teacher's figures, the head
    assert 1 < whole / of_states["bf16"] < 1.002


def test_reference_hours():
    training = hours(87_800_000, 87_800_000 / (10.8 * 3600), gpus=4)
    assert (round(training["hours"], 6), round(training["gpu_hours"], 6)) == (10.8, 43.2)
    assert hours(3600, 1)["gpu_hours"] == 1.0
    for rate, gpus in ((0, 1), (-1, 1), (float("nan"), 1), (1, 0)):
        with pytest.raises(UserError):
            hours(100, rate, gpus)


@pytest.mark.parametrize(("records", "mean"), [(3000, 900), (200, 5000), (5000, 40), (1, 70), (50, 200_000)])
def test_files_are_about_those_of_the_store(records, mean):
    lengths = np.random.default_rng(records).integers(1, 2 * mean, records)
    actual = len(store.shard_ranges(lengths, 16_384)) + 2
    assert store_files(int(lengths.sum()), records, 16_384) == pytest.approx(actual, rel=0.3 if mean > 16_384 else 0.1)
    assert store_files(0, 0, 16_384) == 2


def test_weights_as_they_lie_there(tiny_target):
    size, how = weights_bytes(tiny_target, "stored")
    assert size == sum(file.stat().st_size for file in tiny_target.glob("*.safetensors")) and "file" in how
    assert weights_bytes(tiny_target, "fp32")[0] == pytest.approx(size, rel=0.02)
    assert weights_bytes(tiny_target, "int4")[0] == weights_bytes(tiny_target, "bf16")[0]  # it has no experts
    for dtype in ("stored", "fp4", ""):
        with pytest.raises(UserError, match="weights_dtype"):
            weights_bytes(KIMI, dtype)


def test_a_config_without_sizes(tmp_path):
    write_json(tmp_path / "config.json", {"hidden_size": 64})
    with pytest.raises(UserError, match="num_hidden_layers"):
        weights_bytes(tmp_path, "bf16")


def test_sums_and_growth(tiny_target):
    base = {"batch_tokens": 1024, "shard_tokens": 4096, "states_dtype": "bf16", "weights_dtype": "fp32"}
    here = extraction_memory(tiny_target, **base, device="cpu")
    assert here["device"] == 0 and {row["where"] for row in here["parts"]} == {"host"}
    found = extraction_memory(tiny_target, **base)
    assert found["total"] == here["total"] and found["device"] > 0
    for where in ("device", "host"):
        assert found[where] == sum(row["bytes"] for row in found["parts"] if row["where"] == where)
    assert found["total"] == found["device"] + found["host"] and all(row["formula"] for row in found["parts"])
    for more in ({"batch_tokens": 2048}, {"shard_tokens": 8192}, {"states_dtype": "fp32"}, {"longest": 3000}):
        assert extraction_memory(tiny_target, **base | more)["total"] > found["total"]
    assert extraction_memory(tiny_target, **base | {"weights_dtype": "bf16"})["device"] < found["device"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_real_extractions_peak(tmp_path):
    """Within 25 %, as the machine is shared and malloc has its ways."""
    target = tiny.make_target(tmp_path / "target", layers=8, hidden=384, vocab=16_384, intermediate_size=1024)
    o = {"rows": 16, "length": 512, "batch_tokens": 4096, "shard_tokens": 4096}
    script = Path(__file__).with_name("peak_extraction.py")
    done = subprocess.run([sys.executable, script, target, json.dumps(o)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    o = {key: o[key] for key in ("batch_tokens", "shard_tokens")}
    foretold = extraction_memory(target, **o, states_dtype="bf16", weights_dtype="fp32")["total"] - plan.RUNTIME
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["peak"] == pytest.approx(foretold, rel=0.25)
    assert measured["base"] == pytest.approx(plan.RUNTIME, rel=0.25)


def test_probed_rate(tiny_target, monkeypatch):
    """By a clock on which each call of the extraction takes an eighth of a second, whatever the machine does."""
    calls = []
    from eagle3nb.states import extract

    real = extract.shard
    monkeypatch.setattr("eagle3nb.states.rate.time", SimpleNamespace(perf_counter=lambda: len(calls) / 8))
    monkeypatch.setattr(extract, "shard", lambda *args: calls.append(args[3] + 1) or real(*args))
    found = probe_rate(tiny_target, batch_tokens=512, row_tokens=128, seconds=0.3)
    assert calls == [1, 4, 4, 4]  # one row warms up, then whole batches until the time is over
    assert found["tokens"] == 512 * 3 and found["seconds"] == 0.375
    assert found["tokens_per_s"] == pytest.approx(512 * 8) and found["load_s"] == 0.125
    once = probe_rate(tiny_target, batch_tokens=64, row_tokens=4096, supervised=0.0, seconds=0)
    assert once["tokens"] == 512  # at least one batch of one row, of the target's 512 positions


def test_a_target_that_does_not_fit_is_not_probed(monkeypatch):
    with pytest.raises(UserError, match="float32"):
        probe_rate(KIMI, batch_tokens=512)


def test_needs():
    extraction, training = ({"device": 600e9, "host": 20e9, "total": 620e9},
                            {"device": 70e9, "host": 40e9, "total": 9e9})
    rows = memory_needs(extraction, training, device_memory_gb=80, extraction_gpus=8)
    assert [(r["what"], r["needed"], r["available"], r["short"]) for r in rows] == [
        ("extraction", 600e9, 640e9, False), ("extraction", 20e9, None, False),
        ("training", 70e9, 80e9, False), ("training", 40e9, None, False)]
    rows = memory_needs(extraction, training, device_memory_gb=64, extraction_gpus=8)
    assert [r["short"] for r in rows] == [True, False, True, False]
    with pytest.raises(ValueError, match="CPU"):
        memory_needs(extraction | {"device": 0}, training, device_memory_gb=80)
    here = memory_needs(extraction, training)
    assert [(r["needed"], r["short"]) for r in here] == [(620e9, plan.machine_memory() < 620e9), (9e9, False)]
    assert "needed (GB)" in plan.in_gb(here)[0] and plan.in_gb(rows)[1]["available (GB)"] is None


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("123456\n")
    monkeypatch.setattr(plan, "LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
    assert plan.machine_memory() == 123456
    (tmp_path / "memory.max").write_text("max\n")
    assert plan.machine_memory() > 1e8


def test_what_stands_is_told_while_another_writes_there(tmp_path, monkeypatch):
    (tmp_path / "shard").write_bytes(b"x" * 100)
    (tmp_path / "folder").mkdir()
    there = [*tmp_path.iterdir(), tmp_path / "renamed.partial"]
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(there))
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: self.suffix == ".partial" or is_file(self))
    assert standing_bytes(tmp_path) == 100 and standing_bytes(tmp_path / "none") == 0
