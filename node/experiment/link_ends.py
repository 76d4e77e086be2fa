"""Ends of links that wrap the usual ones, so that an experiment can change one thing of them.

A wrapper passes on what it does not change, so wrappers can be combined. The usual ends are those of
protocol.algorithm.subspace. An in-process replica runs the backward pass of a microbatch directly after its
forward pass, so an end keeps only what belongs to the last training pass.

Shapes: b microbatch, L tokens, d width, k numbers of a token that cross the link, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from protocol.algorithm.subspace import ReceivingEnd, SendingEnd


class WrappedSendingEnd(SendingEnd):
    """Does what `usual` does."""

    def __init__(self, usual: SendingEnd) -> None:
        self.k, self.usual = usual.k, usual

    def compress_forward(self, x_bld: Tensor) -> Tensor:
        return self.usual.compress_forward(x_bld)

    def expand_backward(self, grad_blk: Tensor) -> Tensor:
        return self.usual.expand_backward(grad_blk)


class WrappedReceivingEnd(ReceivingEnd):
    """Does what `usual` does."""

    def __init__(self, usual: ReceivingEnd) -> None:
        self.k, self.usual = usual.k, usual

    def refresh(self, table_vd: Tensor) -> None:
        self.usual.refresh(table_vd)

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        return self.usual.expand_forward(x_blk, ids_bl)

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        return self.usual.compress_backward(grad_bld)
