"""Attention over the KV cache in plain PyTorch: the two operators of SGLang's CPU backend `intel_amx`, told to torch.

A request's positions lie anywhere in the cache: `table` int32 [requests, positions] says where, `slots` [R] which of
its rows are this batch's. q and out [tokens, Hq, dh]; the caches [places, Hkv, dh]. No windows, soft caps or sinks.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

EXTEND = """extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor keys, Tensor values,
    float key_scale, float value_scale, Tensor table, Tensor slots, Tensor lengths, Tensor new, Tensor starts, int most,
    float scale, float cap, bool cross, int window, Tensor? encoder, Tensor? sinks, Tensor? tree, bool causal) -> ()"""
DECODE = """decode_attention_cpu(Tensor q, Tensor(a!) keys, Tensor(b!) values, float key_scale, float value_scale,
    Tensor(c!) out, Tensor? k, Tensor? v, Tensor places, Tensor scratch, Tensor table, Tensor slots, Tensor lengths,
    float scale, float cap, bool cross, int window, Tensor? encoder, Tensor? sinks) -> ()"""


def extend(q, k, v, out, keys, values, key_scale, value_scale, table, slots, lengths, new, starts, most, scale, cap,
           cross, window, encoder, sinks, tree, causal) -> None:
    """Several new tokens a request: `new` [R] of them, rows from starts[i] on, the last ones of lengths[i] positions.

    Their keys and values are in the cache already. tree: bool [R n n] for verifies of n tokens each, which of the new
    tokens sees which; without it each sees those before it.
    """
    plain(cap, cross, window, sinks)
    requests = zip(*(x.tolist() for x in (slots, lengths, new, starts)), strict=True)
    for r, (slot, length, n, start) in enumerate(requests):
        mask = torch.ones(n, length, dtype=torch.bool)
        if causal:
            mask[:, length - n:] = mask[:, length - n:].tril() if tree is None else tree.view(-1, n, n)[r]
        out[start:start + n] = attended(q[start:start + n], keys, values, table[slot, :length], scale, mask)


def decode(q, keys, values, key_scale, value_scale, out, k, v, places, scratch, table, slots, lengths, scale, cap,
           cross, window, encoder, sinks) -> None:
    """One new token a request, the last of its `lengths` [R]. Its key and value go to `places` of the cache first."""
    plain(cap, cross, window, sinks)
    if k is not None:
        keys[places], values[places] = (new.view(-1, *cache.shape[1:]) for new, cache in ((k, keys), (v, values)))
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        out[i:i + 1] = attended(q[i:i + 1], keys, values, table[slot, :length], scale, None)


def attended(q, keys, values, places, scale: float, mask):
    """[n, Hq, dh]: n queries over the cached positions that lie at `places`; mask bool [n, positions]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, keys[places.long()], values[places.long()]))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def plain(cap, cross, window, sinks) -> None:
    if cap or cross or window > 0 or sinks is not None:
        raise NotImplementedError("the stand-in knows plain attention only: no soft cap, window, sinks or encoder")


library = torch.library.Library("sgl_kernel", "FRAGMENT")  # kept: it would take its declarations along
library.define(" ".join(EXTEND.split()))
library.define(" ".join(DECODE.split()))
library.impl("extend_attention_cpu", extend, "CPU")
library.impl("decode_attention_cpu", decode, "CPU")
