"""Trained ends of a link: an encoder E [d, k] and a decoder D [k, d] in place of U and U^T.

The sending end sends (X - T_perp[ids]) E, and the receiving end reconstructs X~ D + T_perp[ids]. T_perp stays
what it is with U, and the sending end needs it, too: T_perp U is zero, T_perp E is not.

Shapes: b microbatch, L tokens, d width, k numbers of a token that cross the link.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from node.experiment.link_ends import WrappedReceivingEnd, WrappedSendingEnd
from node.model.stage import backward_from
from protocol.algorithm.subspace import ReceivingEnd, SendingEnd


class TrainedEnds(nn.Module):
    """E and D of one link, which begin as U and U^T.

    Args:
        basis_dk: U.
    """

    def __init__(self, basis_dk: Tensor) -> None:
        super().__init__()
        self.encoder = nn.Parameter(basis_dk.clone())
        self.decoder = nn.Parameter(basis_dk.T.clone().contiguous())


class _Pass:
    """Input and output of a training pass, until its backward pass."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``function(x)``, detached."""
        is_training = torch.is_grad_enabled()
        leaf = x.detach().requires_grad_(is_training)
        output = function(leaf)
        if is_training:
            self._held = leaf, output
        return output.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, from that of the output. Those of parameters are added to them."""
        assert self._held is not None, "a backward pass without a forward pass"
        leaf, output = self._held
        self._held = None
        backward_from(output, gradient.to(output))
        assert leaf.grad is not None
        return leaf.grad


class EncoderEnd(WrappedSendingEnd):
    """Sends by E. `perpendicular` gives T_perp[ids], [b, L, d], of the present microbatch."""

    def __init__(self, usual: SendingEnd, ends: TrainedEnds, perpendicular: Callable[[], Tensor]) -> None:
        super().__init__(usual)
        self._ends, self._perpendicular, self._pass = ends, perpendicular, _Pass()

    def compress_forward(self, x_bld: Tensor) -> Tensor:
        encoder_dk = self._ends.encoder
        known_bld = self._perpendicular()
        return self._pass.forward(x_bld.to(encoder_dk), lambda x: (x - known_bld) @ encoder_dk)

    def expand_backward(self, grad_blk: Tensor) -> Tensor:
        return self._pass.backward(grad_blk)


class DecoderEnd(WrappedReceivingEnd):
    """Reconstructs by D; `usual` has T_perp."""

    def __init__(self, usual: ReceivingEnd, ends: TrainedEnds) -> None:
        super().__init__(usual)
        self._ends, self._pass = ends, _Pass()

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        decoder_kd, known_bld = self._ends.decoder, self.usual.perpendicular_vd[ids_bl]
        return self._pass.forward(x_blk.to(decoder_kd), lambda x: x @ decoder_kd + known_bld)

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        return self._pass.backward(grad_bld)
