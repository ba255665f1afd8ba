"""Transformers' target against the independent forward: captured layers, final norm, decoding, sampling."""

import gc
import weakref

import numpy as np
import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.states import generation
from eagle3nb.states.hf import TransformersTarget

ROWS = [list(range(5, 28)), [40, 41, 42], [1, 90, 7, 7, 7, 60, 33, 2, 11]]
PROMPTS = [[1, 70, 80, 90], [5], list(range(30, 50)), [9, 9, 8], [77, 12, 100, 4, 55, 6]]


def test_capture_equals_the_independent_forward(target, witness):
    # Float32 against float64: 1e-5 of the largest value; a neighbouring layer is off by more than 0.1 of it.
    for ids, (aux, last) in zip(ROWS, target.capture(ROWS), strict=True):
        streams, final = witness.residuals(ids)
        expected = np.concatenate([streams[i] for i in (2, 4, 5)], axis=-1)
        assert aux.shape == (len(ids), 3 * 64) and last.shape == (len(ids), 64)
        assert np.abs(aux.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        assert np.abs(last.numpy() - final).max() < 1e-5 * np.abs(final).max()
        logits = final @ witness.head.T
        assert np.abs(target.logits(last).numpy() - logits).max() < 1e-5 * np.abs(logits).max()


def test_a_rows_states_do_not_depend_on_its_batch(target):
    alone = target.capture([ROWS[1]])[0]
    beside = target.capture(ROWS)[1]
    for a, b in zip(alone, beside, strict=True):  # another GEMM shape sums in another order: 1e-6 of the largest value
        assert (a - b).abs().max() < 1e-6 * b.abs().max()


def test_forward_with_a_cache_that_is_cropped_equals_capture(target):
    ids = ROWS[0]
    aux, last = target.capture([ids])[0]
    first, _, cache = target.forward(torch.tensor([ids[:10]]))
    _, _, cache = target.forward(torch.tensor([[99, 98, 97]]), cache)  # drafts that are rejected
    cache.crop(10)
    rest, end, _ = target.forward(torch.tensor([ids[10:]]), cache)
    assert (torch.cat([first, rest]) - aux).abs().max() < 3e-6 * aux.abs().max()
    assert (end - last[10:]).abs().max() < 3e-6 * last.abs().max()
    assert target.kept == {}  # nothing of a forward stays behind


def naive_greedy(witness, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        _, final = witness.residuals(ids)
        ids.append(int((witness.head @ final[-1]).argmax()))
    return ids[len(prompt):]


def test_greedy_text_equals_a_decode_without_a_cache(target, witness):
    prompts = [p for p in PROMPTS if len(p) < 7]
    found = target.generate(prompts, max_new_tokens=4, batch=2)  # refilled: four prompts in two slots
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer == naive_greedy(witness, prompt, 4)


def test_stops_and_what_lies_beyond(target):
    free = target.generate(PROMPTS, max_new_tokens=12)
    stop = free[0][3]
    for beyond in (0, 4):
        stopped = target.generate(PROMPTS, max_new_tokens=8, stop_ids=[stop], beyond=beyond)
        for whole, answer in zip(free, stopped, strict=True):
            end = whole.index(stop) + 1 if stop in whole[:8] else 8
            assert answer == whole[: end + beyond]


def test_a_sampled_text_depends_on_its_prompt_and_seed_alone(target):
    settings = {"max_new_tokens": 6, "temperature": 0.9, "top_p": 0.95, "seed": 3}
    together = target.generate(PROMPTS, batch=3, **settings)
    assert together == target.generate(PROMPTS, batch=5, **settings)
    assert together[::-1] == target.generate(PROMPTS[::-1], batch=2, **settings)
    assert [target.generate([p], **settings)[0] for p in PROMPTS] == together
    assert together != target.generate(PROMPTS, **{**settings, "seed": 4})
    assert together != target.generate(PROMPTS, max_new_tokens=6)
    twice = target.generate([PROMPTS[0]] * 2, **{**settings, "seed": [3, 4]})
    assert twice[0] == together[0] and twice[0] != twice[1]


def test_each_prompt_is_told_as_it_finishes(target):
    told = {}
    found = target.generate(PROMPTS, max_new_tokens=6, batch=2, done=lambda i, ids: told.update({i: list(ids)}))
    assert told == dict(enumerate(found))
    assert target.generate([], max_new_tokens=6) == []


def test_prompts_that_cannot_be_continued(target):
    with pytest.raises(UserError, match="prompt 1 is empty"):
        target.generate([[1], []], max_new_tokens=2)
    with pytest.raises(UserError, match="prompt 0 has 505 tokens"):
        target.generate([[1] * 505], max_new_tokens=6, beyond=2)


@pytest.mark.parametrize("vocab, top", [(40, 512), (40, 8)])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.2])
def test_sampling_follows_the_cut_softmax(monkeypatch, vocab, top, top_p):
    """Quantiles u on an even grid: a token's share is its probability in the smallest set that holds top_p."""
    monkeypatch.setattr(generation, "TOP", top)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    p = np.exp(logits.double().numpy() / 0.8)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1] if top_p < 1 else order
    expected = np.zeros(vocab)
    expected[kept] = p[kept] / p[kept].sum()
    grid = 1500
    drawn = np.bincount([generation.sample(logits, 0.8, top_p, (i + 0.5) / grid) for i in range(grid)], minlength=vocab)
    assert np.abs(drawn / grid - expected).max() < 2 / grid


def test_close_frees_the_model(tiny_target):
    target = TransformersTarget(tiny_target, torch.float32, "cpu")
    target.capture(ROWS)
    model = weakref.ref(target.model)
    target.close()
    gc.collect()
    assert model() is None
