"""Activations and gradients in 4 bits a value, scaled token by token (quantizers.gaussian).

A token costs ceil(k / 2) + 1 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.quantizers import gaussian
from protocol.algorithm.quantizers.quantizer import Shape, little_endian
from protocol.types import DType, TensorHeader

STEP_OF_RMS = 0.3352
"""The step in units of the root mean square."""

_HALF = 8
"""Levels on either side of 0."""


class Int4:
    """Link values in 16 levels, two to a byte, the first in the low bits. The second array: step codes.

    A token that holds a value that is not finite becomes NaN as a whole. A token whose step would be below
    2^-48 becomes zeros.
    """

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        packed = (*rows[:-1], -(-rows[-1] // 2))
        return TensorHeader("", DType.U8, packed), TensorHeader("scale", DType.U8, rows[:-1])

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        code_bl = gaussian.step_codes(x_blk, STEP_OF_RMS)
        level_blk = gaussian.levels(x_blk, code_bl, _HALF)
        padded = torch.nn.functional.pad(level_blk, (0, level_blk.shape[-1] % 2))
        return [little_endian(padded[..., ::2] | padded[..., 1::2] << 4), little_endian(code_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        # Copies: torch warns of memory that it must not write to.
        packed = torch.from_numpy(parts[0].copy()).view(*rows[:-1], -1)
        code_bl = torch.from_numpy(parts[1].copy()).view(rows[:-1])
        level_blk = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., : rows[-1]]
        return gaussian.values(level_blk, code_bl, _HALF)
