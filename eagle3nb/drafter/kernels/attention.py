"""Attention of training-time test in Triton: the plain twin is drafter/attention.py, same signature, same results.

One online softmax over step 0's keys, causal inside the document, and each slot's own keys of later steps. Nothing of
size [N, T] is ever written: the forward pass keeps the output and one log-sum a query and head, the backward pass
computes the probabilities anew. Four kernels: forward; dq, over blocks of queries; dk and dv, over blocks of keys; the
own keys' gradients. None needs atomics, so a step is the same twice.

A block holds BLOCK_M queries in a row, whatever their documents, and scans the keys from its first query's document on
to its last slot. Where it spans two documents it goes over both: just the tiles that two half-filled blocks would take,
and no list of blocks is made on the host, which would have to wait for the GPU. A block inside one document never
touches another's keys. Query heads of a group are programs of their own and find their keys in L2; the group's size,
the number of own keys, T and N are run-time numbers, so none of them makes another kernel.

Checked in Triton's interpreter against the twin, and compiled ahead of time for six architectures (shared_memory.py).
Not yet run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3nb.drafter.kernels import shared_memory
from eagle3nb.drafter.kernels.shared_memory import Blocks

RUN_TIME = ["N", "T", "own", "heads", "kv_heads"]            # never specialised: 1 or 16 makes no other kernel
INDICES = ["slots_ptr", "since_ptr", "low_ptr", "high_ptr"]  # int32, aligned or not


def ttt_attention(q: Tensor, k0: Tensor, v0: Tensor, own_k: list[Tensor], own_v: list[Tensor], slots: Tensor,
                  starts: Tensor, blocks: dict[str, Blocks] | None = None) -> Tensor:
    """Attention's output [N, Hq·dh] at `slots` (int64 [N], ascending).

    q [N, Hq, dh]; k0, v0 [T, Hkv, dh] of step 0; own_k, own_v: for each step 1..k [N, Hkv, dh] at the same slots;
    starts int64 [T]: first slot of each slot's document. Scale 1/√dh. fp32, bf16 or fp16, sums in fp32. `blocks` for
    each kernel (tests); as a rule from the table, by the device's own limit: UserError where none fits it.
    """
    if blocks is None:
        blocks = {name: shared_memory.on_device(name, q.device, q.shape[-1], q.dtype) for name in KERNELS}
    own_keys = torch.stack(own_k) if own_k else k0.new_empty(0)                                   # [j, N, Hkv, dh]
    own_values = torch.stack(own_v) if own_v else v0.new_empty(0)
    out = _Attention.apply(q.contiguous(), k0.contiguous(), v0.contiguous(), own_keys, own_values, slots.int(),
                           starts[slots].int(), blocks)
    return out.flatten(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, slots, since, blocks):
        (N, heads, dh), kv_heads, own = q.shape, k.shape[1], len(own_k)
        out, lse = torch.empty_like(q), q.new_empty(heads, N, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, own_k, own_v, slots, since, out, lse)
        ctx.blocks = blocks
        if N:
            b = blocks["attention_forward"]
            attention_forward[triton.cdiv(N, b.m), heads](
                q, k, v, own_k, own_v, slots, since, out, lse, N, own, heads, kv_heads, dh, b.m, b.n,
                **b.launch)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, own_k, own_v, slots, since, out, lse = ctx.saved_tensors
        (N, heads, dh), (T, kv_heads), own, blocks = q.shape, k.shape[:2], len(own_k), ctx.blocks
        dq, dk, dv, d_own_k, d_own_v = (torch.empty_like(x) for x in (q, k, v, own_k, own_v))
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        if N:
            b = blocks["attention_dq"]
            attention_dq[triton.cdiv(N, b.m), heads](
                q, k, v, own_k, own_v, slots, since, out, lse, grad, delta, dq, N, own, heads, kv_heads, dh, b.m, b.n,
                **b.launch)
        b = blocks["attention_dkdv"]
        # the queries that see any key of a block: from the first at or past its first key up to the last whose document
        # began by its last key; both ascend, so a search on the device finds them
        first = torch.arange(0, T, b.n, device=q.device, dtype=torch.int32)
        low = torch.searchsorted(slots, first, out_int32=True)
        high = torch.searchsorted(since, first + (b.n - 1), right=True, out_int32=True)
        attention_dkdv[len(first), kv_heads](
            q, k, v, slots, since, low, high, lse, grad, delta, dk, dv, N, T, heads, kv_heads, dh, b.m, b.n,
            **b.launch)
        if N and own:
            b = blocks["attention_own"]
            attention_own[triton.cdiv(N, b.m), kv_heads, own](
                q, own_k, own_v, lse, grad, delta, d_own_k, d_own_v, N, heads, kv_heads, dh, b.m,
                **b.launch)
        return dq, dk, dv, d_own_k, d_own_v, None, None, None


LOG2_E = tl.constexpr(1.4426950408889634)  # the softmax is in powers of two: exp2 is one instruction
# fp32 inputs go through the tensor cores in three TF32 products, about as exact as fp32; other dtypes ignore it
EXACT = tl.constexpr("tf32x3")


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=INDICES)
def attention_forward(q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, slots_ptr, since_ptr, out_ptr, lse_ptr,
                      N, own, heads, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the last have the most keys
    kv_head = head // (heads // kv_heads)
    scale: tl.constexpr = LOG2_E * HEAD_DIM ** -0.5
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    rows = block * BLOCK_M + m
    inside = rows < N
    slot = tl.load(slots_ptr + rows, mask=inside, other=-1)                    # a row past the end sees no key
    since = tl.load(since_ptr + rows, mask=inside, other=0)
    first = tl.load(since_ptr + block * BLOCK_M)
    end = tl.load(slots_ptr + tl.minimum(block * BLOCK_M + BLOCK_M, N) - 1) + 1

    across = heads * HEAD_DIM                                                  # from query to query
    of_block = tl.cast(block * BLOCK_M, tl.int64) * across + head * HEAD_DIM + (m * across)[:, None] + d[None, :]
    q = tl.load(q_ptr + of_block, mask=inside[:, None], other=0.0)             # [M, dh]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    out = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
    step = kv_heads * HEAD_DIM                                                 # from key to key
    of_tile = (n * step)[:, None] + d[None, :]
    for key in tl.range(first, end, BLOCK_N):
        keys = key + n
        tile = tl.cast(key, tl.int64) * step + kv_head * HEAD_DIM + of_tile
        k = tl.load(k_ptr + tile, mask=(keys < end)[:, None], other=0.0)       # [N, dh]
        s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        s = tl.where((keys[None, :] <= slot[:, None]) & (keys[None, :] >= since[:, None]), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)                  # of a row that has seen no key yet
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + tile, mask=(keys < end)[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=EXACT)
        top = higher

    of_own = tl.cast(block * BLOCK_M, tl.int64) * step + kv_head * HEAD_DIM + (m * step)[:, None] + d[None, :]
    for j in tl.range(0, own):
        at = tl.cast(j, tl.int64) * N * step + of_own
        k = tl.load(own_k_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        # read again, or it would hold registers through the loop above
        again = tl.load(q_ptr + of_block, mask=inside[:, None], other=0.0).to(tl.float32)
        s = tl.sum(again * k, 1) * scale
        v = tl.load(own_v_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        higher = tl.maximum(top, s)
        shrink, p = tl.exp2(top - higher), tl.exp2(s - higher)
        total = total * shrink + p
        out = out * shrink[:, None] + p[:, None] * v
        top = higher
    total = tl.where(inside, total, 1.0)
    tl.store(out_ptr + of_block, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + tl.cast(head, tl.int64) * N + rows, top + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=INDICES)
def attention_dq(q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, slots_ptr, since_ptr, out_ptr, lse_ptr, grad_ptr, delta_ptr,
                 dq_ptr, N, own, heads, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dq, and delta [heads, N] = Σ grad · out, which the kernels after this one read."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    scale: tl.constexpr = LOG2_E * HEAD_DIM ** -0.5
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    rows = block * BLOCK_M + m
    inside = rows < N
    slot = tl.load(slots_ptr + rows, mask=inside, other=-1)
    since = tl.load(since_ptr + rows, mask=inside, other=0)
    first = tl.load(since_ptr + block * BLOCK_M)
    end = tl.load(slots_ptr + tl.minimum(block * BLOCK_M + BLOCK_M, N) - 1) + 1

    across = heads * HEAD_DIM                                                  # from query to query
    of_block = tl.cast(block * BLOCK_M, tl.int64) * across + head * HEAD_DIM + (m * across)[:, None] + d[None, :]
    q = tl.load(q_ptr + of_block, mask=inside[:, None], other=0.0)             # [M, dh]
    grad = tl.load(grad_ptr + of_block, mask=inside[:, None], other=0.0)
    out = tl.load(out_ptr + of_block, mask=inside[:, None], other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + tl.cast(head, tl.int64) * N + rows, mask=inside, other=0.0)
    tl.store(delta_ptr + tl.cast(head, tl.int64) * N + rows, delta, mask=inside)
    dq = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
    step = kv_heads * HEAD_DIM
    of_tile = (n * step)[:, None] + d[None, :]
    for key in tl.range(first, end, BLOCK_N):
        keys = key + n
        tile = tl.cast(key, tl.int64) * step + kv_head * HEAD_DIM + of_tile
        k = tl.load(k_ptr + tile, mask=(keys < end)[:, None], other=0.0)       # [N, dh]
        v = tl.load(v_ptr + tile, mask=(keys < end)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        seen = (keys[None, :] <= slot[:, None]) & (keys[None, :] >= since[:, None])
        p = tl.exp2(tl.where(seen, s - lse[:, None], float("-inf")))
        dp = tl.dot(grad, tl.trans(v), input_precision=EXACT)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=EXACT)

    of_own = tl.cast(block * BLOCK_M, tl.int64) * step + kv_head * HEAD_DIM + (m * step)[:, None] + d[None, :]
    for j in tl.range(0, own):
        at = tl.cast(j, tl.int64) * N * step + of_own
        k = tl.load(own_k_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        again = tl.load(q_ptr + of_block, mask=inside[:, None], other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(again * k, 1) * scale - lse)
        v = tl.load(own_v_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        again = tl.load(grad_ptr + of_block, mask=inside[:, None], other=0.0).to(tl.float32)
        dp = tl.sum(again * v, 1)
        dq += (p * (dp - delta))[:, None] * k
    tl.store(dq_ptr + of_block, (dq * HEAD_DIM ** -0.5).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=INDICES)
def attention_dkdv(q_ptr, k_ptr, v_ptr, slots_ptr, since_ptr, low_ptr, high_ptr, lse_ptr, grad_ptr, delta_ptr, dk_ptr,
                   dv_ptr, N, T, heads, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """dk and dv of a block of step 0's keys, over all heads of the group and the queries low..high that see any."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    group = heads // kv_heads
    scale: tl.constexpr = LOG2_E * HEAD_DIM ** -0.5
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    keys = block * BLOCK_N + n
    there = keys < T
    low, high = tl.load(low_ptr + block), tl.load(high_ptr + block)
    step = kv_heads * HEAD_DIM
    of_block = tl.cast(block * BLOCK_N, tl.int64) * step + kv_head * HEAD_DIM + (n * step)[:, None] + d[None, :]
    k = tl.load(k_ptr + of_block, mask=there[:, None], other=0.0)              # [N, dh]
    v = tl.load(v_ptr + of_block, mask=there[:, None], other=0.0)
    dk = tl.full([BLOCK_N, HEAD_DIM], 0.0, tl.float32)
    dv = tl.full([BLOCK_N, HEAD_DIM], 0.0, tl.float32)
    across = heads * HEAD_DIM
    of_tile = (m * across)[:, None] + d[None, :]
    for head in tl.range(kv_head * group, kv_head * group + group):
        for row in tl.range(low, high, BLOCK_M):
            rows = row + m
            inside = rows < high
            slot = tl.load(slots_ptr + rows, mask=inside, other=-1)
            since = tl.load(since_ptr + rows, mask=inside, other=0)
            tile = tl.cast(row, tl.int64) * across + head * HEAD_DIM + of_tile
            q = tl.load(q_ptr + tile, mask=inside[:, None], other=0.0)         # [M, dh]
            grad = tl.load(grad_ptr + tile, mask=inside[:, None], other=0.0)
            lse = tl.load(lse_ptr + tl.cast(head, tl.int64) * N + rows, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + tl.cast(head, tl.int64) * N + rows, mask=inside, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision=EXACT) * scale
            seen = (keys[:, None] <= slot[None, :]) & (keys[:, None] >= since[None, :])
            p = tl.exp2(tl.where(seen, s - lse[None, :], float("-inf")))       # [N, M]
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=EXACT)
            dp = tl.dot(v, tl.trans(grad), input_precision=EXACT)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=EXACT)
    tl.store(dk_ptr + of_block, (dk * HEAD_DIM ** -0.5).to(dk_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(dv_ptr + of_block, dv.to(dv_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=INDICES)
def attention_own(q_ptr, own_k_ptr, own_v_ptr, lse_ptr, grad_ptr, delta_ptr, dk_ptr, dv_ptr,
                  N, heads, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """dk and dv of own key j of a block of slots, summed over the heads of the group."""
    block, kv_head, j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = heads // kv_heads
    scale: tl.constexpr = LOG2_E * HEAD_DIM ** -0.5
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    rows = block * BLOCK_M + m
    inside = rows < N
    step = kv_heads * HEAD_DIM
    at = (tl.cast(j, tl.int64) * N + block * BLOCK_M) * step + kv_head * HEAD_DIM + (m * step)[:, None] + d[None, :]
    k = tl.load(own_k_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    v = tl.load(own_v_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    dk = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
    dv = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
    across = heads * HEAD_DIM
    of_block = tl.cast(block * BLOCK_M, tl.int64) * across + (m * across)[:, None] + d[None, :]
    for head in tl.range(kv_head * group, kv_head * group + group):
        q = tl.load(q_ptr + of_block + head * HEAD_DIM, mask=inside[:, None], other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + of_block + head * HEAD_DIM, mask=inside[:, None], other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + tl.cast(head, tl.int64) * N + rows, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + tl.cast(head, tl.int64) * N + rows, mask=inside, other=0.0)
        p = tl.exp2(tl.sum(q * k, 1) * scale - lse)
        dp = tl.sum(grad * v, 1)
        dk += (p * (dp - delta))[:, None] * q
        dv += p[:, None] * grad
    tl.store(dk_ptr + at, (dk * HEAD_DIM ** -0.5).to(dk_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])


KERNELS = {kernel.__name__: kernel for kernel in (attention_forward, attention_dq, attention_dkdv, attention_own)}
