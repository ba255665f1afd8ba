"""Eight bits: against a naive rounding to the nearest of all values, on shapes and sizes that break such code."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from eagle3nb.states import quantise
from eagle3nb.states.quantise import decode, dtype_errors, encode


def every_value() -> np.ndarray:
    """What e4m3 can say, from its definition: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f is no number."""
    found = []
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if (byte & 0x7F) != 0x7F:
            size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
            found.append(-size if byte >> 7 else size)
    return np.array(sorted(set(found)))


def naive(states: torch.Tensor, layers: int) -> np.ndarray:
    """Each value on its own: divided by its layer's scale, the nearest value, multiplied. Float64 but for the scale."""
    values, (N, width) = every_value(), states.shape
    h, out = width // layers, np.zeros((N, width))
    for n in range(N):
        for layer in range(layers):
            part = states[n, layer * h : (layer + 1) * h].double().numpy()
            scale = np.float64(np.float32(np.abs(part).max() / 448)) or 1.0
            for j, x in enumerate(part):
                out[n, layer * h + j] = values[np.abs(values - x / scale).argmin()] * scale
    return out


@pytest.mark.parametrize("shape", [(1, 3, 1), (7, 3, 16), (5, 1, 33), (2, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nearest_eight_bit_value(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    N, layers, h = shape
    states = torch.randn(N, layers * h, generator=generator) * 10.0 ** torch.randint(-3, 4, (N, 1), generator=generator)
    states = (states * torch.randn(N, layers * h, generator=generator).exp()).to(dtype)
    values, scale = encode(states, layers)
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert values.shape == states.shape and scale.shape == (N, layers)
    read, expected = decode(values, scale), naive(states, layers)
    # A tie may fall either way (fp32's division); the error is then the same.
    ours, nearest = np.abs(read.numpy() - states.double().numpy()), np.abs(expected - states.double().numpy())
    assert (ours <= nearest * (1 + 1e-5) + 1e-6 * np.abs(expected)).all()
    assert np.isclose(read.numpy(), expected, rtol=1e-5).mean() > 0.97
    half = decode(values, scale, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half, read.bfloat16())


def test_the_promised_precision():
    states = torch.randn(200, 3 * 64) * torch.logspace(-4, 4, 200)[:, None]
    largest = states.view(200, 3, 64).abs().amax(-1).repeat_interleave(64, 1)
    error = (decode(*encode(states, 3)) - states).abs()
    assert (error <= torch.maximum(states.abs() / 16, largest / 458_752) * (1 + 1e-5)).all()
    kept = states.abs() == largest
    assert (error[kept] <= 1e-6 * largest[kept]).all()  # the largest of a token and layer is exact


def test_a_massive_token_or_layer_spoils_no_other():
    """SmolLM2's first token reaches 2·10⁴ in its middle layer; one scale for all would leave others nothing."""
    torch.manual_seed(1)
    states = torch.randn(64, 3 * 32)
    plain = decode(*encode(states, 3))
    massive = states.clone()
    massive[0, 40] = 2e4
    read = decode(*encode(massive, 3))
    same = torch.ones(64, 96, dtype=torch.bool)
    same[0, 32:64] = False
    assert torch.equal(read[same], plain[same])
    flat = decode(*encode(massive, 1))
    assert (flat[0, :32] - states[0, :32]).norm() > 1.2 * (read[0, :32] - states[0, :32]).norm()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1.2e-38, 1e-30, 448.0, 3.3e38, 3.4028234e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_finite_states_stay_finite_at_any_size(value, sign):
    states = torch.zeros(3, 12)
    states[1] = sign * value
    states[2, ::2] = sign * value
    values, scale = encode(states, 3)
    for dtype in (torch.float32, torch.bfloat16):
        read = decode(values, scale, dtype)
        assert read.isfinite().all() and (read[0] == 0).all() and (read[2, 1::2] == 0).all()
        if 1e-37 < value < 3e38:
            assert torch.allclose(read[1].float(), states[1], rtol=2**-8)
    assert (scale > 0).all() and scale.isfinite().all()


def test_nothing_to_encode():
    values, scale = encode(torch.empty(0, 12), 3)
    assert values.shape == (0, 12) and scale.shape == (0, 3) and decode(values, scale).shape == (0, 12)


def test_blocks_do_not_show(monkeypatch):
    states = torch.randn(50, 24)
    whole = encode(states, 3)
    for block in (1, 100, 24 * 7):
        monkeypatch.setattr(quantise, "BLOCK", block)
        parts = encode(states, 3)
        assert torch.equal(parts[0].view(torch.uint8), whole[0].view(torch.uint8)) and torch.equal(parts[1], whole[1])
        assert torch.equal(decode(*parts), decode(*whole))


def test_views_that_are_not_in_one_piece():
    states = torch.randn(9, 48).T[:24]  # [24, 9], strides the other way round
    assert torch.equal(decode(*encode(states, 3)), decode(*encode(states.contiguous(), 3)))


def test_errors_by_layer_against_a_plain_loop():
    torch.manual_seed(2)
    aux, last = torch.randn(20, 3 * 16) * torch.tensor([1.0, 30, 500]).repeat_interleave(16), torch.randn(20, 16)
    aux[[0, 11], 16 + 5] = 2e4
    table = dtype_errors(aux, last, layers=(2, 15, 27), starts=(0, 11))
    assert [(row["layer"], row["dtype"]) for row in table] == [
        (name, dtype) for name in ("layer 2", "layer 15", "layer 27", "last") for dtype in ("bf16", "fp8_e4m3")]
    for row, states in zip(table[1::2], [*aux.chunk(3, 1), last], strict=True):
        read = torch.from_numpy(naive(states, 1)).bfloat16().double()
        errors = [float((read[t] - states[t]).norm() / states[t].norm()) for t in range(20)]
        assert np.isclose(row["median token"], np.sort(errors)[9], rtol=0.02)
        assert np.isclose(row["worst token"], max(errors), rtol=0.02)
        assert np.isclose(row["worst first token"], max(errors[0], errors[11]), rtol=0.02)
        assert np.isclose(row["to zero"], float((read == 0).double().mean()), atol=2e-3)
    for row, states in zip(table[::2], [*aux.chunk(3, 1), last], strict=True):
        error = F.pairwise_distance(states.bfloat16().float(), states, eps=0) / states.norm(dim=1)
        assert np.isclose(row["worst token"], float(error.max()), rtol=1e-3) and row["worst token"] < 4e-3
    assert dtype_errors(aux, last)[0]["worst first token"] is None
