"""The values that are sent in few bits each: a sign, one of the magnitudes of the tensor, a scale per chunk.

Magnitudes, one ("1bit") or two ("2bit"), are fitted to the values of the whole tensor. With the codebook
"chunk" each chunk has a scale of one byte too: the fit is to values divided by it, receivers multiply by it.
A scale is a float of 4 exponent and 4 mantissa bits: (16 + m) / 32 x 2^(e - 15), and 0 for the lowest byte.

What a receiver computes has the same bits on every machine: at most one product of two float32 numbers.

Shapes: s values of a tensor, c chunks, m magnitudes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

MAGNITUDES = {"2bit": 2, "1bit": 1}
"""m, by quantizer. A code takes as many bits."""

SCALES = np.ldexp(1.0 + (np.arange(256) & 15) / 16, (np.arange(256) >> 4) - 16).astype(np.float32)
"""What the bytes of scales stand for, ascending."""
SCALES[0] = 0.0

_BETWEEN_SCALES = (SCALES[:-1].astype(np.float64) + SCALES[1:]) / 2
_BLOCK = 1 << 16


class Quantized(NamedTuple):
    """Values in few bits.

    Attributes:
        codes_s: uint8: the number of the magnitude, plus m where the value is negative.
        magnitudes: float32 [m], ascending.
        scales_s: uint8: the scale of each value's chunk, or None where there are no scales.
    """

    codes_s: NDArray[np.uint8]
    magnitudes: NDArray[np.float32]
    scales_s: NDArray[np.uint8] | None


def quantize(values_s: Floats, count: int, lengths_c: NDArray[np.int64] | None) -> Quantized:
    """The nearest of `count` magnitudes for each value (finite), after the fit of these, and of the scales.

    Raises FloatingPointError where values divided by their scales are beyond float32.

    Args:
        lengths_c: values of each chunk, in their order, where chunks have scales.
    """
    absolute_s, scales_s = np.abs(values_s), None
    if lengths_c is None:
        magnitudes = fit_magnitudes(absolute_s, count)
    else:
        scales_s = np.repeat(fit_scales(absolute_s, lengths_c), lengths_c)
        absolute_s = absolute_s.astype(np.float64)
        counts_s = scales_s > 0
        np.divide(absolute_s, SCALES[scales_s], out=absolute_s, where=counts_s)
        with np.errstate(over="ignore"):
            magnitudes = fit_magnitudes(absolute_s[counts_s], count)
        if not np.isfinite(magnitudes).all():
            raise FloatingPointError("values too large for a scale per chunk")
    codes_s = (values_s < 0).astype(np.uint8) * np.uint8(count)
    if count > 1:
        codes_s += absolute_s > magnitudes.astype(np.float64).mean()
    return Quantized(codes_s, magnitudes, scales_s)


def value_table(magnitudes: NDArray[np.float32], scaled: bool) -> NDArray[np.float32]:
    """What each code means: float32 [2 m]; where there are scales [256, 2 m], by byte and code."""
    signed = np.concatenate((magnitudes, -magnitudes))
    return np.multiply.outer(SCALES, signed) if scaled else signed


def fit_scales(absolute_s: Floats, lengths_c: NDArray[np.int64]) -> NDArray[np.uint8]:
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
    scales_c: NDArray[np.uint8] = np.searchsorted(
        _BETWEEN_SCALES, mean_c / largest * float(SCALES[-1])
    ).astype(np.uint8)
    return scales_c


def fit_magnitudes(absolute_s: Floats, count: int) -> NDArray[np.float32]:
    """The magnitudes, one or two, ascending, nearest to \\|values\\| in the sum of squares; 0 for no values.

    On a line the best two clusters are a cut of the sorted values, so the optimum, where Lloyd's iteration
    might stop short of it, follows from prefix sums: maximize S_low^2 / n_low + S_high^2 / n_high.
    """
    n = len(absolute_s)
    if n == 0:
        return np.zeros(count, np.float32)
    total = float(absolute_s.sum(dtype=np.float64))
    if count == 1 or n == 1:
        return np.full(count, total / n, np.float32)
    sorted_s = np.sort(absolute_s)
    best, low, high, below = -1.0, 0.0, 0.0, 0.0
    for start in range(0, n - 1, _BLOCK):
        block = sorted_s[start : min(start + _BLOCK, n - 1)]
        s_low = below + np.cumsum(block, dtype=np.float64)
        n_low = np.arange(start + 1, start + len(block) + 1)
        s_high, n_high = total - s_low, n - n_low
        explained = s_low * s_low / n_low + s_high * s_high / n_high
        cut = int(explained.argmax())
        if explained[cut] > best:
            best, low, high = explained[cut], s_low[cut] / n_low[cut], s_high[cut] / n_high[cut]
        below = float(s_low[-1])
    return np.array((low, max(low, high)), np.float32)
