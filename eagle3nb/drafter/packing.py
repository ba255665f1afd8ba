"""Rows of a store → packs of whole documents, in an order that the seed and the epoch decide, with a validation share.

Epoch 0 keeps the merged order; later epochs are shuffled by seed and epoch. The whole plan follows from lengths alone,
so a step's number is the data cursor: nothing else need be saved to resume. A pack holds no padding.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3nb.corpus.masks import counted_slots
from eagle3nb.errors import UserError


@dataclass(frozen=True)
class Pack:
    """Documents end to end: T tokens, S teacher positions, and for each step k the N_k slots that count."""

    ids: Tensor                # int64 [T]
    aux: Tensor                # [T, 3h], the store's dtype
    starts: Tensor             # int64 [T]: first slot of the slot's document
    documents: Tensor          # int64 [T]: 0, 1, … within the pack
    last: Tensor               # [S, h]: last hidden states at the teacher's positions
    label: Tensor              # int64 [S]: the teacher's argmax as an index into D, −1 outside D
    on_argmax: Tensor          # bool [S]: the text's next token is the teacher's argmax
    slots: list[Tensor]        # K × int64 [N_k], ascending; slots[k+1] ⊂ slots[k]
    rows: list[Tensor]         # K × int64 [N_k]: which teacher position (row of `last`) the slot is trained towards

    def to(self, device: str) -> "Pack":
        """There; from pinned memory the copies run beside what comes next."""
        return self.each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> "Pack":
        return self.each(Tensor.pin_memory)

    def each(self, change) -> "Pack":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Pack(**{name: [change(x) for x in value] if isinstance(value, list) else change(value)
                       for name, value in values.items()})

    @property
    def bearing(self) -> list[Tensor]:
        """K × bool [N_k]: slots that give loss (the teacher's argmax lies in D); the others count as misses."""
        return [self.label[rows] >= 0 for rows in self.rows]


def make_pack(rows: list, t2d: np.ndarray, K: int) -> Pack:
    """Stored rows (StoredRow) → Pack. t2d bool [V] of the draft vocabulary."""
    to_draft = np.where(t2d, np.cumsum(t2d) - 1, -1)                                  # int64 [V]
    offset, S = 0, 0
    slots, teacher_rows = [[] for _ in range(K)], [[] for _ in range(K)]
    starts, documents = [], []
    for number, row in enumerate(rows):
        ids, mask, positions = (np.asarray(x) for x in (row.ids, row.mask, row.last_positions))
        T = len(ids)
        row_of = np.full(T, -1, dtype=np.int64)
        row_of[positions] = S + np.arange(len(positions))
        counted = counted_slots(mask, t2d[ids], K)
        for k in range(K):
            at = np.flatnonzero(counted[k])
            slots[k].append(at + offset)
            teacher_rows[k].append(row_of[at + 1 + k])
        starts.append(np.full(T, offset))
        documents.append(np.full(T, number))
        offset, S = offset + T, S + len(positions)
    argmax = np.concatenate([np.asarray(row.teacher_argmax) for row in rows]).astype(np.int64)
    following = np.concatenate([np.asarray(row.ids)[np.asarray(row.last_positions) + 1] for row in rows])

    def joined(parts):
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return Pack(ids=joined([np.asarray(row.ids) for row in rows]), aux=torch.cat([row.aux for row in rows]),
                starts=joined(starts), documents=joined(documents), last=torch.cat([row.last for row in rows]),
                label=joined([to_draft[argmax]]), on_argmax=torch.from_numpy(following == argmax),
                slots=[joined(parts) for parts in slots], rows=[joined(parts) for parts in teacher_rows])


def split(store, share: float, held_out_from: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (training, validation), each ascending, decided by a hash of each row's ids.

    `held_out_from`: the corpus holds out its rows from this one on, and the share does not matter; 0 if it does not.

    The share of distinct contents with the smallest hashes is held out, so a duplicate never lies in both, and more
    data changes the split little. share 0 holds out nothing. Raises UserError where nothing is left to train on.
    """
    if held_out_from:
        held = np.array([store.row(i).row >= held_out_from for i in range(len(store))])
        return np.flatnonzero(~held), np.flatnonzero(held)
    hashes = np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(store.row(i).ids, dtype=np.int32).tobytes())
                       for i in range(len(store))], dtype=np.uint64)
    distinct = np.unique(hashes)
    held = np.isin(hashes, distinct[:int(np.ceil(share * len(distinct)))])
    if held.all():
        raise UserError(f"validation_share {share} of {len(store)} rows leaves none to train on; lower it or add data")
    return np.flatnonzero(~held), np.flatnonzero(held)


def pack_rows(order: np.ndarray, lengths: np.ndarray, pack_tokens: int) -> list[np.ndarray]:
    """Row numbers in order → runs of at most pack_tokens tokens; a longer row is a pack of its own."""
    packs, pack, tokens = [], [], 0
    for row in order:
        if pack and tokens + lengths[row] > pack_tokens:
            packs.append(np.array(pack))
            pack, tokens = [], 0
        pack.append(row)
        tokens += lengths[row]
    return [*packs, np.array(pack)] if pack else packs


@dataclass(frozen=True)
class Plan:
    """Every optimiser step of the run: steps[i] is its packs (arrays of row numbers), epoch_of[i] its epoch."""

    steps: list[list[np.ndarray]]
    epoch_of: list[int]
    tokens: int                # of all steps

    @classmethod
    def make(cls, rows: np.ndarray, lengths: np.ndarray, *, epochs: int, seed: int, pack_tokens: int,
             accumulate: int) -> "Plan":
        steps, epoch_of = [], []
        for epoch in range(epochs):
            order = rows if epoch == 0 else np.random.default_rng([seed, epoch]).permutation(rows)
            packs = pack_rows(order, lengths, pack_tokens)
            groups = [packs[i:i + accumulate] for i in range(0, len(packs), accumulate)]
            steps += groups
            epoch_of += [epoch] * len(groups)
        return cls(steps, epoch_of, epochs * int(lengths[rows].sum()))
