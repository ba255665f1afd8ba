"""Attention of training-time test, in plain PyTorch: causal inside the document, plus each slot's own later keys.

At step k a slot t sees step 0's keys at the slots ≤ t of its document and its own keys of steps 1..k; one softmax over
both. Queries come gathered (only slots that count), keys whole. The work goes block by block of queries; the backward
pass recomputes a block's probabilities, so memory is linear in T: nothing of size [N, T] is kept. On a GPU
kernels/attention.py does the same in Triton.
"""

import numpy as np
import torch
from torch import Tensor

from eagle3nb.drafter.kernels import shared_memory

BLOCK = 64  # queries at a time; a block's scores are [Hq, BLOCK, keys]


def ttt_attention(q: Tensor, k0: Tensor, v0: Tensor, own_k: list[Tensor], own_v: list[Tensor], slots: Tensor,
                  starts: Tensor) -> Tensor:
    """Attention's output [N, Hq·dh] at `slots` (int64 [N], ascending).

    q [N, Hq, dh]; k0, v0 [T, Hkv, dh] of step 0; own_k, own_v: for each step 1..k [N, Hkv, dh] at the same slots;
    starts int64 [T]: first slot of each slot's document. Scale 1/√dh.
    """
    if shared_memory.supports(q.device, q.shape[-1], q.dtype):
        from eagle3nb.drafter.kernels import attention as kernels

        return kernels.ttt_attention(q, k0, v0, own_k, own_v, slots, starts)
    return plain_attention(q, k0, v0, own_k, own_v, slots, starts)


def plain_attention(q: Tensor, k0: Tensor, v0: Tensor, own_k: list[Tensor], own_v: list[Tensor], slots: Tensor,
                    starts: Tensor) -> Tensor:
    """The same in PyTorch, on any device."""
    N, Hq, dh = q.shape
    Hkv = k0.shape[1]
    queries = q.view(N, Hkv, Hq // Hkv, dh).permute(1, 2, 0, 3) * dh ** -0.5          # [Hkv, G, N, dh]
    keys, values = k0.transpose(0, 1), v0.transpose(0, 1)                             # [Hkv, T, dh]
    if own_k:
        own_keys = torch.stack(own_k, 2).transpose(0, 1)                              # [Hkv, N, j, dh]
        own_values = torch.stack(own_v, 2).transpose(0, 1)
    else:
        own_keys = own_values = q.new_zeros(Hkv, N, 0, dh)
    out = _Attention.apply(queries, keys, values, own_keys, own_values, slots, query_blocks(slots, starts))
    return out.permute(2, 0, 1, 3).reshape(N, Hq * dh)


def query_blocks(slots: Tensor, starts: Tensor) -> list[tuple[int, int, int, int]]:
    """(a, b, first key, last key + 1) for runs slots[a:b] inside one document, at most BLOCK long."""
    slots, starts = slots.cpu().numpy(), starts.cpu().numpy()
    if not len(slots):
        return []
    document = starts[slots]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(document)) + 1, [len(slots)]])
    blocks = []
    for left, right in zip(edges[:-1], edges[1:], strict=True):
        for a in range(left, right, BLOCK):
            b = min(a + BLOCK, right)
            blocks.append((int(a), int(b), int(document[left]), int(slots[b - 1]) + 1))
    return blocks


class _Attention(torch.autograd.Function):
    """q is scaled already. Saved for the backward pass: the inputs and the output, nothing per pair of slots."""

    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, slots, blocks):
        q, k, v, own_k, own_v = (x.contiguous() for x in (q, k, v, own_k, own_v))
        out = torch.empty_like(q)
        for a, b, first, end in blocks:
            p, p_own = _probabilities(q, k, own_k, slots, a, b, first, end)
            out[:, :, a:b] = _pair_rows(p, v[:, first:end])
            for j in range(own_v.shape[2]):
                out[:, :, a:b] += p_own[..., j, None] * own_v[:, None, a:b, j]
        ctx.save_for_backward(q, k, v, own_k, own_v, slots, out)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, own_k, own_v, slots, out = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.empty_like(q)
        dk, dv, d_own_k, d_own_v = (torch.zeros_like(x) for x in (k, v, own_k, own_v))
        delta = (grad * out).sum(-1, keepdim=True)                                     # [Hkv, G, N, 1]
        for a, b, first, end in ctx.blocks:
            p, p_own = _probabilities(q, k, own_k, slots, a, b, first, end)            # [Hkv, G, n, m], [Hkv, G, n, j]
            g, d = grad[:, :, a:b], delta[:, :, a:b]
            dv[:, first:end] += _rows(p).transpose(1, 2) @ _rows(g)
            ds = _pair_rows(g, v[:, first:end].transpose(1, 2)).sub_(d).mul_(p)        # of the scores
            dq[:, :, a:b] = _pair_rows(ds, k[:, first:end])
            dk[:, first:end] += _rows(ds).transpose(1, 2) @ _rows(q[:, :, a:b])
            for j in range(own_k.shape[2]):
                key, value, pj = own_k[:, None, a:b, j], own_v[:, None, a:b, j], p_own[..., j, None]
                ds_own = ((g * value).sum(-1, keepdim=True) - d) * pj                  # [Hkv, G, n, 1]
                dq[:, :, a:b] += ds_own * key
                d_own_k[:, a:b, j] = (ds_own * q[:, :, a:b]).sum(1)
                d_own_v[:, a:b, j] = (pj * g).sum(1)
        return dq, dk, dv, d_own_k, d_own_v, None, None


def _rows(x: Tensor) -> Tensor:
    """[Hkv, G, n, ·] → [Hkv, G·n, ·]: the query heads of a group share their keys, so they are rows of one product."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _pair_rows(x: Tensor, y: Tensor) -> Tensor:
    """x [Hkv, G, n, i] times y [Hkv, i, o] → [Hkv, G, n, o]."""
    return (_rows(x) @ y).view(*x.shape[:3], y.shape[-1])


def _probabilities(q, k, own_k, slots, a, b, first, end) -> tuple[Tensor, Tensor]:
    """One softmax of queries a..b over keys first..end up to each slot [Hkv, G, n, m] and own keys [Hkv, G, n, j]."""
    block = q[:, :, a:b]
    scores = _pair_rows(block, k[:, first:end].transpose(1, 2))
    earliest = int(slots[a])                                                           # every query sees keys up to it
    later = torch.arange(earliest, end, device=q.device)[None] > slots[a:b, None]
    scores[..., earliest - first:].masked_fill_(later, float("-inf"))
    own = [(block * own_k[:, None, a:b, j]).sum(-1, keepdim=True) for j in range(own_k.shape[2])]
    both = torch.cat([scores, *own], -1) if own else scores
    p = torch.softmax(both, -1, dtype=torch.promote_types(q.dtype, torch.float32))
    return p.to(q.dtype).split([end - first, len(own)], -1)
