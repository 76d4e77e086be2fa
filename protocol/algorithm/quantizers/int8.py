"""Activations and gradients in 8 bits a value, scaled token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.quantizers.quantizer import Shape, little_endian
from protocol.types import DType, TensorHeader

_PEAK = 127.0


class Int8:
    """Link values in steps of 1/127 of the largest absolute value of their token.

    That step, float32 [b, L], is the second array. A token with a value that is not finite has a step that is
    not finite, so it stays not finite.
    """

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        return TensorHeader("", DType.I8, rows), TensorHeader("scale", DType.F32, rows[:-1])

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        step_bl = x_blk.abs().amax(dim=-1) / _PEAK
        # A token of zeros has step 0; any divisor keeps its zeros.
        divisor_bl = torch.where(step_bl > 0, step_bl, 1.0)
        steps_blk = (x_blk / divisor_bl.unsqueeze(-1)).round().clamp_(-_PEAK, _PEAK).to(torch.int8)
        return [little_endian(steps_blk), little_endian(step_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        steps_blk = torch.from_numpy(parts[0].view("i1").astype(np.float32)).view(rows)
        step_bl = torch.from_numpy(parts[1].view("<f4").astype(np.float32))
        # torch multiplies rows by their steps three times as fast as numpy.
        return steps_blk.mul_(step_bl.view(*rows[:-1], 1))
