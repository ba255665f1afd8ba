"""Fused linear + soft cross-entropy: the drafter's head against the teacher's distribution over D, chunk by chunk.

A teacher position serves up to K steps, so rows of all steps come together, ordered by teacher position: a chunk's
teacher probabilities are computed once, used by every row that needs them, and dropped. Gradients are made in the
forward pass, while the logits are there. Nothing of size [rows, D] outlives its chunk, and [T, V] never exists.
Softmax, loss and the logits' gradient are float32 (or float64 in tests) whatever the weights' dtype.
"""

import torch
from torch import Tensor

CHUNK = 256  # teacher positions at a time: 256 × |D| teacher values, up to K times as many student logits


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
        for first in range(0, len(positions), CHUNK):
            here = positions[first:first + CHUNK]
            # rows are ordered by position, so those of a chunk are contiguous
            a, b = torch.searchsorted(inverse, torch.tensor([first, first + len(here)], device=row.device)).tolist()
            p = torch.softmax((teacher[here].to(teacher_head.dtype) @ teacher_head.T).to(kind), -1)
            p = p.index_select(0, inverse[a:b] - first)                                          # [n, D]
            log_q = torch.log_softmax((x[a:b] @ head.T).to(kind), -1)                            # [n, D]
            each[a:b] = -torch.linalg.vecdot(p, log_q)
            right[a:b] = log_q.gather(1, label[a:b, None])[:, 0] == log_q.amax(-1)
            if wants_grad:
                dz = log_q.exp_().sub_(p).to(x.dtype)                                            # q − p, not yet scaled
                weight = scale[a:b, None]
                if wants_x:
                    dx[a:b] = (dz @ head).mul_(weight)
                if wants_head:
                    d_head.addmm_(dz.T.to(kind), (x[a:b] * weight).to(kind))
        ctx.save_for_backward(dx, d_head)
        ctx.mark_non_differentiable(each, right)
        return (each * scale).sum(), each, right

    @staticmethod
    def backward(ctx, grad, *_):
        dx, d_head = ctx.saved_tensors
        return (None if dx is None else dx * grad, None if d_head is None else d_head * grad, *[None] * 6)
