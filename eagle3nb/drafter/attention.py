"""Attention of training-time test, in plain PyTorch: causal inside the document, plus each slot's own later keys.

At step k a slot t sees step 0's keys at the slots ≤ t of its document and its own keys of steps 1..k; one softmax over
both. Queries come gathered (only slots that count), keys whole. The work goes block by block of queries; the backward
pass recomputes a block's probabilities from its log-sum-exp, so memory is linear in T: nothing of size [N, T] is kept.
"""

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # queries at a time; a block's scores are [Hq, BLOCK, keys]


def ttt_attention(q: Tensor, k0: Tensor, v0: Tensor, own_k: list[Tensor], own_v: list[Tensor], slots: Tensor,
                  starts: Tensor) -> Tensor:
    """Attention's output [N, Hq·dh] at `slots` (int64 [N], ascending).

    q [N, Hq, dh]; k0, v0 [T, Hkv, dh] of step 0; own_k, own_v: for each step 1..k [N, Hkv, dh] at the same slots;
    starts int64 [T]: first slot of each slot's document. Scale 1/√dh.
    """
    N, Hq, dh = q.shape
    Hkv = k0.shape[1]
    queries = q.view(N, Hkv, Hq // Hkv, dh).permute(1, 2, 0, 3)                       # [Hkv, G, N, dh]
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
    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, slots, blocks):
        q, k, v, own_k, own_v = (x.contiguous() for x in (q, k, v, own_k, own_v))
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))  # [Hkv, G, N]
        for a, b, first, end in blocks:
            scores, own = _scores(q, k, own_k, slots, a, b, first, end)
            both = torch.cat([scores, own], -1)
            lse[:, :, a:b] = torch.logsumexp(both, -1)
            p, p_own = (both - lse[:, :, a:b, None]).exp_().to(q.dtype).split([end - first, own.shape[-1]], -1)
            out[:, :, a:b] = (_rows(p) @ v[:, first:end]).view(*lse[:, :, a:b].shape, -1)
            out[:, :, a:b] += (p_own[..., None] * own_v[:, None, a:b]).sum(-2)
        ctx.save_for_backward(q, k, v, own_k, own_v, slots, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, own_k, own_v, slots, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.empty_like(q)
        dk, dv, d_own_k, d_own_v = (torch.zeros_like(x) for x in (k, v, own_k, own_v))
        delta = (grad * out).sum(-1, dtype=lse.dtype)                                  # [Hkv, G, N]
        scale = q.shape[-1] ** -0.5
        for a, b, first, end in ctx.blocks:
            scores, own = _scores(q, k, own_k, slots, a, b, first, end)
            p = (scores - lse[:, :, a:b, None]).exp_()                                 # [Hkv, G, n, m]
            p_own = (own - lse[:, :, a:b, None]).exp_()                                # [Hkv, G, n, j]
            g, rows = grad[:, :, a:b], _rows(grad[:, :, a:b])
            dv[:, first:end] += _rows(p).to(q.dtype).transpose(1, 2) @ rows
            d_own_v[:, a:b] = (p_own.to(q.dtype)[..., None] * g[..., None, :]).sum(1)
            ds = (rows @ v[:, first:end].transpose(1, 2)).view(p.shape).to(p.dtype)
            ds = (ds.sub_(delta[:, :, a:b, None]).mul_(p).mul_(scale)).to(q.dtype)
            dp_own = (g[..., None, :] * own_v[:, None, a:b]).sum(-1)                   # [Hkv, G, n, j]
            ds_own = ((dp_own - delta[:, :, a:b, None]) * p_own * scale).to(q.dtype)
            dq[:, :, a:b] = (_rows(ds) @ k[:, first:end]).view(g.shape)
            dq[:, :, a:b] += (ds_own[..., None] * own_k[:, None, a:b]).sum(-2)
            dk[:, first:end] += _rows(ds).transpose(1, 2) @ _rows(q[:, :, a:b])
            d_own_k[:, a:b] = (ds_own[..., None] * q[:, :, a:b, None, :]).sum(1)
        return dq, dk, dv, d_own_k, d_own_v, None, None


def _rows(x: Tensor) -> Tensor:
    """[Hkv, G, n, ·] → [Hkv, G·n, ·]: the query heads of a group share their keys, so they are rows of one product."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _scores(q, k, own_k, slots, a, b, first, end) -> tuple[Tensor, Tensor]:
    """Scaled scores of queries a..b, at least float32: [Hkv, G, n, m], later keys at −∞, and own [Hkv, G, n, j]."""
    kind, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
    block = q[:, :, a:b]
    scores = (_rows(block) @ k[:, first:end].transpose(1, 2)).view(*block.shape[:3], end - first).to(kind).mul_(scale)
    later = torch.arange(first, end, device=q.device)[None] > slots[a:b, None]          # [n, m]
    own = (block[..., None, :] * own_k[:, None, a:b]).sum(-1, dtype=kind) * scale
    return scores.masked_fill_(later, float("-inf")), own
