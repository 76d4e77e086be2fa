"""Activations and gradients in 4 bits a value, scaled token by token.

The values x [k] of a token have nearly a Gaussian's distribution, since the basis of a link is a random
rotation. They are rounded to the 16 odd multiples of half a step around 0. The step is the one that loses
least of a Gaussian (the uniform quantizer of Max, 1960). It travels as one byte, a power of 2^(1/4); a token
costs ceil(k / 2) + 1 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.formats.step_codes import divisors, factors, step_codes
from protocol.math.quantizers.quantizer import Shape, little_endian
from protocol.types import DType, TensorHeader

STEP_OF_RMS = 0.3352
"""The step in units of the root mean square."""

_HALF = 8
"""Levels on either side of 0."""


class Int4:
    """Link values in 16 levels, two to a byte, the first in the low bits. The second array: step codes.

    A token that holds a value that is not finite, or that needs a step above 2^15.5, becomes NaN as a whole.
    A token whose step would be below 2^-48 becomes zeros.
    """

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        packed = (*rows[:-1], -(-rows[-1] // 2))
        return TensorHeader("", DType.U8, packed), TensorHeader("scale", DType.U8, rows[:-1])

    def pack(self, values: Tensor, rows: Shape, shift: int = 0) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        code_bl = _step_codes(x_blk)
        level_blk = (x_blk / divisors(code_bl).unsqueeze(-1)).floor_().add_(_HALF)
        # NaN has no integer value. The code of such a token says that, so its levels do not matter.
        level_blk = level_blk.nan_to_num_(_HALF).clamp_(0, 2 * _HALF - 1).to(torch.uint8)
        padded = torch.nn.functional.pad(level_blk, (0, level_blk.shape[-1] % 2))
        return [little_endian(padded[..., ::2] | padded[..., 1::2] << 4), little_endian(code_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape, shift: int = 0) -> Tensor:
        # Copies: torch warns of memory that it must not write to.
        packed = torch.from_numpy(parts[0].copy()).view(*rows[:-1], -1)
        code_bl = torch.from_numpy(parts[1].copy()).view(rows[:-1])
        level_blk = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., : rows[-1]]
        return (level_blk.to(torch.float32) - (_HALF - 0.5)).mul_(factors(code_bl).unsqueeze(-1))


def _step_codes(x_blk: Tensor) -> Tensor:
    return step_codes(x_blk.square().mean(dim=-1).sqrt() * STEP_OF_RMS, torch.round)
