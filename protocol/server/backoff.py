"""The pause before another attempt."""

from __future__ import annotations

_MOST_DOUBLINGS = 64  # above 1023 a float overflows


def pause_after(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after `failures` (at least 1): `first`, doubled each time, at most `longest`."""
    return min(first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest)
