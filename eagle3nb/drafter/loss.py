"""Fused linear + soft cross-entropy: the drafter's head against the teacher's distribution over D, chunk by chunk.

A teacher position serves up to K steps, so rows of all steps come together, ordered by teacher position: a chunk's
teacher probabilities are computed once, used by every row that needs them, and dropped. Gradients are made in the
forward pass, while the logits are there. Nothing of size [rows, D] outlives its chunk, and [T, V] never exists.
Softmax, loss and the logits' gradient are float32 (or float64 in tests) whatever the weights' dtype.
"""

import torch
from torch import Tensor

from eagle3nb.drafter.kernels import shared_memory

CHUNK = 512      # teacher positions at a time: 512 × |D| teacher values, up to K times as many student logits
PART = 1 << 17   # logits that the plain rows take at a time: half a megabyte, which stays in a core's own cache


def soft_cross_entropy(x: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, row: Tensor, label: Tensor,
                       scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i scale_i · (−Σ_D p log q_i), with p = softmax(teacher[row_i] · teacher_headᵀ), q_i = softmax(x_i · headᵀ).

    x [N, h] (after the last norm), head [D, h]; teacher [S, h] last hidden states, teacher_head [D, h] the target's
    rows of D; row int64 [N], any order; label int64 [N]: the teacher's argmax in D; scale [N]. Returns the loss (a
    scalar with gradients for x and head), each row's unscaled loss [N], and bool [N]: the label is the student's
    argmax (argmax itself is several times slower than a maximum on the CPU; an exact tie counts as right).
    """
    order = torch.argsort(row, stable=True)
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    loss, each, right = _SoftCrossEntropy.apply(x.index_select(0, order), head, teacher, teacher_head, row[order],
                                                label[order], scale[order], wants_grad)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return loss, each[back], right[back]


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, teacher, teacher_head, row, label, scale, wants_grad):
        kind = torch.promote_types(x.dtype, torch.float32)
        each, right = x.new_zeros(len(x), dtype=kind), torch.zeros_like(row, dtype=torch.bool)
        wants_x, wants_head = wants_grad and ctx.needs_input_grad[0], wants_grad and ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if wants_x else None
        d_head = torch.zeros_like(head, dtype=kind) if wants_head else None
        positions, inverse = torch.unique_consecutive(row, return_inverse=True)
        rows, chunk = row_part(x)
        firsts = list(range(0, len(positions), chunk))
        # rows are ordered by position, so those of a chunk are contiguous
        edges = torch.searchsorted(inverse, torch.tensor([*firsts, len(positions)], device=row.device)).tolist()
        # the same memory for every chunk: fresh pages would cost 5 % of a step at |D| = 32,000
        most = max((b - a for a, b in zip(edges[:-1], edges[1:], strict=True)), default=0)
        logits, targets = x.new_empty(most, len(head)), teacher_head.new_empty(min(chunk, len(positions)), len(head))
        for first, a, b in zip(firsts, edges[:-1], edges[1:], strict=True):
            here = positions[first:first + chunk]
            each[a:b], right[a:b], dz = rows(
                torch.mm(x[a:b], head.T, out=logits[:b - a]),
                torch.mm(teacher[here].to(teacher_head.dtype), teacher_head.T, out=targets[:len(here)]),
                inverse[a:b] - first, label[a:b], wants_grad)                                    # dz [n, D]: q − p
            weight = scale[a:b, None].to(x.dtype)
            if wants_x:
                dx[a:b] = (dz @ head).mul_(weight)
            if wants_head:
                add_product(d_head, dz.T, x[a:b] * weight)
        ctx.save_for_backward(dx, d_head)
        ctx.mark_non_differentiable(each, right)
        return (each * scale).sum(), each, right

    @staticmethod
    def backward(ctx, grad, *_):
        dx, d_head = ctx.saved_tensors
        return (None if dx is None else dx * grad, None if d_head is None else d_head * grad, *[None] * 6)


def row_part(x: Tensor):
    """(what lies between a chunk's products, teacher positions of a chunk): the Triton kernel where x is on a GPU.

    Both work in place, so a chunk holds its logits and its teacher rows and nothing else of their size.
    """
    if shared_memory.supports(x.device, 0, x.dtype):
        from eagle3nb.drafter.kernels import cross_entropy

        return cross_entropy.rows, CHUNK
    return plain_rows, CHUNK


def plain_rows(logits: Tensor, teacher: Tensor, row: Tensor, label: Tensor, wants_grad: bool
               ) -> tuple[Tensor, Tensor, Tensor | None]:
    """A chunk's logits [n, D] and teacher's [m, D] → (loss [n], hit [n], q − p [n, D] in the logits' dtype).

    row int64 [n]: which of the teacher's rows; label int64 [n]. Both arguments are overwritten: a few rows at a time
    go through all their passes while they lie in the cache, and q − p takes the logits' place.
    """
    kind = torch.promote_types(logits.dtype, torch.float32)
    each, right = logits.new_empty(len(logits), dtype=kind), torch.empty_like(label, dtype=torch.bool)
    size = max(1, PART // logits.shape[1])
    teacher = teacher.to(kind)
    for part in teacher.split(size):
        part.copy_(torch.softmax(part, -1))
    for a in range(0, len(logits), size):
        here = slice(a, a + size)
        z, p = logits[here].to(kind), teacher.index_select(0, row[here])                          # [size, D]
        top = z.amax(-1, keepdim=True)
        right[here] = (z.gather(1, label[here, None]) == top)[:, 0]
        mean = torch.linalg.vecdot(p, z.sub_(top))
        total = z.exp_().sum(-1, keepdim=True)
        each[here] = total.log()[:, 0] - mean                                                     # −Σ p log q
        if wants_grad:
            z.div_(total).sub_(p)
            if z.dtype != logits.dtype:
                logits[here] = z
    return each, right, logits if wants_grad else None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a·b, summed in total's float32 (float64) whatever their dtype; on a GPU nothing is converted for it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
