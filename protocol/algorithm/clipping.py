"""What one payload may do to a round: its norm, against what is usual in its group.

A payload that is valid in every byte can still be of any size. Its norm is compared with the median of its
group: one that is too large is clipped by every replica alike (:func:`clipping_scales`), one far beyond that
is refused by whoever receives it (:func:`outliers`). Clipping decides what reaches the anchor, so each number
here has the same bits on every machine: float64, each operation rounded by itself, sums in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.algorithm.quantizers.magnitudes import value_table
from protocol.algorithm.topk import SparseTensor

CLIP_FACTOR = 8.0
"""A payload counts with at most so many times the median norm of its round (docs/decisions.md, measured)."""

REFUSE_FACTOR = 100.0
"""A payload of more than so many times the median norm is not taken at all."""

_LEAST_SCALE = 2.0**-64
"""Smaller scales count as 0: values times such a scale could become denormal, which some machines flush."""


def payload_norm(payload: Mapping[str, SparseTensor]) -> float:
    """L2 norm of all values of a decoded payload, as every receiver sees them. Finite for finite float32."""
    return math.sqrt(math.fsum(_sum_of_squares(sparse) for sparse in payload.values()))


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of the positive norms; 0 where there is none.

    The lower one, so that of two contributors the larger is measured by the smaller. A payload of zeros says
    nothing about what is usual: its owner has learned nothing that it could send.
    """
    positive = sorted(norm for norm in norms if norm > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def clipping_scales(norms: Sequence[float]) -> list[float]:
    """For the payloads of one manifest: the factor, at most 1, that brings each down to the bound."""
    bound = CLIP_FACTOR * median_norm(norms)
    scales = [bound / norm if norm > bound else 1.0 for norm in norms]
    return [scale if scale >= _LEAST_SCALE else 0.0 for scale in scales]


def outliers(norms: Sequence[float]) -> list[str]:
    """For the payloads of one group: why each is refused for its norm, or ""."""
    median = median_norm(norms)
    return [
        f"its norm of {norm:.3g} is more than {REFUSE_FACTOR:g} times {median:.3g}, the median of the group"
        if norm > REFUSE_FACTOR * median
        else ""
        for norm in norms
    ]


def _sum_of_squares(sparse: SparseTensor) -> float:
    """Squares of float32 values are exact in float64. Equal values are counted."""
    if sparse.magnitudes is None:
        return _sum(sparse.codes_s.numpy().astype(np.float64) ** 2)
    count, codes_s = len(sparse.magnitudes), sparse.codes_s.numpy()
    keys_s = codes_s % count
    if sparse.scales_s is not None:
        keys_s = sparse.scales_s.numpy().astype(np.int16) * count + keys_s
    values = value_table(sparse.magnitudes.numpy(), sparse.scales_s is not None)[..., :count].ravel()
    return _sum(np.bincount(keys_s, minlength=len(values)) * values.astype(np.float64) ** 2)


def _sum(values: NDArray[np.float64]) -> float:
    """The sum by repeated halving. numpy's own sum may use another order on another processor."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        rest = values[half:]
        values = values[:half].copy()
        values[: len(rest)] += rest
    return float(values[0]) if len(values) else 0.0
