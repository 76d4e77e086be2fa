"""Robust statistics: no single value moves them far, and none raises on any values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_NORMAL = 1.4826
"""A normal distribution has a standard deviation of this many median absolute deviations."""


def middle(values: Sequence[float]) -> float | None:
    """The median of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def spread(values: Sequence[float], center: float) -> float:
    """The robust standard deviation around `center`: from the median absolute deviation; 0 without values."""
    return _NORMAL * (middle([abs(value - center) for value in values]) or 0.0)


def sigmas(distance: float, sigma: float) -> float:
    """`distance` in units of `sigma`, at most 999: a sigma of 0 would tell nothing in a sentence."""
    if not distance > 0:
        return 0.0
    return min(distance / sigma, _MOST_SIGMAS) if sigma > 0 else _MOST_SIGMAS


_MOST_SIGMAS = 999.0
