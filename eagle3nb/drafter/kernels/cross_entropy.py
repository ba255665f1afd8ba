"""The row-wise part of fused linear + soft cross-entropy in Triton: the twin is `plain_rows` of drafter/loss.py.

The matrix products stay cuBLAS's, on a chunk's logits; two kernels do all that lies between them, and write the
gradient over the logits. Why not the products too: a row of logits costs 6 h·D FLOPs in its three products, and here
2 reads and 1 write of D values beside the teacher's 2 reads, which L2 serves (K students share a teacher's row, and a
row that a program has just read is still there). At h = 7168, D = 32,000 in fp32 that is 1.4 GFLOP to 0.64 MB, 2,150
FLOPs a byte where an H100 in bf16 breaks even at about 300: the passes are an eighth of the time at the most, and a
fused kernel would pay a fourth product in the backward pass instead.

D is a run-time number and rows are read in blocks of BLOCK_N, so a vocabulary of 163,840 needs no more shared memory
than one of 32,000. A multiple of 16 is read in vectors of 16 bytes, any other D value by value. Checked in Triton's
interpreter against the twin, compiled ahead of time. Not yet run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3nb.drafter.kernels import shared_memory
from eagle3nb.drafter.kernels.shared_memory import Blocks

INDICES = ["row_ptr", "label_ptr"]


def rows(logits: Tensor, teacher: Tensor, row: Tensor, label: Tensor, wants_grad: bool,
         blocks: dict[str, Blocks] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's logits [n, D] and teacher's [m, D], both contiguous → (loss fp32 [n], hit bool [n], dz [n, D]).

    row int64 [n]: a student's row of `teacher`; label int64 [n]: what its argmax should be. dz = softmax(logits) − p in
    the logits' dtype, and it is the logits' own memory, which is lost; without wants_grad the logits stay.
    """
    if blocks is None:
        blocks = {name: shared_memory.on_device(name, logits.device, 0, logits.dtype) for name in KERNELS}
    n, D = logits.shape
    lse = logits.new_empty(len(teacher), dtype=torch.float32)
    each, hit = torch.empty_like(row, dtype=torch.float32), torch.empty_like(row, dtype=torch.bool)
    if n:
        b = blocks["cross_entropy_teacher"]
        cross_entropy_teacher[(len(teacher),)](teacher, lse, D, b.n, **b.launch)
        b = blocks["cross_entropy_rows"]
        cross_entropy_rows[(n,)](logits, teacher, lse, row, label, each, hit, D, wants_grad, b.n, **b.launch)
    return each, hit, logits


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cross_entropy_teacher(z_ptr, lse_ptr, D, BLOCK_N: tl.constexpr):
    """log2 Σ exp of one row of the teacher's logits [m, D]."""
    row, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    z_row = z_ptr + tl.cast(row, tl.int64) * D
    top, total = float("-inf"), 0.0
    for first in tl.range(0, D, BLOCK_N):
        z = tl.load(z_row + first + n, mask=first + n < D, other=float("-inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(z - higher), 0)
        top = higher
    tl.store(lse_ptr + row, top + tl.log2(total))


@triton.jit(do_not_specialize_on_alignment=INDICES)
def cross_entropy_rows(z_ptr, teacher_ptr, teacher_lse_ptr, row_ptr, label_ptr, each_ptr, hit_ptr, D,
                       WANTS_GRAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """One row of the student's logits: loss = lse − Σ p z, since Σ p = 1; then q − p over the logits."""
    i, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    at = tl.load(row_ptr + i)
    z_row = z_ptr + tl.cast(i, tl.int64) * D
    teacher_row = teacher_ptr + at * D
    teacher_lse = tl.load(teacher_lse_ptr + at)
    of_label = tl.load(z_row + tl.load(label_ptr + i)).to(tl.float32) * LOG2_E  # before it is overwritten
    top, total, cross = float("-inf"), 0.0, 0.0
    for first in tl.range(0, D, BLOCK_N):
        there = first + n < D
        z = tl.load(z_row + first + n, mask=there, other=float("-inf")).to(tl.float32) * LOG2_E
        t = tl.load(teacher_row + first + n, mask=there, other=float("-inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(z - higher), 0)
        cross += tl.sum(tl.where(there, tl.exp2(t - teacher_lse) * z, 0.0), 0)
        top = higher
    lse = top + tl.log2(total)
    tl.store(each_ptr + i, (lse - cross) * LN_2)
    tl.store(hit_ptr + i, of_label == top)
    if WANTS_GRAD:
        for first in tl.range(0, D, BLOCK_N):
            there = first + n < D
            z = tl.load(z_row + first + n, mask=there, other=0.0).to(tl.float32) * LOG2_E
            t = tl.load(teacher_row + first + n, mask=there, other=0.0).to(tl.float32) * LOG2_E
            dz = tl.exp2(z - lse) - tl.exp2(t - teacher_lse)
            tl.store(z_row + first + n, dz.to(z_ptr.dtype.element_ty), mask=there)


KERNELS = {kernel.__name__: kernel for kernel in (cross_entropy_teacher, cross_entropy_rows)}
