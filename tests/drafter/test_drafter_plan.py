"""The memory plan of training against real allocations, real processes, and the reference run's figures."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

import peak_training as peak

from eagle3nb.drafter import plan, train
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.plan import PEAKS, Shape, activations, loss, parameters, training_memory
from eagle3nb.errors import UserError
from eagle3nb.files import project_root
from eagle3nb.states.target import facts_of

SMALL = {"h": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "m": 320, "V": 2048, "D": 1024, "T": 512, "K": 3,
         "document": 128, "steps": 2}


def config_of(o: dict) -> DraftConfig:
    return DraftConfig.from_target(peak.facts_of(o), o["D"], fc_norm=o["fc_norm"], norm_output=o["norm_output"])


def shape_of(o: dict) -> Shape:
    return Shape(o["T"], o["K"], o["accumulate"], o["document"], o["supervised"], o["initialise"],
                 freeze_head=o["freeze_head"], teacher_positions=10 ** 6, compute=o["compute"])


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"norm_output": True}, {"heads": 8, "kv_heads": 8}])
def test_parameters_are_the_models(changes):
    o = peak.SHAPE | SMALL | changes
    config = config_of(o)
    with torch.device("meta"):
        model = DraftModel(config, torch.empty(o["V"], o["h"]), torch.arange(o["D"]))
    assert parameters(config) == {"trainable": sum(p.numel() for p in model.parameters()),
                                  "head": model.lm_head.weight.numel(), "frozen": o["V"] * o["h"]}


def test_the_reference_drafter():
    facts = facts_of(project_root() / "params/kimi-k2.5/target")
    counts = {D: parameters(DraftConfig.from_target(facts, D, intermediate=12288)) for D in (163_840, 32_000)}
    assert round(counts[163_840]["trainable"] / 1e9, 2) == 2.00 and round(counts[32_000]["trainable"] / 1e9, 2) == 1.06
    assert round(counts[32_000]["frozen"] / 1e9, 2) == 1.17


def live_bytes(o: dict, tmp_path, monkeypatch) -> int:
    """The most that torch's allocator held at once in the second optimiser step, above what stood before it."""
    found, stepped = [], train.Run.train_step

    def traced(self, *args):
        if self.step != 1:
            return stepped(self, *args)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            stepped(self, *args)
        events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            found.append(held)

    monkeypatch.setattr(train.Run, "train_step", traced)
    peak.run(o, str(tmp_path), peak.RandomStore(o))
    return max(found)


@pytest.mark.parametrize("changes", [
    {}, {"K": 1}, {"K": 6}, {"D": 64}, {"m": 1024}, {"heads": 8, "kv_heads": 8}, {"fc_norm": True},
    {"norm_output": True}, {"freeze_head": True}, {"T": 2048, "steps": 2}, {"document": 512}, {"supervised": 1.0}],
    ids=str)
def test_activations_are_what_a_step_allocates(changes, tmp_path, monkeypatch):
    """Formula and allocator within 5 %, whatever term is made large: the loss's moment of a pack's forward."""
    o = peak.SHAPE | SMALL | changes
    config, shape = config_of(o), shape_of(o)
    foretold = activations(config, shape) + loss(config, shape)[0]
    assert live_bytes(o, tmp_path, monkeypatch) == pytest.approx(foretold, rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"K": 6}, {"D": 64}, {"freeze_head": True}], ids=str)
def test_activations_in_bf16(changes, tmp_path, monkeypatch):
    """Within 8 %, the copies of weights and of the teacher's head included, and less than in fp32."""
    o = peak.SHAPE | SMALL | changes | {"compute": "bf16"}
    config, shape = config_of(o), shape_of(o)
    copies = 2 * parameters(config)["trainable"] + 2 * o["D"] * o["h"]
    assert any(row["step"] == copies for row in training_memory(config, shape, device="cpu")["parts"])
    foretold = activations(config, shape) + loss(config, shape)[0] + copies
    assert live_bytes(o, tmp_path, monkeypatch) == pytest.approx(foretold, rel=0.08)
    assert foretold < activations(config, fp32 := replace(shape, compute="fp32")) + loss(config, fp32)[0]


