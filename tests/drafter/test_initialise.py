"""Where training starts: fc fitted to what it can know, the target's parts where they fit, and what to leave alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3nb.drafter.fitting import fit_fc
from eagle3nb.drafter.initialise import LAYER, initialise, target_weights
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import make_pack
from eagle3nb.drafter.ttt import loss_scales, pack_loss
from eagle3nb.errors import UserError


@pytest.fixture
def model(tiny_facts):
    return DraftModel(DraftConfig.from_target(tiny_facts(), 50), torch.randn(97, 32), torch.arange(50))


def weights(**changes):
    torch.manual_seed(5)
    shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
              "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "mlp.gate_proj": (40, 32),
              "mlp.up_proj": (40, 32)}
    layer = {f"layer.{name}.weight": torch.randn(shape) for name, shape in {**shapes, **changes}.items() if shape}
    return {"norm.weight": torch.rand(32) + 0.5, **layer}


def test_fc_finds_a_linear_law(model):
    """last[p] = norm weight · (M a[p − 1]) exactly, layers of very different scale, and a first token beyond all
    bounds: M comes back to a part in a thousand (the ridge shrinks it a little)."""
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(32, 96, generator=generator) / torch.tensor([1.0] * 32 + [30.0] * 32 + [300.0] * 32)
    rows = []
    for _ in range(60):
        aux = torch.randn(50, 96, generator=generator) * torch.tensor([1.0] * 32 + [30.0] * 32 + [300.0] * 32)
        aux[0] = 2e4
        positions = torch.arange(10, 49)
        last = (aux[positions - 1] @ law.T) * model.norm.weight
        rows.append(SimpleNamespace(aux=aux, last=last.detach(), last_positions=positions.int().numpy(),
                                    ids=np.zeros(50, np.int32)))
    fit_fc(model, rows)
    found = model.fc.weight.detach()
    scaled = torch.cat([torch.full((32,), s) for s in (1.0, 30.0, 300.0)])
    assert ((found - law) * scaled).abs().max() < 0.02 * (law * scaled).abs().max()


def test_the_targets_parts(model, synthetic_store):
    store, given = synthetic_store(rows=8), weights()
    head = torch.randn(50, 32)
    initialise(model, "target", head=head, weights=given, rows=store.rows, steps=3, seed=1)
    layer = model.midlayer
    assert torch.equal(model.lm_head.weight, head) and torch.equal(model.norm.weight, given["norm.weight"])
    assert torch.equal(layer.self_attn.k_proj.weight[:, 32:], given["layer.self_attn.k_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, given["layer.input_layernorm.weight"])
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert torch.equal(layer.mlp.up_proj.weight, given["layer.mlp.up_proj.weight"])
    assert not layer.mlp.down_proj.weight.any() and not layer.self_attn.o_proj.weight.any()


def test_a_fitted_drafter_guesses_before_any_training(tiny_facts, synthetic_store):
    """Whole chain in closed form: the own-slot attention that is built does what the fit supposed it to do, and the
    guesses are far above those of the other starts."""
    store, given = synthetic_store(rows=120, seed=3), weights()
    given["norm.weight"] = torch.ones(32)
    t2d, accuracy, facts = np.ones(97, bool), {}, tiny_facts(kv_heads=4, intermediate=256)
    for how in ("random", "target", "fitted"):
        model = DraftModel(DraftConfig.from_target(facts, 97), store.embedding(), torch.arange(97))
        initialise(model, how, head=store._lm_head, weights=given, rows=store.rows[:100], steps=3, seed=1)
        pack = make_pack(store.rows[100:], t2d, 3)
        with torch.no_grad():
            (scales,) = loss_scales([pack], 1.0, "slot")
            accuracy[how] = pack_loss(model, pack, store._lm_head, scales)[1].accuracy
    assert (accuracy["fitted"] > 0.3).all() and accuracy["fitted"][0] > 2 * accuracy["target"][0], accuracy


def test_parts_of_other_shapes_stay_random(model, synthetic_store):
    given = weights(**{"mlp.gate_proj": (64, 32), "self_attn.q_proj": (48, 32), "self_attn.k_proj": None})
    initialise(model, "target", head=torch.randn(50, 32), weights=given, rows=synthetic_store(rows=8).rows, steps=2,
               seed=1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.midlayer.mlp.gate_proj.weight.std().item() == pytest.approx(32 ** -0.5, rel=0.2)


def test_the_seed_alone_decides(tiny_facts):
    def made(how, seed):
        torch.manual_seed(torch.randint(1000, ()).item())
        model = DraftModel(DraftConfig.from_target(tiny_facts(), 50), torch.randn(97, 32), torch.arange(50))
        initialise(model, how, head=torch.ones(50, 32), weights=weights(), rows=[], steps=1, seed=seed)
        return model.midlayer.mlp.up_proj.weight

    assert torch.equal(made("random", 1), made("random", 1)) and not torch.equal(made("random", 1), made("random", 2))
    assert torch.equal(made("head", 1), made("random", 1))
    with pytest.raises(UserError, match="fitted, target, head, random"):
        made("zeros", 1)


def test_reads_what_it_needs_of_a_target(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    target = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=8, num_attention_heads=4, vocab_size=97,
                                          num_key_value_heads=2, intermediate_size=40))
    target.save_pretrained(tmp_path)
    found = target_weights(tmp_path)
    assert set(found) == {"norm.weight", *(f"layer.{name}" for name in LAYER)}
    assert torch.equal(found["layer.mlp.up_proj.weight"], target.model.layers[7].mlp.up_proj.weight)
