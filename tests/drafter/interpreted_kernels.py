"""The Triton kernels on the CPU: `TRITON_INTERPRET=1 pytest tests/drafter/interpreted_kernels.py`.

The variable must stand before Triton is imported and changes it for the whole process, so test_kernels.py runs this
file in one of its own. The reference is dense, in float64, and shares nothing with kernels or twins. Errors are shares
of the largest value: 1e-5 in fp32 (sums in another order), 2e-2 in bf16, 4e-3 in fp16 (probabilities and their
gradients are rounded to the inputs' dtype before a product: 2⁻⁹ and 2⁻¹² each, a few of them in a row).
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from eagle3nb.drafter import loss
from eagle3nb.drafter.attention import plain_attention
from eagle3nb.drafter.kernels import attention, cross_entropy, shared_memory
from eagle3nb.drafter.kernels.shared_memory import Blocks
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import make_pack
from eagle3nb.drafter.ttt import loss_scales, pack_loss

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _bf16_products(monkeypatch):
    """Triton 3.9's interpreter keeps bf16 as the bits in a uint16, and tl.dot there multiplies those integers."""
    product = InterpreterBuilder.create_dot

    def widened(x):
        if "bf16" not in str(x.dtype):
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *more: product(
        self, widened(a), widened(b), *more))


def blocks(m: int, n: int) -> dict:
    return dict.fromkeys(attention.KERNELS, Blocks(m, n, 4, 1))


def dense(q, k0, v0, own_k, own_v, slots, starts):
    """Every score of every pair, in float64."""
    q, k0, v0 = q.double(), k0.double(), v0.double()
    group = q.shape[1] // k0.shape[1]
    k, v = k0.repeat_interleave(group, 1), v0.repeat_interleave(group, 1)
    same = starts[None] == starts[slots][:, None]
    seen = same & (torch.arange(len(k))[None] <= slots[:, None])
    s = torch.einsum("nhd,thd->nht", q, k).masked_fill(~seen[:, None], float("-inf"))
    own = [(q * x.double().repeat_interleave(group, 1)).sum(-1, keepdim=True) for x in own_k]
    p = torch.softmax(torch.cat([s, *own], -1) / q.shape[-1] ** 0.5, -1)
    out = torch.einsum("nht,thd->nhd", p[..., :len(k)], v)
    for j, x in enumerate(own_v):
        out = out + p[..., len(k) + j, None] * x.double().repeat_interleave(group, 1)
    return out.flatten(1)


