"""Quantizers that keep values as floats: float32 for payloads, float32 and bfloat16 for links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.quantizers.quantizer import (
    Floats,
    Lengths,
    QuantizedValues,
    Shape,
    finite,
    little_endian,
)
from protocol.types import DType, TensorHeader


class Float32Values:
    """Payload values as float32. `scaled` has no effect."""

    scaled = False

    def __init__(self, scaled: bool = False) -> None:
        pass

    def quantize(self, values_s: Floats, lengths_c: Lengths) -> QuantizedValues:
        return QuantizedValues(values_s)

    def parts(self, rows: Lengths) -> tuple[TensorHeader, ...]:
        return (TensorHeader("values", DType.F32, (int(rows.sum()),)),)

    def pack(self, values: QuantizedValues, rows: Lengths) -> list[NDArray[Any]]:
        return [values.codes_s.astype("<f4", copy=False)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Lengths) -> QuantizedValues:
        return QuantizedValues(finite(parts[0]))


class Float32:
    """Link values as float32."""

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        return (TensorHeader("", DType.F32, rows),)

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        return [little_endian(values.to(torch.float32))]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        return torch.from_numpy(parts[0].view("<f4").astype(np.float32)).view(rows)


class BFloat16:
    """Link values as bfloat16, rounded to nearest."""

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        return (TensorHeader("", DType.BF16, rows),)

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        # numpy has no bfloat16: its bits travel as int16.
        return [little_endian(values.to(torch.bfloat16).view(torch.int16))]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        # bfloat16 is the upper half of a float32.
        widened = parts[0].view("<u2").astype(np.uint32)
        widened <<= 16
        return torch.from_numpy(widened.view(np.float32)).view(rows)
