"""The quantizer that keeps the values of links as floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.quantizers.quantizer import Shape, little_endian
from protocol.types import DType, TensorHeader


class BFloat16:
    """Link values as bfloat16, rounded to nearest."""

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        return (TensorHeader("", DType.BF16, rows),)

    def pack(self, values: Tensor, rows: Shape, shift: int = 0) -> list[NDArray[Any]]:
        # numpy has no bfloat16: its bits travel as int16.
        return [little_endian(values.to(torch.bfloat16).view(torch.int16))]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape, shift: int = 0) -> Tensor:
        # bfloat16 is the upper half of a float32.
        widened = parts[0].view("<u2").astype(np.uint32)
        widened <<= 16
        return torch.from_numpy(widened.view(np.float32)).view(rows)
