"""The training step against DESIGN section 4 written out: explicit loops over documents, steps, slots and keys.

The reference shares no code with the package, keeps no cache (a key is computed anew for every query that sees it),
and runs in float64; the package runs in float32. Loss, every gradient and every accuracy agree to 1e-5 of the largest
value.
"""

import math

import numpy as np
import pytest
import torch

from eagle3nb.drafter import attention, loss
from eagle3nb.drafter.model import DraftConfig, DraftModel, RMSNorm
from eagle3nb.drafter.packing import make_pack
from eagle3nb.drafter.ttt import loss_scales, pack_loss

TOLERANCE = 1e-5


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x, position, theta):
    half = len(x) // 2
    out = [None] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(out)


class Naive:
    """One document under one set of parameters (a dict of float64 leaves)."""

    def __init__(self, p, row, embedding, c):
        self.p, self.c, self.embedding = p, c, embedding.double()
        self.ids, self.aux = row.ids.tolist(), row.aux.double()

    def normed_inputs(self, t, k):
        """g and u of step k at slot t."""
        p, c = self.p, self.c
        if k == 0:
            a = self.aux[t]
            if c.fc_norm:
                h = c.hidden
                a = torch.cat([norm(a[i * h:(i + 1) * h], p[f"fc_norm.{i}.weight"], c.eps) for i in range(3)])
            g = p["fc.weight"] @ a
        else:
            g = self.output(t, k - 1)
            if c.norm_output:
                g = norm(g, p["norm.weight"], c.eps)
        e = self.embedding[self.ids[t + 1 + k]]
        return g, torch.cat([norm(e, p["midlayer.input_layernorm.weight"], c.eps),
                             norm(g, p["midlayer.hidden_norm.weight"], c.eps)])

    def projected(self, name, u, head):
        dh = self.c.head_dim
        return (self.p[f"midlayer.self_attn.{name}_proj.weight"] @ u)[head * dh:(head + 1) * dh]

    def output(self, t, k):
        """h2 of step k at slot t; sees step 0 at slots ≤ t and its own later steps."""
        p, c, theta = self.p, self.c, self.c.rope["rope_theta"]
        g, u = self.normed_inputs(t, k)
        seen = [(j, 0) for j in range(t + 1)] + [(t, step) for step in range(1, k + 1)]
        inputs = [self.normed_inputs(j, step)[1] for j, step in seen]
        heads = []
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            q = rope(self.projected("q", u, head), t + k, theta)
            scores = [q @ rope(self.projected("k", x, group), j + step, theta) / math.sqrt(c.head_dim)
                      for x, (j, step) in zip(inputs, seen, strict=True)]
            weights = torch.softmax(torch.stack(scores), 0)
            heads.append(sum(w * self.projected("v", x, group) for w, x in zip(weights, inputs, strict=True)))
        h1 = g + p["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        y = norm(h1, p["midlayer.post_attention_layernorm.weight"], c.eps)
        gate = p["midlayer.mlp.gate_proj.weight"] @ y
        up = p["midlayer.mlp.up_proj.weight"] @ y
        return h1 + p["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def naive_step(parameters, rows, store, D, c, K, decay, average):
    """Loss (float64 scalar) and accuracies [K] of one optimiser step over documents."""
    in_D, index_in_D = set(D), {token: i for i, token in enumerate(D)}
    lm_head = store._lm_head.double()
    losses = [[[] for _ in rows] for _ in range(K)]
    counted, hits = [0] * K, [0] * K
    for number, row in enumerate(rows):
        document, mask, x = Naive(parameters, row, store.embedding(), c), row.mask.tolist(), row.ids.tolist()
        teacher_row = {int(position): i for i, position in enumerate(row.last_positions)}
        for k in range(K):
            for t in range(len(x)):
                if t + 2 + k >= len(x) or not all(mask[t + 1:t + 3 + k]):
                    continue
                if not all(token in in_D for token in x[t + 2:t + 2 + k]):
                    continue
                counted[k] += 1
                z = lm_head @ row.last[teacher_row[t + 1 + k]].double()
                if int(z.argmax()) not in in_D:
                    continue
                teacher = torch.softmax(z[D], 0)
                h2 = document.output(t, k)
                logits = parameters["lm_head.weight"] @ norm(h2, parameters["norm.weight"], c.eps)
                losses[k][number].append(-(teacher * torch.log_softmax(logits, 0)).sum())
                hits[k] += int(logits.argmax()) == index_in_D[int(z.argmax())]
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        documents = [torch.stack(one) for one in losses[k] if one]
        if documents and average == "slot":
            total = total + decay ** k * torch.cat(documents).mean()
        elif documents:
            total = total + decay ** k * torch.stack([one.mean() for one in documents]).mean()
    return total, [hit / max(n, 1) for hit, n in zip(hits, counted, strict=True)], counted


@pytest.mark.parametrize(("K", "average", "variant"), [
    (3, "slot", {}),
    (3, "document", {}),
    (3, "slot", {"norm_output": True, "fc_norm": True}),
    (1, "slot", {"kv_heads": 4}),
])
def test_step_equals_naive_reference(synthetic_store, tiny_facts, monkeypatch, K, average, variant):
    monkeypatch.setattr(attention, "BLOCK", 3)     # several blocks a document
    monkeypatch.setattr(loss, "CHUNK", 2)          # several chunks a pack
    store = synthetic_store(rows=4, vocab=31, hidden=12, seed=5, shortest=9, longest=19)
    facts = tiny_facts(hidden=12, heads=4, kv_heads=2, head_dim=4, intermediate=10, vocab=31)
    D = sorted(np.random.default_rng(1).choice(31, size=22, replace=False).tolist())
    c = DraftConfig.from_target(facts, len(D), **variant)
    torch.manual_seed(3)
    model = DraftModel(c, store.embedding(), torch.tensor(D))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        assert "embed" not in name

    t2d = model.t2d.numpy()
    packs = [make_pack([store.row(0), store.row(1)], t2d, K), make_pack([store.row(2), store.row(3)], t2d, K)]
    total, counts = 0.0, None
    for pack, scales in zip(packs, loss_scales(packs, 0.8, average), strict=True):
        value, one, _ = pack_loss(model, pack, store.lm_head_rows(D), scales)
        value.backward()
        total += value.item()
        counts = one if counts is None else counts + one

    parameters = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    expected, accuracies, counted = naive_step(parameters, store.rows, store, D, c, K, 0.8, average)
    expected.backward()
    assert counts.counted.tolist() == counted
    assert counts.bearing[0] < counts.counted[0], "the case must hold slots whose teacher argmax is outside D"
    assert min(counted) >= 5
    assert abs(total - expected.item()) < TOLERANCE * abs(expected.item())
    np.testing.assert_allclose(counts.accuracy, accuracies, atol=1e-12)
    for name, parameter in model.named_parameters():
        reference = parameters[name].grad
        error = (parameter.grad.double() - reference).abs().max() / reference.abs().max()
        assert error < TOLERANCE, f"gradient of {name}: {error:.1e}"


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
def test_norm_against_finite_differences(wanted):
    """The norm's own gradient, in float64; the embedding's norm has an input that needs none."""
    layer = RMSNorm(6, eps=1e-3).double()
    x, weight = (torch.randn(*size, dtype=torch.float64).requires_grad_(needs)
                 for size, needs in zip(((5, 6), (6,)), wanted, strict=True))
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(layer, {"weight": w}, (x,)), (x, weight))
    expected = torch.stack([norm(row, weight, 1e-3) for row in x])
    assert torch.allclose(torch.func.functional_call(layer, {"weight": weight}, (x,)), expected, rtol=1e-12)
