"""Compiles the Triton kernels for every GPU without one, and writes what they need: drafter/kernels/blocks.json.

    python tools/kernel_table.py [--kernel NAME]…      about 5 minutes on one core; --kernel renews these alone

Run it again after a kernel has changed, and with each Triton that is to be known: 3.8.0 comes with torch 2.14.1, 3.9.0
is PyPI's. Another version needs no environment of its own: pip install --no-deps --target DIR triton==3.8.0, and
PYTHONPATH=DIR. In places they allocate differently (fp32 on sm_86: 90,112 bytes in 3.8.0 where 3.9.0 takes 73,728).

For each architecture, head_dim and dtype it takes the candidates of blocks in the order of preference until one spills
nothing within the architecture's limit. All that were compiled stand in the table. Larger tiles come first: they read
less. That order is a guess until someone measures it.
"""

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from dataclasses import astuple
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3nb.drafter.kernels import attention, cross_entropy
from eagle3nb.drafter.kernels.shared_memory import DTYPES, HEAD_DIMS, LIMITS, TABLE, Blocks, Compiled
from eagle3nb.files import atomic_write
from eagle3nb.progress import progress

KERNELS = attention.KERNELS | cross_entropy.KERNELS
# m, n, warps, stages; by how much a tile holds: 16-bit values, fp32 at head_dim 64, fp32 at head_dim 128
CANDIDATES = {
    "attention_forward": (((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 4, 2)),
                          ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)), ((32, 32, 8, 2), (32, 32, 8, 1))),
    "attention_dq": (((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)), ((32, 32, 8, 2), (32, 32, 8, 1)),
                     ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    "attention_dkdv": (((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2)), ((32, 32, 8, 2), (32, 32, 8, 1)),
                       ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1))),
    "attention_own": (((64, 0, 8, 1), (32, 0, 8, 1)),) * 3,
    "cross_entropy_teacher": (((1, 4096, 8, 1),),) * 3,
    "cross_entropy_rows": (((1, 4096, 8, 1), (1, 2048, 8, 1)),) * 3}
TYPES = {"lse_ptr": "fp32", "delta_ptr": "fp32", "teacher_lse_ptr": "fp32", "each_ptr": "fp32", "hit_ptr": "u1",
         "row_ptr": "i64", "label_ptr": "i64"} | dict.fromkeys(attention.INDICES, "i32")
UNALIGNED = {*attention.INDICES, *cross_entropy.INDICES}  # as the kernels declare them
COLUMNS = ("kernel", "arch", "head_dim", "dtype", "m", "n", "warps", "stages", "shared", "registers", "spilled")


def source(kernel: str, head_dim: int, dtype: str, blocks: Blocks) -> ASTSource:
    """What a launch on tensors of that dtype has compiled: types, constants, and which arguments divide by 16."""
    fn = KERNELS[kernel]
    values = {"HEAD_DIM": head_dim, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "WANTS_GRAD": True}
    constants = {name: value for name, value in values.items() if name in fn.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + TYPES.get(name, dtype)
            if name not in UNALIGNED:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name == "D":  # as 32,000 and 163,840 are; others take the kernel without vectors
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature, constants, attributes)


def compiled(kernel: str, arch: int, head_dim: int, dtype: str, blocks: Blocks) -> Compiled:
    """One kernel compiled for an architecture; ptxas tells registers and spills."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        built = triton.compile(source(kernel, head_dim, dtype, blocks), target=GPUTarget("cuda", arch, 32),
                               options=blocks.launch)
    found = [re.search(rf"(\d+) {what}", log.getvalue()) for what in ("registers", "bytes spill stores")]
    registers, spilled = (int(match.group(1)) for match in found)
    return Compiled(kernel, arch, head_dim, dtype, blocks, built.metadata.shared, registers, spilled)


def build(kernel: str, arch: int, head_dim: int, dtype: str) -> list[Compiled]:
    """The candidates up to the first that spills nothing and fits the architecture."""
    rows = []
    for one in CANDIDATES[kernel][0 if dtype != "fp32" else 1 if head_dim <= 64 else 2]:
        rows.append(compiled(kernel, arch, head_dim, dtype, Blocks(*one)))
        if not rows[-1].spilled and rows[-1].shared <= 1024 * LIMITS[arch]:
            break
    return rows


def flat(row: Compiled) -> list:
    kernel, arch, head_dim, dtype, blocks, *figures = astuple(row)
    return [kernel, arch, head_dim, dtype, *blocks, *figures]


def order(row: list) -> tuple:
    return list(KERNELS).index(row[0]), *row[1:3], DTYPES.index(row[3])


def write(rows: list[list]) -> None:
    """This Triton's rows beside the other versions', a line a row, so that a diff shows which kernel has changed."""
    versions = known() | {triton.__version__: sorted(rows, key=order)}
    tables = ",\n".join(f'  "{version}": [\n   ' + ",\n   ".join(map(json.dumps, versions[version])) + "\n  ]"
                        for version in sorted(versions, key=lambda name: [int(part) for part in name.split(".")]))
    with atomic_write(TABLE) as handle:
        handle.write(f'{{"columns": {json.dumps(COLUMNS)},\n "versions": {{\n{tables}\n }}\n}}\n')


def known() -> dict[str, list[list]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))["versions"] if TABLE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", choices=KERNELS, default=[])
    wanted = parser.parse_args().kernel or list(KERNELS)
    rows = known().get(triton.__version__, [])
    dims = {kernel: HEAD_DIMS if kernel in attention.KERNELS else (0,) for kernel in wanted}
    total = len(LIMITS) * len(DTYPES) * sum(map(len, dims.values()))
    with progress(total, "compiled", "kernels") as bar:
        for kernel in wanted:
            rows = [row for row in rows if row[0] != kernel]
            for arch, head_dim, dtype in product(LIMITS, dims[kernel], DTYPES):
                rows += [flat(row) for row in build(kernel, arch, head_dim, dtype)]
                bar.advance()
            write(rows)


# ptxas's log tells registers and spills; a kernel found in Triton's cache would have none, so that is a new folder
triton.knobs.nvidia.dump_ptxas_log = True

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = triton.knobs.cache.dir = cache
        main()
