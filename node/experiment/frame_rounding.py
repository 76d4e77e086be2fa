"""What a link end does to the numbers of a training frame before their quantizer rounds them.

Validation passes are rounded to the nearest value, without noise and feedback.

Shapes: b microbatch, L tokens, d width, k numbers of a token that cross the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from node.experiment.link_ends import WrappedReceivingEnd, WrappedSendingEnd
from node.experiment.microbatch_counter import MicrobatchCounter
from protocol.algorithm.quantizers import int4
from protocol.algorithm.subspace import ReceivingEnd, SendingEnd
from protocol.wire.activation_codec import pack_activation, unpack_activation


@dataclass(frozen=True)
class RoundingNoise:
    """Stochastic rounding of int4: noise as wide as a step, after which rounding to the nearest is unbiased
    between the outermost levels.

    The quantizer chooses the step of a token after the noise: of a token of 62 values one in twelve gets the
    next step, of 6 values one in five. Either rounding cuts off values beyond the outermost levels, so a bias
    remains there. Equal seeds, rounds, steps and microbatches give equal noise.

    Args:
        seeds: of the run and of the place where it is added; none is negative.
    """

    seeds: Sequence[int]

    def added(self, values_blk: Tensor, frame: Sequence[int]) -> Tensor:
        """Values [b, L, k] and their noise, float32. `frame`: round, step, microbatch."""
        source = np.random.SeedSequence([*self.seeds, *frame])
        drawn = np.random.Generator(np.random.Philox(source)).random(values_blk.shape, dtype=np.float32)
        values_blk = values_blk.float()
        return values_blk + (torch.from_numpy(drawn).to(values_blk) - 0.5) * int4.steps_of(
            values_blk
        ).unsqueeze(-1)


class NoisyReceivingEnd(WrappedReceivingEnd):
    """Adds noise to the gradients that it sends."""

    def __init__(self, usual: ReceivingEnd, counter: MicrobatchCounter, noise: RoundingNoise) -> None:
        super().__init__(usual)
        self._counter, self._noise = counter, noise

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        self._counter.advance()
        return self._noise.added(super().compress_backward(grad_bld), self._counter.frame)


class PreparedSendingEnd(WrappedSendingEnd):
    """Adds to the activations that it sends what rounding lost of the former microbatch, or noise, or both.

    Error feedback: what the rounding of a frame lost at a token position is added to the next microbatch of
    the same step, at the same position. It concerns the k numbers alone. What the projection loses lies
    outside U, and the same U would lose it again, so it is not kept.

    Args:
        noise: None for rounding to the nearest.
        feedback: the name of the quantizer whose error is fed back; None for no feedback.
    """

    def __init__(
        self,
        usual: SendingEnd,
        counter: MicrobatchCounter,
        noise: RoundingNoise | None,
        feedback: str | None,
    ) -> None:
        super().__init__(usual)
        self._counter, self._noise, self._feedback = counter, noise, feedback
        self._lost_blk: Tensor | None = None

    def compress_forward(self, x_bld: Tensor) -> Tensor:
        wanted_blk = super().compress_forward(x_bld)
        if not torch.is_grad_enabled():  # a validation pass
            return wanted_blk
        self._counter.advance()
        if self._counter.microbatch > 0 and self._lost_blk is not None:
            wanted_blk = wanted_blk + self._lost_blk
        sent_blk = wanted_blk if self._noise is None else self._noise.added(wanted_blk, self._counter.frame)
        if self._feedback is not None:
            self._lost_blk = wanted_blk - _received(sent_blk, self._feedback)
        return sent_blk


def _received(sent_blk: Tensor, dtype: str) -> Tensor:
    """What the neighbour gets."""
    packed = pack_activation("activation", sent_blk, dtype)
    return unpack_activation(*packed, "activation", tuple(sent_blk.shape), dtype).to(sent_blk)
