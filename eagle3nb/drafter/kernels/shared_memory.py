"""Which blocks the kernels take on a GPU: read from the committed table of their ahead-of-time compilation. No Triton.

A Triton kernel's shared memory is decided when it is compiled: by architecture, head_dim, dtype, block sizes and
Triton's version. The sequence's length, the draft vocabulary's size, the group's size and the number of steps do not
enter: they are run-time numbers (attention.py, cross_entropy.py). So the whole set is compiled once, without a GPU, by
tools/kernel_table.py, and every figure stands in blocks.json before a machine is rented.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from eagle3nb.errors import UserError

TABLE = Path(__file__).with_name("blocks.json")
# KB that one block of threads may have (CUDA C++ programming guide, technical specifications per compute capability)
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
GPUS = {80: "A100, A800", 86: "A10, A40, RTX A6000, RTX 3090", 89: "L4, L40S, RTX 4090", 90: "H100, H200, H20",
        100: "B200, GB200", 120: "RTX 5090, RTX PRO 6000"}
DTYPES = ("fp32", "bf16", "fp16")
NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Blocks:
    """Queries (or rows) and keys (or columns) of a block, threads / 32, and tiles on their way at once."""

    m: int
    n: int
    warps: int
    stages: int

    @property
    def text(self) -> str:
        return f"{self.m} × {self.n or 1}, {self.warps} warps, {self.stages} stage{'s' * (self.stages > 1)}"

    @property
    def launch(self) -> dict:
        """Triton's options. FP fusion is stated, since its default is to change with Triton 3.10."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled: bytes of shared memory a block of threads, registers and spilled bytes a thread."""

    kernel: str
    arch: int
    head_dim: int  # 0: does not enter
    dtype: str
    blocks: Blocks
    shared: int
    registers: int
    spilled: int


def version() -> str:
    """Of the table to go by: the installed Triton's, patch releases alike; the newest where that is not known."""
    known = tuple(_tables())
    try:
        installed = metadata.version("triton").split(".")[:2]
    except PackageNotFoundError:
        return known[-1]
    return next((one for one in known if one.split(".")[:2] == installed), known[-1])


@lru_cache
def _tables() -> dict[str, tuple[Compiled, ...]]:
    found, tables = json.loads(TABLE.read_text(encoding="utf-8")), {}
    for one, values in found["versions"].items():
        rows = [dict(zip(found["columns"], row, strict=True)) for row in values]
        tables[one] = tuple(
            Compiled(row["kernel"], row["arch"], row["head_dim"], row["dtype"],
                     Blocks(row["m"], row["n"], row["warps"], row["stages"]), row["shared"], row["registers"],
                     row["spilled"]) for row in rows)
    return tables


def table() -> tuple[Compiled, ...]:
    """Every kernel as this Triton compiles it; of one kernel, arch, head_dim and dtype the preferred blocks first."""
    return _tables()[version()]


def kernels() -> tuple[str, ...]:
    """Their names, in the table's order."""
    return tuple(dict.fromkeys(row.kernel for row in table()))


def arch_of(major: int, minor: int) -> int | None:
    """The table's architecture for a compute capability: its own or the nearest below with the same major number."""
    return max((arch for arch in LIMITS if arch // 10 == major and arch <= 10 * major + minor), default=None)


def candidates(kernel: str, arch: int, head_dim: int, dtype: str) -> list[Compiled]:
    """A kernel's blocks in the table, the preferred ones first."""
    return [row for row in table() if (row.kernel, row.arch, row.dtype) == (kernel, arch, dtype)
            and row.head_dim in (0, head_dim)]


def choose(kernel: str, arch: int, limit: int, head_dim: int, dtype: str) -> Compiled:
    """The preferred blocks of a kernel that take at most `limit` bytes of shared memory: without spills if any can.

    UserError where none fits, or the table has no such kernel.
    """
    found = candidates(kernel, arch, head_dim, dtype)
    if not found:
        raise UserError(f"{kernel} is not compiled for head_dim {head_dim}, {dtype}, sm_{arch}; tools/kernel_table.py "
                        "says for what it is")
    fitting = [row for row in found if row.shared <= limit]
    if not fitting:
        least = min(row.shared for row in found) / 1024
        raise UserError(f"{kernel} (head_dim {head_dim}, {dtype}) needs {least:.0f} KB of shared memory and this "
                        f"sm_{arch} gives {limit / 1024:.0f}; take another GPU or another dtype")
    return min(fitting, key=lambda row: row.spilled)  # of equals the first, which is the preferred one


def device_limit(device) -> tuple[int | None, int]:
    """(architecture in the table or None, bytes of shared memory a block of threads may have) of a CUDA device."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return arch_of(found.major, found.minor), found.shared_memory_per_block_optin


@lru_cache
def on_device(kernel: str, device, head_dim: int, dtype) -> Blocks:
    """The blocks for tensors of a torch dtype on a CUDA device, by the device's own limit."""
    return choose(kernel, *device_limit(device), head_dim, NAMES[str(dtype)]).blocks


@lru_cache
def supports(device, head_dim: int, dtype) -> bool:
    """Whether the kernels were compiled for these (head_dim 0: it does not matter); if not, the plain twin works."""
    return (device.type == "cuda" and device_limit(device)[0] is not None and str(dtype) in NAMES
            and (head_dim in HEAD_DIMS or not head_dim))


def rows(head_dim: int, heads: int, kv_heads: int, dtype: str, steps: int) -> list[dict]:
    """The audit's section: {"arch", "gpus", "kernel", "blocks", "shared_kb", "limit_kb", "spilled", "fits"} a row.

    As `version()` of Triton compiles them. dtype "fp32", "bf16" or "fp16". Empty for a head_dim without kernels: the
    plain twin does its work. The other numbers decide nothing here, being run-time numbers of the kernels, but a group
    must be whole. "spilled": bytes a thread that did not fit its registers. UserError for heads that do not divide, a
    dtype or steps that cannot be.
    """
    if dtype not in DTYPES or steps < 1 or kv_heads < 1 or heads % kv_heads:
        raise UserError(f"{heads} heads over {kv_heads} kv_heads in {dtype}, {steps} steps: heads must be a multiple "
                        f"of kv_heads, steps 1 or more, dtype one of {', '.join(DTYPES)}")
    listed = []
    for arch, limit in LIMITS.items() if head_dim in HEAD_DIMS else ():
        for kernel in kernels():
            found = candidates(kernel, arch, head_dim, dtype)
            fits = any(row.shared <= 1024 * limit for row in found)
            row = choose(kernel, arch, 1024 * limit, head_dim, dtype) if fits else min(found, key=lambda x: x.shared)
            listed.append({"arch": f"sm_{arch}", "gpus": GPUS[arch], "kernel": kernel, "blocks": row.blocks.text,
                           "shared_kb": row.shared / 1024, "limit_kb": limit, "spilled": row.spilled, "fits": fits})
    return listed


def by_gpu(listed: list[dict]) -> list[dict]:
    """`rows` as one row an architecture: {"arch", "gpus", "hungriest", "shared_kb", "limit_kb", "spilled", "fits"}."""
    found = []
    for arch in dict.fromkeys(row["arch"] for row in listed):
        same = [row for row in listed if row["arch"] == arch]
        most = max(same, key=lambda row: row["shared_kb"])
        found.append({"arch": arch, "gpus": most["gpus"], "hungriest": most["kernel"], "shared_kb": most["shared_kb"],
                      "limit_kb": most["limit_kb"], "spilled": max(row["spilled"] for row in same),
                      "fits": all(row["fits"] for row in same)})
    return found
