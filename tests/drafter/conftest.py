"""A synthetic target and store for the drafter's tests: no model, no files, structure that a drafter can learn.

The target is a random Markov chain: its last hidden state at t is a vector of x[t] alone, its captured layers are noisy
copies; assistant text follows its argmax nine times in ten.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def make_store(rows=12, vocab=97, hidden=32, seed=0, shortest=9, longest=40, follow=0.9):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, hidden, generator=generator) + 1.0   # a common direction, as real ones have
    lm_head = torch.randn(vocab, hidden, generator=generator) * 0.5
    last_of = torch.randn(vocab, hidden, generator=generator)
    argmax_of = (last_of @ lm_head.T).argmax(-1).numpy()
    stored = []
    for number in range(rows):
        T = int(rng.integers(shortest, longest + 1))
        mask = np.zeros(T, np.uint8)
        cursor = 0
        while cursor < T:                                  # turns: a prompt, an answer, now and then a very short one
            cursor += int(rng.integers(1, 5))
            answer = int(rng.integers(1, 14))
            mask[cursor:cursor + answer] = 1
            cursor += answer
        ids = np.zeros(T, np.int32)
        for t in range(T):
            follows = t and mask[t] and rng.random() < follow
            ids[t] = argmax_of[ids[t - 1]] if follows else rng.integers(vocab)
        positions = np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int32)
        states = last_of[torch.from_numpy(ids).long()]
        aux = torch.cat([states + 0.3 * torch.randn(T, hidden, generator=generator) for _ in range(3)], -1)
        last = states[torch.from_numpy(positions).long()]
        logits = last @ lm_head.T
        stored.append(SimpleNamespace(row=number, ids=ids, mask=mask, aux=aux, last=last, last_positions=positions,
                                      teacher_argmax=logits.argmax(-1).int().numpy(),
                                      teacher_lse=logits.logsumexp(-1).numpy()))
    return FakeStore(stored, embedding, lm_head)


class FakeStore:
    """What the drafter uses of eagle3nb.states.store.Store."""

    def __init__(self, rows, embedding, lm_head):
        self.rows, self._embedding, self._lm_head = rows, embedding, lm_head
        self.lengths = np.array([len(row.ids) for row in rows])
        self.vocab, self.hidden = embedding.shape
        self.fingerprint = {"corpus": "synthetic"}

    def __len__(self):
        return len(self.rows)

    def row(self, i):
        return self.rows[i]

    def embedding(self):
        return self._embedding

    def lm_head_rows(self, ids):
        return self._lm_head[torch.as_tensor(ids)]


@pytest.fixture
def synthetic_store():
    return make_store


@pytest.fixture
def tiny_facts():
    def facts(**changes):
        sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 40, "vocab": 97, "eps": 1e-5,
                 "rope": {"theta": 10000.0, "scaling": None}, "max_positions": 256}
        return SimpleNamespace(**sizes | changes)

    return facts
