"""Limits on the rate of requests and of bytes: token buckets, with time as an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class RateLimit:
    """At most `burst` requests at once and `per_second` in the long run, for each key by itself.

    Up to `waiting` requests of a key beyond these may wait for their turn.
    Memory is bounded: beyond `keys` keys, the key with the oldest request is forgotten and may burst again.
    """

    def __init__(self, burst: int, per_second: float, keys: int = 4096, waiting: int = 0) -> None:
        self._burst, self._per_second, self._keys, self._waiting = burst, per_second, keys, waiting
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._buckets)

    def allows(self, key: Hashable, now: float) -> bool:
        """Whether a request of `key` is allowed at `now` (seconds, never decreasing). Counts it if so."""
        return self.delay(key, now) is not None

    def delay(self, key: Hashable, now: float) -> float | None:
        """Seconds that a request of `key` at `now` has to wait; None if it is refused. Counts it if not."""
        tokens, at = self._buckets.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) * self._per_second)
        allowed = tokens >= 1 - self._waiting
        tokens -= allowed
        # pop() above and this line move the key to the end: the first key has the oldest request.
        self._buckets[key] = (tokens, now)
        if len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return max(0.0, -tokens / self._per_second) if allowed else None


class ByteRate:
    """At most `per_second` bytes in the long run, and what `burst` seconds of that are at once.

    Bytes are counted after they have come, so one piece may be larger than the burst: then the pause is long.
    """

    def __init__(self, per_second: float, burst: float = 0.25) -> None:
        self._per_second, self._most = per_second, per_second * burst
        self._left, self._at = self._most, 0.0

    def take(self, nbytes: int, now: float) -> float:
        """Count `nbytes` that came at `now` (seconds, never decreasing). Seconds to wait before the next."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_second) - nbytes
        self._at = now
        return max(0.0, -self._left / self._per_second)