def case(documents, slots, kv_heads, group, own, dh=16, dtype=torch.float32, seed=0):
    """(leaves [q, k0, v0, *own_k, *own_v], slots, starts); slots: how many, at random, or a list of them."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(documents)
    starts = torch.repeat_interleave(torch.tensor([0, *np.cumsum(documents)[:-1].tolist()]), torch.tensor(documents))
    at = torch.tensor(slots, dtype=torch.int64) if isinstance(slots, list) else (
        torch.randperm(T, generator=generator)[:slots].sort().values)
    shapes = [(len(at), kv_heads * group, dh), *[(T, kv_heads, dh)] * 2, *[(len(at), kv_heads, dh)] * 2 * own]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes], at, starts


def run(function, leaves, at, starts, own, **more):
    """Output and the gradients of a fixed random direction."""
    out = function(*leaves[:3], leaves[3:3 + own], leaves[3 + own:], at, starts, **more)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(leaves[0].dtype)
    return [out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))]


def close(found, expected, dtype=torch.float32):
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        if one.numel():
            one, other = one.detach().double(), other.detach().double()
            error = float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
            assert error < TOLERANCE[dtype], f"tensor {i}: {error:.1e}"


@pytest.mark.parametrize(("documents", "slots", "kv_heads", "group", "own", "m", "n"), [
    ((20, 33, 17), 41, 2, 3, 2, 16, 16),                 # documents within and across blocks
    ((7, 1, 2, 5, 30), 45, 1, 1, 0, 32, 16),             # every slot; five documents, three in one block
    ((32, 32), 64, 1, 1, 1, 16, 32),                     # all multiples of the blocks
    ((40,), [39], 1, 8, 6, 16, 32),                      # one slot, its block nearly empty
    ((3, 37), [0, 1, 2, 3], 2, 1, 1, 16, 16),            # no query sees most keys: their gradient is zero
    ((40, 9), [5, 6, 41, 48], 1, 4, 3, 16, 16),
], ids=str)
def test_attention(documents, slots, kv_heads, group, own, m, n):
    given = case(documents, slots, kv_heads, group, own)
    found = run(attention.ttt_attention, *given, own, blocks=blocks(m, n))
    close(found, run(dense, *given, own))
    close(found, run(plain_attention, *given, own))


@pytest.mark.parametrize(("dtype", "dh"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 128)], ids=str)
def test_attention_in_each_dtype(dtype, dh):
    given = case((18, 21), 20, 1, 2, 2, dh, dtype)
    close(run(attention.ttt_attention, *given, 2, blocks=blocks(16, 16)), run(dense, *given, 2), dtype)


def test_no_counted_slot():
    given = case((30,), [], 1, 2, 1)
    found = run(attention.ttt_attention, *given, 1, blocks=blocks(16, 16))
    assert found[0].shape == (0, 32) and not any(grad.any() for grad in found[1:])


@pytest.mark.parametrize("T", [48, 144, 432])
def test_blocks_do_not_depend_on_length(T):
    given = case((T,), [0, T // 2, T - 2, T - 1], 1, 1, 1)
    close(run(attention.ttt_attention, *given, 1, blocks=blocks(16, 32)), run(dense, *given, 1))


def test_another_documents_keys_are_not_touched():
    """0 · NaN is NaN: a block that read the first document's keys would show it, masked or not."""
    leaves, at, starts = case((37, 30), list(range(37, 67)), 1, 2, 1)
    whole = run(attention.ttt_attention, leaves, at, starts, 1, blocks=blocks(16, 16))
    with torch.no_grad():
        leaves[1][:37] = leaves[2][:37] = float("nan")
    out, dq, dk, dv, *own = run(attention.ttt_attention, leaves, at, starts, 1, blocks=blocks(16, 16))
    for found, expected in zip([out, dq, dk[37:], dv[37:], *own], [*whole[:2], *(x[37:] for x in whole[2:4]),
                                                                  *whole[4:]], strict=True):
        assert torch.equal(found, expected)


def test_what_is_kept_for_the_backward_pass_grows_with_tokens_alone():
    def kept(T):
        sizes = []
        (q, k0, v0), at, starts = case((T,), T, 1, 2, 0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes), lambda x: x):
            attention.ttt_attention(q, k0, v0, [], [], at, starts, blocks(32, 32))
        return sum(sizes)

    assert kept(64) == 2 * kept(32) > 0


def test_large_scores():
    """Scores of ± a thousand: the running maximum keeps every power in range."""
    leaves, at, starts = case((29,), 20, 1, 2, 1)
    with torch.no_grad():
        leaves[0].mul_(30)
        leaves[1].mul_(30)
    close(run(attention.ttt_attention, leaves, at, starts, 1, blocks=blocks(16, 16))[:1],
          run(dense, leaves, at, starts, 1)[:1])


# ---------------------------------------------------------------------------------------------------- cross-entropy


def written_out(logits, teacher, row, label):
    """Loss, hit and q − p, row by row in float64."""
    each, hit, dz = [], [], []
    for z, r, target in zip(logits.double(), row.tolist(), label.tolist(), strict=True):
        t = teacher[r].double()
        p, q = torch.exp(t - t.max()), torch.exp(z - z.max())
        p, q = p / p.sum(), q / q.sum()
        each.append(-(p * (z - z.max() - torch.log(torch.exp(z - z.max()).sum()))).sum())
        hit.append(bool(z[target] == z.max()))
        dz.append(q - p)
    return torch.stack(each), torch.tensor(hit), torch.stack(dz)


@pytest.mark.parametrize(("n", "m", "D", "dtype"), [
    (9, 5, 50, torch.float32), (4, 4, 64, torch.float32), (3, 1, 7, torch.float32),
    (6, 3, 83, torch.bfloat16)], ids=str)
