"""Where training starts: fc fitted to what it can know, the target's parts where they fit, and what to leave alone."""

from types import SimpleNamespace

import pytest
import torch

from eagle3nb.drafter.initialise import DAMPING, LAYER, fitted_fc, initialise, target_weights
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError


@pytest.fixture
def model(tiny_facts):
    return DraftModel(DraftConfig.from_target(tiny_facts(), 50), torch.randn(97, 32), torch.arange(50))


def weights(**changes):
    torch.manual_seed(5)
    shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
              "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
              "mlp.gate_proj": (40, 32), "mlp.up_proj": (40, 32), "mlp.down_proj": (32, 40)}
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
        rows.append(SimpleNamespace(aux=aux, last=last.detach(), last_positions=positions.int().numpy()))
    with torch.no_grad():
        found = fitted_fc(model, rows)
    scaled = torch.cat([torch.full((32,), s) for s in (1.0, 30.0, 300.0)])
    assert ((found - law) * scaled).abs().max() < 0.02 * (law * scaled).abs().max()


def test_the_targets_parts(model, synthetic_store):
    store, given = synthetic_store(rows=8), weights()
    head = torch.randn(50, 32)
    initialise(model, "target", head=head, weights=given, rows=store.rows, seed=1)
    layer = model.midlayer
    assert torch.equal(model.lm_head.weight, head) and torch.equal(model.norm.weight, given["norm.weight"])
    assert torch.equal(layer.self_attn.k_proj.weight[:, 32:], given["layer.self_attn.k_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, given["layer.input_layernorm.weight"])
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    torch.testing.assert_close(layer.mlp.down_proj.weight, DAMPING * given["layer.mlp.down_proj.weight"])


def test_parts_of_other_shapes_stay_random(model, synthetic_store):
    given = weights(**{"mlp.gate_proj": (64, 32), "self_attn.q_proj": (48, 32), "self_attn.k_proj": None})
    initialise(model, "target", head=torch.randn(50, 32), weights=given, rows=synthetic_store(rows=8).rows, seed=1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.midlayer.mlp.gate_proj.weight.std().item() == pytest.approx(32 ** -0.5, rel=0.2)


def test_the_seed_alone_decides(tiny_facts):
    def made(how, seed):
        torch.manual_seed(torch.randint(1000, ()).item())
        model = DraftModel(DraftConfig.from_target(tiny_facts(), 50), torch.randn(97, 32), torch.arange(50))
        initialise(model, how, head=torch.ones(50, 32), weights=weights(), rows=[], seed=seed)
        return model.midlayer.mlp.up_proj.weight

    assert torch.equal(made("random", 1), made("random", 1)) and not torch.equal(made("random", 1), made("random", 2))
    assert torch.equal(made("head", 1), made("random", 1))
    with pytest.raises(UserError, match="target, head or random"):
        made("zeros", 1)


def test_reads_what_it_needs_of_a_target(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    target = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=8, num_attention_heads=4, vocab_size=97,
                                          num_key_value_heads=2, intermediate_size=40))
    target.save_pretrained(tmp_path)
    found = target_weights(tmp_path)
    assert set(found) == {"norm.weight", *(f"layer.{name}" for name in LAYER)}
    assert torch.equal(found["layer.mlp.up_proj.weight"], target.model.layers[7].mlp.up_proj.weight)
