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

from protocol.math.loss_chunk import chunk_rows


def chunked_loss(x_bld: Tensor, head_vd: Tensor, targets_bl: Tensor, rows: int | None = None) -> Tensor:
    """Mean cross-entropy in nats per token of the logits ``x_bld @ head_vd.T``, as a float32 scalar.

    Under autocast the matrix products have its type; the loss is float32 in any case, of float64 inputs
    float64. Gradients flow to `x_bld` and `head_vd`, once: there is no second derivative.

    `targets_bl` are int64 ids. `rows` are the tokens of a chunk, by default those of
    protocol.math.loss_chunk.chunk_rows.
    """
    x_nd, targets_n = x_bld.flatten(0, 1), targets_bl.flatten()
    if rows is None:
        rows = chunk_rows(head_vd.shape[0], head_vd.shape[1], on_cpu=x_bld.device.type == "cpu")
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedLoss.apply(x_nd, head_vd, targets_n, rows)  # type: ignore[no-untyped-call]
        return loss
    x_nd, head_vd = _matrix_type(x_nd), _matrix_type(head_vd)
    chunks = _chunks(len(x_nd), rows)
    losses = [_summed_loss(_log_probabilities(x_nd[each], head_vd), targets_n[each]) for each in chunks]
    return torch.stack(losses).sum() / len(x_nd)


class _ChunkedLoss(torch.autograd.Function):
    """The loss and both gradients, up to the factor that the backward pass is given."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, head_vd: Tensor, targets_n: Tensor, rows: int) -> Tensor:
        x, head = _matrix_type(x_nd), _matrix_type(head_vd)
        losses: list[Tensor] = []
        grad_x, grad_head = torch.empty_like(x), torch.empty_like(head_vd)
        with torch.autocast(x.device.type, enabled=False):
            for each in _chunks(len(x), rows):
                gradients = grad_x[each], grad_head
                losses.append(
                    _loss_and_gradients(x[each], head, targets_n[each], *gradients, is_first=not losses)
                )
        ctx.gradients = grad_x.to(x_nd.dtype), grad_head
        return torch.stack(losses).sum() / len(x_nd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_head = ctx.gradients
        ctx.gradients = None  # a second backward pass would multiply again
        factor = gradient / len(grad_x)
        return grad_x.mul_(factor), grad_head.mul_(factor), None, None


def _loss_and_gradients(
    x_cd: Tensor, head_vd: Tensor, ids_c: Tensor, grad_x_cd: Tensor, grad_head_vd: Tensor, is_first: bool
) -> Tensor:
    """The summed loss of one chunk. Writes one gradient to `grad_x_cd`, and adds one to `grad_head_vd`.

    All that has V values for each token is freed at the return, before the next chunk needs as much.
    """
    errors_cv = _log_probabilities(x_cd, head_vd)
    loss = _summed_loss(errors_cv, ids_c)
    # The derivative of the cross-entropy by the logits: probabilities less one at the target.
    errors_cv.exp_()
    errors_cv.scatter_add_(1, ids_c[:, None], errors_cv.new_full((1, 1), -1.0).expand(len(ids_c), 1))
    errors_cv = errors_cv.to(x_cd.dtype)
    torch.mm(errors_cv, head_vd, out=grad_x_cd)
    _add_product(grad_head_vd, errors_cv.t(), x_cd, is_first)
    return loss


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, tokens, rows))


def _log_probabilities(x_cd: Tensor, head_vd: Tensor) -> Tensor:
    """Of each token of a chunk: [c, V], float32 or wider."""
    logits_cv = x_cd @ head_vd.t()
    wide = torch.promote_types(logits_cv.dtype, torch.float32)
    return torch.log_softmax(logits_cv, dim=1, dtype=wide)


def _summed_loss(logs_cv: Tensor, ids_c: Tensor) -> Tensor:
    return -logs_cv.gather(1, ids_c[:, None]).sum()


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
