"""Cross-entropy of the head's logits, computed in chunks of tokens: the whole logits [n, V] never exist.

Shapes: b microbatch, L tokens, n = b L, c tokens of one chunk, d width, V vocabulary.

A chunk's gradients are computed together with its loss, while its logits are there. So the backward pass
computes nothing again: three matrix products in all, as without chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protocol.algorithm.loss_chunk import chunk_rows


def chunked_loss(x_bld: Tensor, head_vd: Tensor, targets_bl: Tensor, rows: int | None = None) -> Tensor:
    """Mean cross-entropy in nats per token of the logits ``x_bld @ head_vd.T``, as a float32 scalar.

    Under autocast the matrix products have its type; the loss is float32 in any case, of float64 inputs
    float64. Gradients flow to `x_bld` and `head_vd`, once: there is no second derivative.

    `targets_bl` are int64 ids. `rows` are the tokens of a chunk, by default those of
    protocol.algorithm.loss_chunk.chunk_rows.
    """
    x_nd, targets_n = x_bld.flatten(0, 1), targets_bl.flatten()
    if rows is None:
        rows = chunk_rows(head_vd.shape[0], head_vd.shape[1], on_cpu=x_bld.device.type == "cpu")
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedLoss.apply(x_nd, head_vd, targets_n, rows)  # type: ignore[no-untyped-call]
        return loss
    x_nd, head_vd = _matrix_type(x_nd), _matrix_type(head_vd)
    chunks = _log_probabilities(x_nd, head_vd, targets_n, rows)
    return torch.stack([-_chosen(logs_cv, ids_c).sum() for _, logs_cv, ids_c in chunks]).sum() / len(x_nd)


class _ChunkedLoss(torch.autograd.Function):
    """The loss and both gradients, up to the factor that the backward pass is given."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, head_vd: Tensor, targets_n: Tensor, rows: int) -> Tensor:
        x, head = _matrix_type(x_nd), _matrix_type(head_vd)
        losses: list[Tensor] = []
        grad_x, grad_head = torch.empty_like(x), torch.empty_like(head_vd)
        with torch.autocast(x.device.type, enabled=False):
            for chunk, logs_cv, ids_c in _log_probabilities(x, head, targets_n, rows):
                losses.append(-_chosen(logs_cv, ids_c).sum())
                # The derivative of the cross-entropy by the logits: probabilities less one at the target.
                errors_cv = logs_cv.exp_()
                errors_cv.scatter_add_(
                    1, ids_c[:, None], errors_cv.new_full((1, 1), -1.0).expand(len(ids_c), 1)
                )
                errors_cv = errors_cv.to(x.dtype)
                torch.mm(errors_cv, head, out=grad_x[chunk])
                _add_product(grad_head, errors_cv.t(), x[chunk], is_first=len(losses) == 1)
        ctx.gradients = grad_x.to(x_nd.dtype), grad_head
        return torch.stack(losses).sum() / len(x_nd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_head = ctx.gradients
        ctx.gradients = None  # a second backward pass would multiply again
        factor = gradient / len(grad_x)
        return grad_x.mul_(factor), grad_head.mul_(factor), None, None


def _log_probabilities(
    x_nd: Tensor, head_vd: Tensor, targets_n: Tensor, rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk its tokens, their log-probabilities [c, V], float32 or wider, and their targets [c]."""
    for start in range(0, len(x_nd), rows):
        chunk = slice(start, start + rows)
        logits_cv = x_nd[chunk] @ head_vd.t()
        wide = torch.promote_types(logits_cv.dtype, torch.float32)
        yield chunk, torch.log_softmax(logits_cv, dim=1, dtype=wide), targets_n[chunk]


def _chosen(logs_cv: Tensor, ids_c: Tensor) -> Tensor:
    return logs_cv.gather(1, ids_c[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """total += left @ right, or total = left @ right. `total` may have a wider type than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0.0 if is_first else 1.0)
    elif is_first:
        total.copy_(left @ right)
    else:
        total += left @ right


def _matrix_type(tensor: Tensor) -> Tensor:
    """`tensor` in the type of matrix products here: that of autocast where it is on."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
