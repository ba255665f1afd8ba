"""The step's pieces: attention and loss against autograd of the plain formula, the chain against one slot at a time."""

import numpy as np
import pytest
import torch

from eagle3nb.drafter import attention, loss
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.ttt import chain
from eagle3nb.errors import UserError


@pytest.fixture
def model(tiny_facts):
    torch.manual_seed(1)
    return DraftModel(DraftConfig.from_target(tiny_facts(), 48), torch.randn(97, 32), torch.arange(0, 96, 2))


@pytest.mark.parametrize("later", [0, 2])
def test_attention_gradients(monkeypatch, later):
    """float64 gradcheck, blocks of three queries, two documents, gaps between slots."""
    monkeypatch.setattr(attention, "BLOCK", 3)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    slots, starts = torch.tensor([0, 2, 3, 5, 8, 9, 10]), torch.tensor([0] * 4 + [4] * 8)
    own = [leaf(7, 2, 4) for _ in range(2 * later)]
    inputs = (leaf(7, 4, 4), leaf(12, 2, 4), leaf(12, 2, 4), *own)

    def attend(q, k, v, *own):
        return attention.ttt_attention(q, k, v, list(own[:later]), list(own[later:]), slots, starts)

    assert torch.autograd.gradcheck(attend, inputs)


def test_loss_is_the_plain_formula(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 2)
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in (7, 9))
    teacher, teacher_head = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (4, 9))
    row, label = torch.tensor([0, 2, 3, 0, 2, 3, 3]), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    scale = torch.rand(7, generator=generator, dtype=torch.float64)
    value, each, right = loss.soft_cross_entropy(x, head, teacher, teacher_head, row, label, scale)
    got = torch.autograd.grad(value, (x, head))
    p, log_q = torch.softmax(teacher[row] @ teacher_head.T, -1), torch.log_softmax(x @ head.T, -1)
    plain = -(p * log_q).sum(-1)
    for ours, theirs in zip(got, torch.autograd.grad((plain * scale).sum(), (x, head)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(each, plain.detach(), rtol=1e-12, atol=1e-12)
    assert right.tolist() == (log_q.argmax(-1) == label).tolist()


def test_chain_of_a_slot_depends_on_nothing_after_its_input(model):
    ids, aux = torch.randint(97, (40,)), torch.randn(40, 96)
    whole = chain(model, ids, aux, 4)
    assert [(row >= 0).sum() for row in whole] == [39, 38, 37, 36] and set(whole.ravel()) <= {-1, *range(0, 96, 2)}
    for t in (0, 7, 30):
        for k in range(4):                       # the text cut after x[t+1+k], the states after a[t]
            cut, states = ids[:t + 2 + k], aux.clone()
            states[t + 1:] = 0
            assert chain(model, cut, states[:len(cut)], k + 1)[k, t] == whole[k, t]
    some = chain(model, ids, aux, 4, slots=[3, 9, 37])
    assert (some[:, [3, 9, 37]] == whole[:, [3, 9, 37]]).all() and (some >= 0).sum() == 10


def test_chains_of_packed_texts_are_those_of_each_alone(model):
    lengths = [40, 1, 2, 3, 25, 2]
    ids, aux = torch.randint(97, (sum(lengths),)), torch.randn(sum(lengths), 96)
    begins = np.cumsum(lengths) - lengths
    starts = np.repeat(begins, lengths)
    whole = chain(model, ids, aux, 4, starts=starts)
    slots = np.flatnonzero(np.arange(len(ids)) % 3 > 0)
    some = chain(model, ids.numpy(), aux, 4, slots, starts)
    for begin, length in zip(begins, lengths, strict=True):
        text = slice(begin, begin + length)
        assert np.array_equal(whole[:, text], chain(model, ids[text], aux[text], 4))
        inside = slots[(slots >= begin) & (slots < begin + length)]
        assert np.array_equal(some[:, inside], whole[:, inside])
    assert (np.delete(some, slots, axis=1) == -1).all()


def test_chain_of_a_short_text(model):
    assert (chain(model, [5], torch.randn(1, 96), 3) == -1).all()
    assert chain(model, [5, 6], torch.randn(2, 96), 3)[:, 0].tolist()[1:] == [-1, -1]
    assert (chain(model, [5, 6, 7], torch.randn(3, 96), 2, slots=[]) == -1).all()


def test_saved_and_loaded(model, tmp_path):
    model.save(tmp_path, {"why": "test"})
    again = DraftModel.load(tmp_path, model.embed_tokens)
    assert again.config == model.config and again.vocabulary_ids.tolist() == list(range(0, 96, 2))
    ids, aux = torch.randint(97, (20,)), torch.randn(20, 96)
    assert np.array_equal(chain(again, ids, aux, 3), chain(model, ids, aux, 3))
    assert (model.to_target(torch.tensor([0, 5, 47])) == torch.tensor([0, 10, 94])).all()
    with pytest.raises(UserError, match="another target"):
        DraftModel.load(tmp_path, torch.randn(97, 16))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="no whole drafter"):
        DraftModel.load(tmp_path, model.embed_tokens)


def test_config_is_strict(model):
    values = model.config.to_json()
    assert DraftConfig.from_json(values) == model.config
    with pytest.raises(UserError, match="unknown"):
        DraftConfig.from_json(values | {"layers": 2})
    with pytest.raises(UserError, match="lacks .'heads'"):
        DraftConfig.from_json({key: value for key, value in values.items() if key != "heads"})
    for name, wrong in (("heads", "3"), ("vocab", 0), ("hidden", 1.5), ("eps", None), ("rope", []), ("fc_norm", 1)):
        with pytest.raises(UserError, match=f"{name} is .*train again"):
            DraftConfig.from_json(values | {name: wrong})
