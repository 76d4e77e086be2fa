"""Limits on the rate of requests: token buckets, with time as an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class RateLimit:
    """At most `burst` requests at once and `per_second` in the long run, for each key by itself.

    Memory is bounded: beyond `keys` keys, the key with the oldest request is forgotten and may burst again.
    """

    def __init__(self, burst: int, per_second: float, keys: int = 4096) -> None:
        self._burst, self._per_second, self._keys = burst, per_second, keys
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._buckets)

    def allows(self, key: Hashable, now: float) -> bool:
        """Whether a request of `key` is allowed at `now` (seconds, never decreasing). Counts it if so."""
        tokens, at = self._buckets.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) * self._per_second)
        allowed = tokens >= 1
        # pop() above and this line move the key to the end: the first key has the oldest request.
        self._buckets[key] = (tokens - allowed, now)
        if len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return allowed
