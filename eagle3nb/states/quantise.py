"""Hidden states in eight bits: float8 e4m3 (3 mantissa bits, largest 448) with a scale per token and captured layer.

A scale per token, since a first token's residual stream may be a thousand times the others'; per layer, since a deep
layer's is a hundred times a shallow one's, which one scale for all would partly round to nothing. The scale is
max |x| / 448 in fp32, so nothing overflows; a value is then off by at most 1/16 of itself down to max / 28,672, and
below that by max / 458,752. Read back in bf16: its rounding is lost in that (SmolLM2's median token: 2.17 % to 2.38 %
in fp32, and 2.18 % to 2.38 % in bf16).
"""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
# A scale below fp32's normal numbers would be rounded itself; above the other, 448 of it would leave bf16's range.
SCALES = (torch.finfo(torch.float32).tiny, torch.finfo(torch.bfloat16).max / LARGEST)
BLOCK = 1 << 19  # values at a time on a CPU: what passes several times stays in its cache
TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # byte → value; torch's cast is slower


def encode(states: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """states [N, layers·h] in fp32, bf16 or fp16 → (values float8_e4m3fn [N, layers·h], scale fp32 [N, layers]).

    Finite states give finite values; the largest of a token and layer is kept to fp32's rounding, zeros stay zeros.
    """
    N, width = states.shape
    values = torch.empty(N, width, dtype=torch.float8_e4m3fn, device=states.device)
    scale = torch.empty(N, layers, dtype=torch.float32, device=states.device)
    for rows in blocks(states):
        part = states[rows].reshape(-1, layers, width // layers)
        largest = torch.maximum(part.amax(-1), -part.amin(-1)).float()  # no |x| in between: five times as fast
        scale[rows] = (largest / LARGEST).clamp(*SCALES)
        values[rows] = (part / scale[rows, :, None]).view(-1, width).to(torch.float8_e4m3fn)  # at most 448 (1 + 2⁻²³)
    return values, scale


def decode(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `encode` was given, to its precision: [N, layers·h] in `dtype`."""
    (N, width), layers = values.shape, scale.shape[1]
    states, table = torch.empty(N, width, dtype=dtype, device=values.device), TABLE.to(values.device)
    for rows in blocks(values):
        part = table.index_select(0, values[rows].view(torch.uint8).flatten().int()).view(-1, layers, width // layers)
        states[rows] = part.mul_(scale[rows, :, None]).view(-1, width)
    return states


def blocks(states: Tensor):
    """Slices of rows; on a GPU one for all."""
    N, width = states.shape
    step = max(1, BLOCK // max(width, 1)) if states.device.type == "cpu" else max(N, 1)
    return [slice(a, min(a + step, N)) for a in range(0, N, step)]


# ---------------------------------------------------------------------------------------------------- what it costs


def dtype_errors(aux: Tensor, last: Tensor, *, layers=(1, 2, 3), starts=()) -> list[dict]:
    """What a store in bf16 and in fp8_e4m3 loses of the states aux [N, 3h] and last [N, h]: a row a layer and dtype.

    Relative error of a token: |stored − given| / |given| over one layer's h values; its median and largest over the
    tokens, and its largest over the first tokens of rows (`starts`: where they begin), whose states are beyond the
    others'. "to zero": share of values that were not zero and are read back as zero. layers: their names.
    """
    first = torch.zeros(len(aux), dtype=torch.bool)
    first[torch.as_tensor(starts, dtype=torch.long)] = True
    rows = []
    for name, states in zip([*(f"layer {layer}" for layer in layers), "last"], [*aux.chunk(3, -1), last], strict=True):
        states = states.detach().float().cpu()
        for dtype in ("bf16", "fp8_e4m3"):
            stored = read_back(states, dtype)
            error = (stored - states).norm(dim=-1) / states.norm(dim=-1).clamp_min(1e-30)
            gone = ((stored == 0) & (states != 0)).sum() / (states != 0).sum().clamp_min(1)
            rows.append({"layer": name, "dtype": dtype, "median token": float(error.median()),
                         "worst token": float(error.max()), "worst first token": float(error[first].max())
                         if first.any() else None, "to zero": float(gone)})
    return rows


def read_back(states: Tensor, dtype: str) -> Tensor:
    """One layer's states [N, h] as a reader gets them from a store of that dtype, in fp32."""
    if dtype == "fp8_e4m3":
        return decode(*encode(states, 1), torch.bfloat16).float()
    return states.to(torch.bfloat16).float()
