"""Reading ahead of a trainer: the samples that it asks for next are read by a thread while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from node.data.streamed import Samples

MOST_AHEAD = 16
"""Microbatches."""


class ReadAhead:
    """Reads ranges of ordinals in one thread, always in the order in which they were named.

    The thread ends with this object, or with the process, whatever it reads.
    """

    def __init__(self, read: Callable[[range], Samples]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(1, "samples")
        self._ahead: dict[range, Future[Samples]] = {}

    def read(self, ordinals: range, expected: Iterable[range]) -> Samples:
        """The samples `ordinals`, and begin to read the first MOST_AHEAD of `expected`. Drops all others.

        Raises what reading `ordinals` raises, when they are asked for.
        """
        before = self._ahead
        wanted = (ordinals, *islice(expected, MOST_AHEAD))
        # Those that are not wanted any more go first: the thread would read them before the others.
        for each in before.keys() - set(wanted):
            before.pop(each).cancel()
        self._ahead = {each: before.get(each) or self._pool.submit(self._read, each) for each in wanted}
        return self._ahead.pop(ordinals).result()
