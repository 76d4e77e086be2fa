"""Bounds on the norm of a payload, relative to the median norm of its group.

Every replica clips a payload of too large a norm (:func:`clipping_scales`), and every receiver refuses one of
far too large a norm (:func:`outliers`). Clipping changes the anchor, so each number here must have the same
bits on every machine: float64, each operation rounded by itself, sums in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class SentTensor(Protocol):
    """What a round adds to one tensor: a replica's values, or the result of the reducers."""

    @property
    def squares(self) -> float:
        """The sum of the values' squares, with the same bits on every machine."""

    def add_to(self, flat: Tensor, factor: float) -> None:
        """flat += factor * values, in place on a flattened tensor of the full size."""


LEAST_PAYLOADS = 3
"""From this many payloads on, most of which are honest, the median norm is that of an honest payload."""

FEW_FACTOR = 8.0
"""Fewer payloads are clipped to this many times the smaller norm: the liar may be the smaller one."""

REFUSE_FACTOR = 100.0
"""A payload of more than this many times the median norm is refused."""

_LEAST_SCALE = 2.0**-64
"""Smaller scales count as 0: values times such a scale could become denormal, which some machines flush."""


def payload_norm(payload: Mapping[str, SentTensor]) -> float:
    """L2 norm of all values of a decoded payload, with the same bits at every receiver; always finite."""
    return math.sqrt(math.fsum(sparse.squares for sparse in payload.values()))


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of the positive norms; 0 if there is none.

    With two contributors the lower median is the smaller norm, so the larger one is bounded.
    """
    positive = sorted(norm for norm in norms if norm > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def clipping_scales(norms: Sequence[float], clip: float) -> list[float]:
    """For the payloads of one manifest: the factor, at most 1, that brings each down to the bound.

    The bound is `clip` times the median norm. An honest replica loses nothing by it: what is clipped
    stays in its error feedback.
    """
    positive = sum(norm > 0 for norm in norms)
    bound = (clip if positive >= LEAST_PAYLOADS else max(clip, FEW_FACTOR)) * median_norm(norms)
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
