"""The bound below which no exchange of a group can be, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from protocol.types import MemberLine


def least_seconds(lines: Sequence[MemberLine], nbytes: int) -> float:
    """No exchange of payloads of `nbytes` is faster; see the module. Unknown rates take no time."""
    n = len(lines)
    if n < 2:
        return 0.0
    own = max((1 / line.uplink for line in lines if line.uplink), default=0.0)
    receiving = max((n - 1) / line.downlink if line.downlink else 0.0 for line in lines)
    rates = [line.uplink or inf for line in lines]
    return nbytes * max(own, receiving, n * (n - 1) / sum(rates))
