"""Training-time test (DESIGN section 4): the K steps of the draft layer over packed documents, and the offline chain.

Only slots that count are ever computed past step 0's keys: a slot that counts at step k + 1 counts at step k, and it
sees step 0's keys and its own later ones, never another slot's output. So every step works on gathered rows, fewer each
step.
"""

import numpy as np
import torch
from torch import Tensor

from eagle3nb.drafter.attention import ttt_attention
from eagle3nb.drafter.model import DraftModel


def steps(model: DraftModel, ids: Tensor, aux: Tensor, starts: Tensor, slots: list[Tensor]) -> list[Tensor]:
    """h2 [N_k, h] at slots[k] for each step k; true tokens in, the drafter's own hidden states carried on.

    ids int64 [T] and aux [T, 3h] of the packed documents, starts int64 [T] (first slot of each slot's document),
    slots[k] int64 [N_k] ascending, slots[k+1] ⊂ slots[k]; slot t at step k reads token t + 1 + k.
    """
    T = len(ids)
    positions = torch.arange(T, device=ids.device) - starts
    upcoming = ids[torch.arange(1, T + 1, device=ids.device).clamp(max=T - 1)]    # x[t+1]

    at = slots[0]
    g_all = model.fuse(aux)                                                           # [T, h]
    u_all, angles = model.attention_input(model.embed(upcoming), g_all), model.angles(positions)
    k0, v0 = model.kv(u_all, angles)                                                  # [T, Hkv, dh]
    g, u = g_all.index_select(0, at), u_all.index_select(0, at)                       # [N_0, h], [N_0, 2h]
    q = model.q(u, model.angles(positions[at]))
    outputs = [model.block(g, ttt_attention(q, k0, v0, [], [], at, starts))]

    own_k, own_v = [], []
    for k in range(1, len(slots)):
        keep, at = torch.searchsorted(slots[k - 1], slots[k]), slots[k]               # rows of the step before
        own_k, own_v = ([x.index_select(0, keep) for x in own] for own in (own_k, own_v))
        g = model.next_hidden(outputs[-1].index_select(0, keep))                      # [N_k, h]
        q, key, value = model.qkv(model.embed(ids[at + 1 + k]), g, positions[at] + k)
        own_k, own_v = [*own_k, key], [*own_v, value]
        outputs.append(model.block(g, ttt_attention(q, k0, v0, own_k, own_v, at, starts)))
    return outputs


@torch.no_grad()
def chain(model: DraftModel, ids, aux: Tensor, K: int, slots=None) -> np.ndarray:
    """What the drafter drafts at every slot of one text, true tokens fed: int32 [K, T] target ids, −1 where undefined.

    ids int [T] (numpy or torch), aux [T, 3h]; slots: ascending slots to compute (default all). Step k of slot t
    predicts x[t+2+k] and is defined where its input x[t+1+k] exists.
    """
    ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
    T = len(ids)
    slots = torch.arange(T) if slots is None else torch.as_tensor(np.asarray(slots), dtype=torch.int64)
    per_step = [slots[slots + 1 + k < T] for k in range(K)]
    predictions = np.full((K, T), -1, dtype=np.int32)
    outputs = steps(model, ids, torch.as_tensor(aux), torch.zeros(T, dtype=torch.int64), per_step)
    for k, (at, h2) in enumerate(zip(per_step, outputs, strict=True)):
        if len(at):
            predictions[k, at.numpy()] = model.to_target(drafted(model, h2)).numpy()
    return predictions


def drafted(model: DraftModel, h2: Tensor, block: int = 1024) -> Tensor:
    """argmax over D, int64 [N], without holding [N, D]."""
    return torch.cat([model.logits(rows).argmax(-1) for rows in h2.split(block)])
