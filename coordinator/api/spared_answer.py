"""An answer that takes the event loop long is kept for a while, however many ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_SHARE = 20


class SparedAnswer(Generic[T]):
    """The newest answer of `compute`, which is given to all who ask within 20 times as long as it took.

    So callers take at most a twentieth of the loop, on which heartbeats wait.

    Args:
        clock, work: seconds, and seconds in which this thread has computed.
    """

    def __init__(
        self,
        compute: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[], float] = time.thread_time,
    ) -> None:
        self._compute, self._clock, self._work = compute, clock, work
        self._kept: tuple[T, float] | None = None

    def read(self) -> T:
        if self._kept is not None and self._clock() < self._kept[1]:
            return self._kept[0]
        before = self._work()
        answer, seconds = self._compute(), self._work() - before
        self._kept = answer, self._clock() + _SHARE * seconds
        return answer
