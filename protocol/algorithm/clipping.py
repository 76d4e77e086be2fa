"""Bounds on the norm of a payload, relative to the median norm of its group.

A payload of valid bytes can still have values of any size. Every replica clips a payload whose norm is too
large (:func:`clipping_scales`), and every receiver refuses one whose norm is far too large
(:func:`outliers`). Clipping changes the anchor, so each number here must have the same bits on every machine:
float64, each operation rounded by itself, sums in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.algorithm.quantizers.magnitudes import value_table
from protocol.algorithm.topk import SparseTensor

CLIP_FACTOR = 8.0
"""A payload is clipped to this many times the median norm of its round (measured: docs/decisions.md)."""

REFUSE_FACTOR = 100.0
"""A payload of more than this many times the median norm is refused."""

_LEAST_SCALE = 2.0**-64
"""Smaller scales count as 0: values times such a scale could become denormal, which some machines flush."""


def payload_norm(payload: Mapping[str, SparseTensor]) -> float:
    """L2 norm of all values of a decoded payload, with the same bits at every receiver; always finite."""
    return math.sqrt(math.fsum(_sum_of_squares(sparse) for sparse in payload.values()))


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of the positive norms; 0 if there is none.

    With two contributors the lower median is the smaller norm, so the larger one is bounded. Payloads of
    zeros do not count: they tell nothing about the usual norm.
    """
    positive = sorted(norm for norm in norms if norm > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def clipping_scales(norms: Sequence[float]) -> list[float]:
    """For the payloads of one manifest: the factor, at most 1, that brings each down to the bound."""
    bound = CLIP_FACTOR * median_norm(norms)
    scales = [bound / norm if norm > bound else 1.0 for norm in norms]
    # Without a positive norm the bound is 0, and every scale is 1.
    return [scale if scale >= _LEAST_SCALE else 0.0 for scale in scales]


def outliers(norms: Sequence[float]) -> list[str]:
    """For the payloads of one group: the reason for which each is refused, or ""."""
    median = median_norm(norms)
    return [
        f"its norm of {norm:.3g} is more than {REFUSE_FACTOR:g} times {median:.3g}, the median of the group"
        if norm > REFUSE_FACTOR * median
        else ""
        for norm in norms
    ]


def _sum_of_squares(sparse: SparseTensor) -> float:
    """The sum of squares, each exact in float64. Equal values are counted, then multiplied."""
    if sparse.magnitudes is None:
        return _sum(sparse.codes_s.numpy().astype(np.float64) ** 2)
    count, codes_s = len(sparse.magnitudes), sparse.codes_s.numpy()
    keys_s = codes_s % count
    if sparse.scales_s is not None:
        keys_s = sparse.scales_s.numpy().astype(np.int16) * count + keys_s
    values = value_table(sparse.magnitudes.numpy(), sparse.scales_s is not None)[..., :count].ravel()
    return _sum(np.bincount(keys_s, minlength=len(values)) * values.astype(np.float64) ** 2)


def _sum(values: NDArray[np.float64]) -> float:
    """The sum by repeated halving: numpy's own sum may use another order on another processor."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        rest = values[half:]
        values = values[:half].copy()
        values[: len(rest)] += rest
    return float(values[0]) if len(values) else 0.0
