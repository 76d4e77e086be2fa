"""Payload values in 1 or 2 bits: a sign, one of the magnitudes of the tensor, optionally a scale per chunk.

Magnitudes, one (1 bit) or two (2 bits), are fitted to the values of the whole tensor. With the codebook
"chunk" each chunk has a scale of one byte too: the fit is to values divided by it, and receivers multiply by
it. A scale is a float of 4 exponent and 4 mantissa bits: (16 + m) / 32 x 2^(e - 15), and 0 for the lowest
byte.

A value at the receiver has the same bits on every machine: it is at most one product of two float32 numbers.

Shapes: s values of a tensor, c chunks, m magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.algorithm.quantizers.quantizer import Floats, Lengths, QuantizedValues, finite
from protocol.types import DType, TensorHeader

SCALES = np.ldexp(1.0 + (np.arange(256) & 15) / 16, (np.arange(256) >> 4) - 16).astype(np.float32)
"""The value of every byte of a scale, ascending."""
SCALES[0] = 0.0

_BETWEEN_SCALES = (SCALES[:-1].astype(np.float64) + SCALES[1:]) / 2
BLOCK = 1 << 16


class Magnitudes:
    """Signs and `count` magnitudes per tensor; a code takes as many bits as there are magnitudes.

    Args:
        count: 1 (the mean magnitude) or 2.
        scaled: whether every chunk has a scale.
    """

    def __init__(self, count: int, scaled: bool = False) -> None:
        self.count, self.scaled = count, scaled

    def quantize(self, values_s: Floats, lengths_c: Lengths) -> QuantizedValues:
        """Fit the scales and the magnitudes, then give each finite value the nearest magnitude.

        Raises:
            FloatingPointError: values divided by their scales are beyond float32.
        """
        absolute_s, scales_s = np.abs(values_s), None
        if not self.scaled:
            magnitudes = fit_magnitudes(absolute_s, self.count)
        else:
            scales_s = np.repeat(fit_scales(absolute_s, lengths_c), lengths_c)
            # In float64, as a quotient by a small scale may be beyond float32.
            absolute_s = absolute_s.astype(np.float64)
            # Values of a chunk with scale 0 are lost: they must not count in the fit.
            counts_s = scales_s > 0
            np.divide(absolute_s, SCALES[scales_s], out=absolute_s, where=counts_s)
            with np.errstate(over="ignore"):
                magnitudes = fit_magnitudes(absolute_s[counts_s], self.count)
            if not np.isfinite(magnitudes).all():
                raise FloatingPointError("values too large for a scale per chunk")
        codes_s = (values_s < 0).astype(np.uint8) * np.uint8(self.count)
        if self.count > 1:
            # The nearer of two magnitudes: the mean separates them.
            codes_s += absolute_s > magnitudes.astype(np.float64).mean()
        return QuantizedValues(codes_s, magnitudes, scales_s)

    def parts(self, rows: Lengths) -> tuple[TensorHeader, ...]:
        magnitudes = TensorHeader("magnitudes", DType.F32, (self.count,))
        scales = (TensorHeader("scales", DType.U8, (len(rows),)),) if self.scaled else ()
        codes = TensorHeader("codes", DType.U8, ((int(rows.sum()) * self.count + 7) // 8,))
        return (magnitudes, *scales, codes)

    def pack(self, values: QuantizedValues, rows: Lengths) -> list[NDArray[Any]]:
        assert values.magnitudes is not None
        arrays: list[NDArray[Any]] = [values.magnitudes.astype("<f4")]
        if values.scales_s is not None:
            # All values of a chunk have its scale: the first one tells it.
            firsts_c = np.cumsum(rows) - rows
            arrays.append(values.scales_s[firsts_c])
        return [*arrays, self._pack_codes(values.codes_s)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Lengths) -> QuantizedValues:
        magnitudes = finite(parts[0])
        # A negative or descending magnitude would give one content two valid forms.
        if np.signbit(magnitudes).any() or (np.diff(magnitudes) < 0).any():
            raise ValueError("the magnitudes are not ascending positive numbers")
        scales_s = np.repeat(parts[1], rows) if self.scaled else None
        return QuantizedValues(self._unpack_codes(parts[-1], int(rows.sum())), magnitudes, scales_s)

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


def value_table(magnitudes: NDArray[np.float32], scaled: bool) -> NDArray[np.float32]:
    """The value of each code: float32 [2 m]; with scales [256, 2 m], by scale and code."""
    signed = np.concatenate((magnitudes, -magnitudes))
    return np.multiply.outer(SCALES, signed) if scaled else signed


def fit_scales(absolute_s: Floats, lengths_c: Lengths) -> NDArray[np.uint8]:
    """The scales [c] nearest to the means of the chunks' \\|values\\|; the largest mean has the last byte.

    Args:
        absolute_s: \\|values\\|, chunk after chunk.
        lengths_c: values of each chunk, none of them 0.
    """
    starts_c = np.cumsum(lengths_c) - lengths_c
    mean_c = np.add.reduceat(absolute_s, starts_c, dtype=np.float64) / lengths_c
    largest = mean_c.max()
    if largest == 0:
        return np.zeros(len(lengths_c), np.uint8)
    wanted_c = mean_c / largest * float(SCALES[-1])
    scales_c: NDArray[np.uint8] = np.searchsorted(_BETWEEN_SCALES, wanted_c).astype(np.uint8)
    return scales_c


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
