"""How often somebody may ask: token buckets, with time as an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class RateLimit:
    """At most `burst` requests at once and `per_second` in the long run, for each key by itself.

    Memory is bounded: of more than `keys` keys the one longest silent is forgotten, and may burst again.
    """

    def __init__(self, burst: int, per_second: float, keys: int = 4096) -> None:
        self._burst, self._per_second, self._keys = burst, per_second, keys
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allows(self, key: Hashable, now: float) -> bool:
        """Whether `key` may ask at `now` (seconds, never decreasing); if so, the request is counted."""
        tokens, at = self._buckets.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) * self._per_second)
        allowed = tokens >= 1
        self._buckets[key] = (tokens - allowed, now)
        if len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return allowed
