"""Payload values in 1 or 2 bits: a sign, and one of the magnitudes of the tensor. Or all their 32 bits.

Magnitudes, one (1 bit) or two (2 bits), are fitted to the values of the whole tensor.

Shapes: s values of a tensor, m magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.math.quantizers.quantizer import Floats, QuantizedValues, finite
from protocol.types import DType, TensorHeader

BLOCK = 1 << 16


class Magnitudes:
    """Signs and `count` magnitudes per tensor; a code takes as many bits as there are magnitudes.

    Args:
        count: 1 (the mean magnitude) or 2.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def quantize(self, values_s: Floats) -> QuantizedValues:
        """Fit the magnitudes, then give each finite value the nearest one."""
        absolute_s = np.abs(values_s)
        magnitudes = fit_magnitudes(absolute_s, self.count)
        codes_s = (values_s < 0).astype(np.uint8) * np.uint8(self.count)
        if self.count > 1:
            # The nearer of two magnitudes: the mean separates them.
            codes_s += absolute_s > magnitudes.astype(np.float64).mean()
        return QuantizedValues(codes_s, magnitudes)

    def parts(self, rows: int) -> tuple[TensorHeader, ...]:
        magnitudes = TensorHeader("magnitudes", DType.F32, (self.count,))
        return (magnitudes, TensorHeader("codes", DType.U8, ((rows * self.count + 7) // 8,)))

    def pack(self, values: QuantizedValues, rows: int) -> list[NDArray[Any]]:
        assert values.magnitudes is not None
        return [values.magnitudes.astype("<f4"), self._pack_codes(values.codes_s)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: int) -> QuantizedValues:
        magnitudes = finite(parts[0])
        # A negative or descending magnitude would give one content two valid forms.
        if np.signbit(magnitudes).any() or (np.diff(magnitudes) < 0).any():
            raise ValueError("the magnitudes are not ascending positive numbers")
        return QuantizedValues(self._unpack_codes(parts[1], rows), magnitudes)

    def _pack_codes(self, codes_s: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Codes one after the other, the first in the lowest bits of the first byte."""
        shifts = np.arange(0, 8, self.count, dtype=np.uint8)
        padded = np.zeros(-(-len(codes_s) // len(shifts)) * len(shifts), np.uint8)
        padded[: len(codes_s)] = codes_s
        packed: NDArray[np.uint8] = np.bitwise_or.reduce(padded.reshape(-1, len(shifts)) << shifts, axis=1)
        return packed

    def _unpack_codes(self, raw: NDArray[np.uint8], sent: int) -> NDArray[np.uint8]:
        shifts = np.arange(0, 8, self.count, dtype=np.uint8)
        codes: NDArray[np.uint8] = (raw[:, None] >> shifts & np.uint8((1 << self.count) - 1)).ravel()
        if codes[sent:].any():
            raise ValueError("unused bits of the codes are set")
        return codes[:sent]


OneBit = partial(Magnitudes, 1)
TwoBits = partial(Magnitudes, 2)


def fit_magnitudes(absolute_s: Floats, count: int) -> NDArray[np.float32]:
    """The magnitudes, one or two, ascending, nearest to \\|values\\| in the sum of squares; 0 for no values.

    The best two clusters are a cut of the sorted values: it maximizes S_low^2 / n_low + S_high^2 / n_high.
    """
    n = len(absolute_s)
    if n == 0:
        return np.zeros(count, np.float32)
    total = float(absolute_s.sum(dtype=np.float64))
    if count == 1 or n == 1:
        return np.full(count, total / n, np.float32)
    sorted_s = np.sort(absolute_s)
    best, low, high, below = -1.0, 0.0, 0.0, 0.0
    for start in range(0, n - 1, BLOCK):
        block = sorted_s[start : min(start + BLOCK, n - 1)]
        s_low = below + np.cumsum(block, dtype=np.float64)
        n_low = np.arange(start + 1, start + len(block) + 1)
        s_high, n_high = total - s_low, n - n_low
        explained = s_low * s_low / n_low + s_high * s_high / n_high
        cut = int(explained.argmax())
        if explained[cut] > best:
            best, low, high = explained[cut], s_low[cut] / n_low[cut], s_high[cut] / n_high[cut]
        below = float(s_low[-1])
    # Rounding may place the mean of the upper cluster below that of the lower one.
    return np.array((low, max(low, high)), np.float32)


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
