"""Activations and gradients in 3 bits a value, scaled token by token (quantizers.gaussian).

A token costs ceil(3 k / 8) + 1 bytes.
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

STEP_OF_RMS = 0.5860
"""The step in units of the root mean square."""

_HALF = 4
"""Levels on either side of 0."""
_SHIFTS = np.arange(0, 24, 3, dtype=np.uint32)
"""Eight values share three bytes."""


class Int3:
    """Link values in 8 levels, the bits of a token one after the other, the first in the lowest bits.

    The second array has the step codes. What is not finite, or too small, becomes what it becomes in Int4.
    """

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        packed = (*rows[:-1], _bytes_of(rows[-1]))
        return TensorHeader("", DType.U8, packed), TensorHeader("scale", DType.U8, rows[:-1])

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        code_bl = gaussian.step_codes(x_blk, STEP_OF_RMS)
        level_blk = little_endian(gaussian.levels(x_blk, code_bl, _HALF))
        eights = _padded(level_blk, 8).reshape(*rows[:-1], -1, 8).astype("<u4")
        words = np.bitwise_or.reduce(eights << _SHIFTS, axis=-1, keepdims=True)
        packed = words.view(np.uint8)[..., :3].reshape(*rows[:-1], -1)
        return [np.ascontiguousarray(packed[..., : _bytes_of(rows[-1])]), little_endian(code_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        threes = _padded(parts[0].reshape(*rows[:-1], -1), 3).reshape(*rows[:-1], -1, 3)
        words = _padded(threes, 4).view("<u4")
        level_blk = ((words >> _SHIFTS) & 7).astype(np.uint8).reshape(*rows[:-1], -1)[..., : rows[-1]]
        code_bl = torch.from_numpy(parts[1].copy()).view(rows[:-1])
        return gaussian.values(torch.from_numpy(np.ascontiguousarray(level_blk)), code_bl, _HALF)


def _bytes_of(width: int) -> int:
    return -(-3 * width // 8)


def _padded(array: NDArray[Any], multiple: int) -> NDArray[Any]:
    """`array` with zeros behind its last axis, whose length becomes a multiple."""
    padding = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % multiple)]
    return np.pad(array, padding)
