"""bf16 compute beside fp32: the same packs, the same weights; what may differ, and by how much.

bf16 keeps 8 bits of a number, a relative error of 2⁻⁹ = 0.2 % each time one is stored; through a layer and K steps a
gradient gathers several of them. Measured over these seeds: 1 to 2 % of a gradient's norm, 0.03 % of a loss, and after
40 steps of AdamW a loss curve within 0.05 %. A wrong term is an error of tens of percent.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eagle3nb.drafter import loss
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import make_pack
from eagle3nb.drafter.settings import Settings
from eagle3nb.drafter.train import make_optimizer
from eagle3nb.drafter.ttt import loss_scales, pack_loss
from eagle3nb.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))

GRADIENT = 0.03  # of a gradient's norm
CURVE = 0.002    # of the loss, at every step of a short training
K = 3


@pytest.fixture
def case(synthetic_store, tiny_facts):
    """(model, packs, teacher's head) of a seed."""
    def make(seed: int):
        store = synthetic_store(rows=8, vocab=96, hidden=48, seed=seed, shortest=20, longest=60)
        facts = tiny_facts(hidden=48, heads=4, kv_heads=2, head_dim=16, intermediate=80, vocab=96)
        D = sorted({*range(0, 96, 2), *range(60)})
        torch.manual_seed(seed)
        model = DraftModel(DraftConfig.from_target(facts, len(D)), store.embedding(), torch.tensor(D))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
        rows = [store.row(i) for i in range(8)]
        return model, [make_pack(rows[:4], model.t2d.numpy(), K), make_pack(rows[4:], model.t2d.numpy(), K)], \
            store.lm_head_rows(D)
    return make


def gradients(model, packs, head, compute: str) -> tuple[float, dict]:
    model.zero_grad(set_to_none=True)
    total = 0.0
    for pack, scales in zip(packs, loss_scales(packs, 0.8, "slot"), strict=True):
        value, counts, _ = pack_loss(model, pack, head, scales, compute)
        assert value.dtype == torch.float32 and int(counts.bearing.sum()) > 0
        value.backward()
        total += value.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_gradients_stay_near(case, seed):
    model, packs, head = case(seed)
    value, exact = gradients(model, packs, head, "fp32")
    near_value, near = gradients(model, packs, head, "bf16")
    assert near_value == pytest.approx(value, rel=1e-3) and near_value != value, "it must have run in bf16"
    for name, gradient in exact.items():
        assert near[name].dtype == torch.float32, "the gradient of a float32 weight"
        assert (near[name] - gradient).norm() < GRADIENT * gradient.norm(), name
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_frozen_head_has_no_gradient(case):
    model, packs, head = case(5)
    model.lm_head.weight.requires_grad_(False)
    _, found = gradients(model, packs, head, "bf16")
    assert found.pop("lm_head.weight") is None and all(float(one.norm()) > 0 for one in found.values())


def test_a_short_training_follows(case):
    """40 steps of AdamW from the same start: updates of 3e-4 that a bf16 weight would round away are kept."""
    curves = {}
    for compute in ("fp32", "bf16"):
        model, packs, head = case(7)
        optimizer = make_optimizer(model, SimpleNamespace(weight_decay=0.01, learning_rate=1e-3))
        curves[compute] = []
        for _ in range(40):
            value, _ = gradients(model, packs, head, compute)
            optimizer.step()
            curves[compute].append(value)
    exact, near = (torch.tensor(curves[compute]) for compute in ("fp32", "bf16"))
    assert exact[-1] < 0.9 * exact[0], "it must learn"
    assert ((near - exact).abs() / exact).max() < CURVE


def test_the_loss_is_float32(monkeypatch):
    """Of bf16 logits as they are: log, exponentials and sums over D round as float32 does, in parts of every size."""
    generator = torch.Generator().manual_seed(0)
    x, head, teacher, teacher_head = ((torch.randn(rows, 24, generator=generator)).bfloat16()
                                      for rows in (30, 400, 12, 400))
    row, label = torch.randint(12, (30,), generator=generator), torch.randint(400, (30,), generator=generator)
    label[::3] = (x @ head.T)[::3].argmax(-1)
    z, p = (x @ head.T).double(), torch.softmax((teacher @ teacher_head.T).double(), -1)[row]
    expected = -(p * torch.log_softmax(z, -1)).sum(-1)
    for part in (1, 1000, 1 << 17):
        monkeypatch.setattr(loss, "PART", part)
        _, each, right = loss.soft_cross_entropy(x, head, teacher, teacher_head, row, label, torch.ones(30))
        assert each.dtype == torch.float32 and (each.double() / expected - 1).abs().max() < 1e-5
        assert torch.equal(right, z.gather(1, label[:, None])[:, 0] == z.amax(-1)) and int(right.sum()) >= 10


def test_the_run_trains_in_it(monkeypatch, tmp_path):
    """The setting reaches every pack of a step, and only those: evaluations and the saved drafter stay fp32."""
    import peak_training as peak

    from eagle3nb.drafter import run

    asked, real = [], run.pack_loss

    def noted(*args):
        asked.append((torch.is_grad_enabled(), *args[4:]))
        return real(*args)

    monkeypatch.setattr(run, "pack_loss", noted)
    o = peak.SHAPE | {"h": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "m": 48, "V": 256, "D": 128, "T": 128,
                      "document": 64, "accumulate": 2, "steps": 2}
    settings = peak.settings_of
    monkeypatch.setattr(peak, "settings_of", lambda *args: replace(settings(*args), compute="bf16",
                                                                   validation_share=0.3))
    peak.run(o, str(tmp_path), peak.RandomStore(o))
    assert {one for one in asked if one[0]} == {(True, "bf16")} and {one for one in asked if not one[0]} == {(False,)}
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for name, tensor in saved.items() if name.endswith("weight")} == {torch.float32}


def test_another_dtype_is_refused():
    with pytest.raises(UserError, match="compute must be fp32 or bf16"):
        Settings.from_json({"states": "a", "drafter": "b", "target": "c", "compute": "fp16"})