def test_cross_entropy_rows(n, m, D, dtype):
    generator = torch.Generator().manual_seed(n)
    logits, teacher = (3 * torch.randn(size, D, generator=generator).to(dtype) for size in (n, m))
    row, label = torch.randint(m, (n,), generator=generator), torch.randint(D, (n,), generator=generator)
    label[::2] = logits[::2].argmax(-1)
    expected = written_out(logits, teacher, row, label)
    cut = dict.fromkeys(cross_entropy.KERNELS, Blocks(1, 16, 4, 1))
    kept = logits.clone()
    each, hit, _ = cross_entropy.rows(kept, teacher, row, label, False, cut)
    assert torch.equal(kept, logits), "without gradients the logits stay"
    again, hit_again, dz = cross_entropy.rows(logits, teacher, row, label, True, cut)
    assert dz.data_ptr() == logits.data_ptr() and torch.equal(each, again) and torch.equal(hit, hit_again)
    assert torch.equal(hit, expected[1]) and int(hit.sum()) > 0
    close([each, dz], [expected[0], expected[2]], dtype)
    plain = loss.plain_rows(kept, teacher, row, label, True)
    assert torch.equal(plain[1], hit)
    close([each, dz], [plain[0], plain[2]], dtype)


def test_extreme_logits():
    """A student and a teacher who are sure, each of another token."""
    logits, teacher = torch.zeros(1, 40), torch.zeros(1, 40)
    logits[0, 3], teacher[0, 30] = 300.0, 300.0
    expected = written_out(logits, teacher, torch.zeros(1).long(), torch.tensor([3]))
    each, hit, dz = cross_entropy.rows(logits, teacher, torch.zeros(1).long(), torch.tensor([3]), True,
                                       dict.fromkeys(cross_entropy.KERNELS, Blocks(1, 16, 4, 1)))
    assert bool(hit) and float(each) == pytest.approx(300.0) and torch.allclose(dz.double(), expected[2])


def test_loss_and_gradients_in_bf16(monkeypatch):
    """x, heads and teacher in bf16 through the kernel: chunks, rows in any order, the head's gradient in fp32."""
    generator = torch.Generator().manual_seed(4)
    n, m, h, D = 11, 6, 12, 45
    x, head, teacher, teacher_head = ((torch.randn(size, h, generator=generator) * scale).bfloat16().requires_grad_()
                                      for size, scale in ((n, 1), (D, 0.7), (m, 1), (D, 0.7)))
    row, label = torch.randint(m, (n,), generator=generator), torch.randint(D, (n,), generator=generator)
    scale = torch.rand(n, generator=generator)
    monkeypatch.setattr(loss, "CHUNK", 2)
    monkeypatch.setattr(shared_memory, "supports", lambda *_: True)
    monkeypatch.setattr(shared_memory, "on_device", lambda *_: Blocks(1, 16, 4, 1))
    value, each, _ = loss.soft_cross_entropy(x, head, teacher.detach(), teacher_head.detach(), row, label,
                                             scale.bfloat16())
    found = [each, *torch.autograd.grad(value, (x, head))]
    exact_x, exact_head = x.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    p = torch.softmax(teacher.double() @ teacher_head.double().T, -1).detach()[row]
    losses = -(p * torch.log_softmax(exact_x @ exact_head.T, -1)).sum(-1)
    expected = torch.autograd.grad((losses * scale.bfloat16().double()).sum(), (exact_x, exact_head))
    close(found, [losses, *expected], torch.bfloat16)


# ---------------------------------------------------------------------------------------------------- the step


def test_training_step_through_the_kernels(synthetic_store, tiny_facts, monkeypatch):
    """The whole step's loss, counts and gradients: the kernels where the trainer would call them, and the twins."""
    store = synthetic_store(rows=3, vocab=31, hidden=12, seed=5, shortest=9, longest=19)
    c = DraftConfig.from_target(tiny_facts(hidden=12, heads=4, kv_heads=2, head_dim=16, intermediate=10, vocab=31), 22)
    torch.manual_seed(3)
    D = torch.randperm(31)[:22].sort().values
    model = DraftModel(c, store.embedding(), D)
    pack = make_pack(store.rows, model.t2d.numpy(), 3)
    (scales,) = loss_scales([pack], 0.8, "slot")
    monkeypatch.setattr(loss, "CHUNK", 4)

    def step():
        model.zero_grad()
        value, counts, _ = pack_loss(model, pack, store.lm_head_rows(D), scales)
        value.backward()
        return counts, [value.detach(), *(p.grad.clone() for p in model.parameters())]

    plain_counts, plain = step()
    called = []

    def small(kernel, *_):
        called.append(kernel)
        return Blocks(16, 16, 4, 1)

    monkeypatch.setattr(shared_memory, "supports", lambda *_: True)
    monkeypatch.setattr(shared_memory, "on_device", small)
    counts, found = step()
    assert set(called) == {*attention.KERNELS, *cross_entropy.KERNELS}
    assert counts.hits.tolist() == plain_counts.hits.tolist()
    close(found, plain)
