"""Training-time test (DESIGN section 4): the K steps of the draft layer over packed documents, and the offline chain.

Only slots that count are ever computed past step 0's keys: a slot that counts at step k + 1 counts at step k, and it
sees step 0's keys and its own later ones, never another slot's output. So every step works on gathered rows, fewer each
step.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from eagle3nb.drafter.attention import ttt_attention
from eagle3nb.drafter.loss import soft_cross_entropy
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.packing import Pack


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
def chain_states(model: DraftModel, ids, aux: Tensor, K: int, slots=None, starts=None) -> list[tuple[Tensor, Tensor]]:
    """The drafter's chains over texts that lie end to end, true tokens fed: for each step k (slots [N_k], h2 [N_k, h]).

    ids int [T] and aux [T, 3h] on any device; slots: ascending ones to compute (default all); starts int [T]: the first
    slot of each slot's text (default: one text). Step k of slot t reads x[t+1+k] and is left out where its text ends
    before that. The result lies on the model's device.
    """
    device = model.fc.weight.device
    ids, slots, starts = (torch.as_tensor(x, dtype=torch.int64, device=device) for x in (
        ids, range(len(ids)) if slots is None else slots, [0] * len(ids) if starts is None else starts))
    ends = torch.searchsorted(starts, starts[slots], right=True)                      # of each slot's text
    per_step = [slots[slots + 1 + k < ends] for k in range(K)]
    return list(zip(per_step, steps(model, ids, torch.as_tensor(aux).to(device), starts, per_step), strict=True))


@torch.no_grad()
def chain(model: DraftModel, ids, aux: Tensor, K: int, slots=None, starts=None) -> np.ndarray:
    """What the drafter drafts at `slots`: int32 [K, T] target ids, −1 where undefined; arguments as of `chain_states`.

    Step k of slot t predicts x[t+2+k] and is defined where its input x[t+1+k] exists.
    """
    predictions = np.full((K, len(ids)), -1, dtype=np.int32)
    for k, (at, h2) in enumerate(chain_states(model, ids, aux, K, slots, starts)):
        if len(at):
            predictions[k, at.cpu().numpy()] = model.to_target(drafted(model, h2)).cpu().numpy()
    return predictions


def drafted(model: DraftModel, h2: Tensor, block: int = 1024) -> Tensor:
    """argmax over D, int64 [N], without holding [N, D]."""
    return torch.cat([model.logits(rows).argmax(-1) for rows in h2.split(block)])


@dataclass(frozen=True)
class StepCounts:
    """Per step k of the chain, summed over packs: loss and accuracies. float64 and int64 [K]."""

    loss: np.ndarray           # summed over loss-bearing slots, unweighted
    bearing: np.ndarray        # loss-bearing slots
    counted: np.ndarray        # slots that count; a counted slot without loss is a miss
    hits: np.ndarray           # argmax over D is the teacher's argmax

    @classmethod
    def of(cls, table: np.ndarray) -> "StepCounts":
        """float64 [4, K], a row a field: as they are summed over processes."""
        return cls(table[0], *table[1:].astype(np.int64))

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean_loss(self) -> np.ndarray:
        return self.loss / np.maximum(self.bearing, 1)

    @property
    def accuracy(self) -> np.ndarray:
        return self.hits / np.maximum(self.counted, 1)


def loss_totals(packs: list[Pack], K: int, average: str) -> np.ndarray:
    """Among how many the weight of each step k is shared, int64 [K]: loss-bearing slots, or documents that have one."""
    totals = np.zeros(K, np.int64)
    for pack in packs:
        for k, (at, mask) in enumerate(zip(pack.slots, pack.bearing, strict=True)):
            totals[k] += int(mask.sum()) if average == "slot" else len(pack.documents[at[mask]].unique())
    return totals


def loss_scales(packs: list[Pack], decay: float, average: str, totals: np.ndarray | None = None
                ) -> list[list[Tensor]]:
    """For each pack and step, each loss-bearing slot's weight, float32 [n]: decay^k over the optimiser step's number.

    average "slot": every loss-bearing slot of step k weighs the same over all packs. "document": every document that
    has one does, its slots sharing its weight. A step without any weighs nothing. totals: loss_totals of the whole
    optimiser step, of which `packs` may be a process's share; None: they are all of it.
    """
    totals = loss_totals(packs, len(packs[0].slots), average) if totals is None else totals
    scales = []
    for pack in packs:
        scales.append([])
        for k, (at, mask) in enumerate(zip(pack.slots, pack.bearing, strict=True)):
            at = at[mask]
            if average == "slot":
                share = torch.full((len(at),), 1 / max(int(totals[k]), 1), device=at.device)
            else:
                sizes = torch.bincount(pack.documents[at])
                share = 1 / (sizes[pack.documents[at]] * int(totals[k]))
            scales[-1].append(decay ** k * share.float())
    return scales


def pack_loss(model: DraftModel, pack: Pack, teacher_head: Tensor, scales: list[Tensor], compute: str = "fp32"
              ) -> tuple[Tensor, StepCounts, list[Tensor]]:
    """The pack's part of the optimiser step's loss (scalar), its counts, and for each step hits bool [N_k].

    teacher_head [D, h]: the target's lm_head rows of D; scales as from loss_scales. compute "bf16": products and
    activations are bf16, of a copy of the weights made here; loss and softmax stay float32, and the gradients reach the
    model's own float32 weights. "fp32": in the weights' own dtype.
    """
    if compute == "bf16":
        copies = {f"model.{name}": weight.bfloat16() for name, weight in model.named_parameters()}
        return functional_call(_PackLoss(model), copies, (pack, teacher_head.bfloat16(), scales))
    outputs, bearing = steps(model, pack.ids, pack.aux, pack.starts, pack.slots), pack.bearing
    student = torch.cat([model.norm(h2[mask]) for h2, mask in zip(outputs, bearing, strict=True)])       # [n, h]
    rows = torch.cat([row[mask] for row, mask in zip(pack.rows, bearing, strict=True)])
    loss, each, right = soft_cross_entropy(student, model.lm_head.weight, pack.last, teacher_head, rows,
                                           pack.label[rows], torch.cat(scales))
    sizes = [int(mask.sum()) for mask in bearing]
    hits = [mask.masked_scatter(mask, part) for mask, part in zip(bearing, right.split(sizes), strict=True)]
    counts = StepCounts(np.array([part.double().sum().item() for part in each.split(sizes)]), np.array(sizes),
                        np.array([len(at) for at in pack.slots]), np.array([int(hit.sum()) for hit in hits]))
    return loss, counts, hits


class _PackLoss(nn.Module):
    """pack_loss as the forward of a module, whose weights functional_call replaces."""

    def __init__(self, model: DraftModel):
        super().__init__()
        self.model = model

    def forward(self, pack: Pack, teacher_head: Tensor, scales: list[Tensor]):
        return pack_loss(self.model, pack, teacher_head, scales)
