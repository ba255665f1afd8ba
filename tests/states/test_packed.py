"""Packed linear layers: the plain products up to float32 rounding, and the plain ones themselves for other rows."""

import pytest
import torch
from torch import nn

from eagle3nb.states import packed
from eagle3nb.states.hf import TransformersTarget


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(packed, "OUTPUTS", 8)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_plain_one(bias):
    torch.manual_seed(0)
    plain, other = nn.Linear(96, 200, bias=bias), nn.Linear(96, 200, bias=bias)
    other.load_state_dict(plain.state_dict())
    holder = nn.Sequential(other, nn.ReLU())
    assert packed.pack(holder) == 4 * 96 * 200
    with torch.inference_mode():
        for rows in range(1, 20):
            x = torch.randn(rows, 96)
            exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
            assert (other(x) - exact).abs().max() < 1e-6 * exact.abs().max() * 4  # float32 sums of 96 terms
            assert rows in packed.ROWS or torch.equal(other(x), plain(x))
            assert other(x[None]).shape == (1, rows, 200)
    assert packed.pack(holder) == 0  # once is enough


def test_only_float32_on_a_build_with_onednn(monkeypatch):
    assert packed.pack(nn.Linear(8, 8).bfloat16()) == packed.pack(nn.Linear(8, 7)) == 0
    assert packed.pack(nn.Linear(8, 8)) == 256
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed.pack(nn.Linear(8, 8)) == 0


def test_a_target_that_is_packed_gives_the_same_states(tiny_target):
    plain, fast = (TransformersTarget(tiny_target, torch.float32, "cpu") for _ in range(2))
    assert packed.pack(fast.model) > 0
    ids = torch.arange(5, 30)[None]
    for room in (0, 8):
        caches = [target.forward(ids[:, :20], None, room)[2] for target in (plain, fast)]
        for a, b in zip(plain.forward(ids[:, 20:], caches[0]), fast.forward(ids[:, 20:], caches[1]), strict=True):
            if isinstance(a, torch.Tensor):  # 8 layers of float32 rounding: 1e-5 of the largest value
                assert 0 < (a - b).abs().max() < 1e-5 * a.abs().max()


def test_keys_in_place_and_their_cropping_equal_transformers_own_cache(tiny_target):
    target = TransformersTarget(tiny_target, torch.float32, "cpu")
    ids = torch.arange(5, 40)[None]
    aux, last = target.capture([ids[0].tolist()])[0]
    for widths in (  # float32 rounding of up to 8 incremental forwards: 1e-5 of the largest value
            [1] * 8, [5, 3], [2, 30], [17]):
        _, _, cache = target.forward(ids[:, :3], None, 40)
        found, place = [], 3
        for width in widths:
            target.forward(torch.full((1, 4), 99), cache)  # drafts that are rejected
            cache.crop(-4)
            a, b, cache = target.forward(ids[:, place:place + width], cache)
            found.append((a, b))
            place += width
        place = min(place, 35)
        assert cache.length == place
        assert (torch.cat([a for a, _ in found]) - aux[3:place]).abs().max() < 1e-5 * aux.abs().max()
        assert (torch.cat([b for _, b in found]) - last[3:place]).abs().max() < 1e-5 * last.abs().max()
        cache.crop(3)
        again, _, _ = target.forward(ids[:, 3:9], cache)
        assert (again - aux[3:9]).abs().max() < 1e-5 * aux.abs().max()
