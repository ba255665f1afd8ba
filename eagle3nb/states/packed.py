"""Linear layers that multiply a few rows quickly on a CPU, for a verify of some drafted tokens.

MKL reads a weight once for 1 to 3 rows and takes another path from 4 on: with SmolLM2's head (one thread, AVX-512) 4
rows cost 2.2 times one row, 8 rows 3.6 times; oneDNN on weights that were packed once, 1.2 and 1.4 times. Its calls
cost more by themselves, so only layers of many outputs are packed: MLP and head. The packed copy is held beside the
plain one, which single rows and whole texts still use. The two sum in other orders: float32 rounding, nothing more.
"""

import torch
from torch import nn
from torch.nn import functional as F

ROWS = range(4, 17)  # fewer: plain is as fast; more: the plain product is no longer bound by reading the weight
OUTPUTS = 1024  # of a layer that is packed, at least: 576 outputs took as long packed as plain


def pack(module: nn.Module) -> int:
    """Pack the float32 linear layers of many outputs on the CPU under `module`, for reading only; the bytes it took.

    Does nothing where this build of PyTorch has no oneDNN, or to a layer that is packed already.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    taken = 0
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        if type(layer) is nn.Linear and "forward" not in vars(layer) and weight.dtype == torch.float32 and (
                weight.device.type == "cpu" and layer.out_features >= OUTPUTS):
            layer.forward = few_rows(layer)
            taken += weight.nbytes
    return taken


def few_rows(layer: nn.Linear):
    """The layer's forward, for inference: packed for a few rows, plain for the rest."""
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS[-1])

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() // x.shape[-1] in ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
        return F.linear(x, layer.weight, layer.bias)
    return forward
