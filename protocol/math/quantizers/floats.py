"""Quantizers that keep values as floats: float32 for payloads, bfloat16 for links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.quantizers.quantizer import (
    Floats,
    QuantizedValues,
    Shape,
    finite,
    little_endian,
)
from protocol.types import DType, TensorHeader


class Float32Values:
    """Payload values as float32."""

    def quantize(self, values_s: Floats) -> QuantizedValues:
        return QuantizedValues(values_s)

    def parts(self, rows: int) -> tuple[TensorHeader, ...]:
        return (TensorHeader("values", DType.F32, (rows,)),)

    def pack(self, values: QuantizedValues, rows: int) -> list[NDArray[Any]]:
        return [values.codes_s.astype("<f4", copy=False)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: int) -> QuantizedValues:
        return QuantizedValues(finite(parts[0]))


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