def test_packs_of_one_optimiser_step_wait_together(tmp_path, monkeypatch):
    """With four packs a step: their states, and the gradients of those before."""
    o = peak.SHAPE | SMALL | {"accumulate": 4}
    config, shape = config_of(o), shape_of(o)
    foretold = activations(config, shape) + loss(config, shape)[0] + 4 * parameters(config)["trainable"]
    assert live_bytes(o, tmp_path, monkeypatch) == pytest.approx(foretold, rel=0.06)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("changes", [
    {"h": 512, "heads": 8, "kv_heads": 4, "m": 1536, "V": 8192, "steps": 2},
    {"h": 256, "heads": 4, "kv_heads": 2, "m": 768, "V": 8192, "D": 2048, "T": 512, "K": 1, "steps": 24,
     "initialise": "target"}], ids=["step and save", "start"])
def test_a_real_trainings_peak(changes):
    """Within 25 %, as the machine is shared; peak_training.py alone measures five shapes, held to 10 %."""
    o = peak.SHAPE | changes
    done = subprocess.run([sys.executable, peak.__file__, json.dumps(changes)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(json.loads(done.stdout).values()) == pytest.approx(max(peak.foretold(o).values()), rel=0.25)


def test_sums_and_places():
    o = peak.SHAPE
    cpu, gpu = (training_memory(config_of(o), shape_of(o), device=device) for device in ("cpu", "cuda"))
    for found in (cpu, gpu):
        at = {moment: sum(row[moment] for row in found["parts"]) for moment in PEAKS}
        assert found["total"] == max(at.values()) and all(row["formula"] for row in found["parts"])
        device = [row for row in found["parts"] if row["where"] == "device"]
        assert found["device"] == max(sum(row[moment] for row in device) for moment in PEAKS) * bool(device)
    assert cpu["device"] == 0 and cpu["host"] == cpu["total"] and {row["where"] for row in cpu["parts"]} == {"host"}
    assert 0 < gpu["device"] < gpu["total"] <= gpu["device"] + gpu["host"]


def test_memory_grows_with_what_it_should(monkeypatch):
    config = config_of(peak.SHAPE)
    base = Shape(1024, 3, supervised=0.5, initialise="head")
    least = training_memory(config, base, device="cpu")["total"]
    for more in ({"pack_tokens": 2048}, {"ttt_steps": 5}, {"supervised": 0.9}, {"accumulate": 4}, {"longest": 4096},
                 {"initialise": "fitted"}):
        assert training_memory(config, replace(base, **more), device="cpu")["total"] > least
    assert training_memory(config, replace(base, freeze_head=True), device="cpu")["total"] < least


@pytest.mark.parametrize("wrong", [{"pack_tokens": 0}, {"ttt_steps": 0}, {"supervised": 1.5}, {"accumulate": 0}])
def test_a_shape_that_cannot_be(wrong):
    with pytest.raises(UserError):
        training_memory(config_of(peak.SHAPE), Shape(**{"pack_tokens": 8, "ttt_steps": 2} | wrong))


def test_the_kimi_plan_fits_where_it_ran():
    """Four GPUs of 80 GB trained it; 16,384 tokens a pack and the full vocabulary would not fit there."""
    facts = facts_of(project_root() / "params/kimi-k2.5/target")

    def on_gpu(D, T):
        config = DraftConfig.from_target(facts, D, intermediate=12288)
        return training_memory(config, Shape(T, 4, 4, T, 0.8, "target"), device="cuda")["device"]

    assert on_gpu(32_000, 8192) < 80e9 < on_gpu(163_840, 16_384)
    config = DraftConfig.from_target(facts, 32_000, intermediate=12288)
    assert plan.regression(config, Shape(8192, 4))[0] > 40 * 7168 ** 2


def test_probed_rate(monkeypatch):
    o = peak.SHAPE | SMALL
    found = plan.probe_rate(config_of(o), shape_of(o), row_tokens=128, seconds=0.2)
    assert found["tokens"] % 512 == 0 and found["seconds"] >= 0.2
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    pack = plan.random_pack(config_of(o), shape_of(o), 128)
    assert [len(at) for at in pack.slots] == [4 * (76 - 1 - k) for k in range(3)]  # 76 of 128 are generated
    assert all(mask.all() for mask in pack.bearing)
    once = plan.probe_rate(config_of(o), Shape(64, 2, 3, supervised=1.0), row_tokens=4096, seconds=0)
    assert once["tokens"] == 3 * 64
    monkeypatch.setattr(plan, "machine_memory", lambda: 10 ** 6)
    with pytest.raises(UserError, match="state a rate"):
        plan.probe_rate(config_of(o), shape_of(o))
