"""Reading ahead of a trainer: the samples that it asks for next are read by a thread while it computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from node.data.streamed import Samples

MOST_AHEAD = 16
"""Microbatches."""

_Jobs: TypeAlias = "SimpleQueue[tuple[range, Future[Samples]] | None]"


class ReadAhead:
    """Reads ranges of ordinals in one thread, always in the order in which they were named.

    The thread ends with this object, or with the process, whatever it reads.
    """

    def __init__(self, read: Callable[[range], Samples]) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._ahead: dict[range, Future[Samples]] = {}
        # A daemon, because the end of a process waits for threads of a pool: a hub may fail for half an hour.
        Thread(target=_work, args=(self._jobs, read), name="samples", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def read(self, ordinals: range, expected: Iterable[range]) -> Samples:
        """The samples `ordinals`, and begin to read the first MOST_AHEAD of `expected`. Drops all others.

        Raises what reading `ordinals` raises, when they are asked for.
        """
        before = self._ahead
        wanted = (ordinals, *islice(expected, MOST_AHEAD))
        # Those that are not wanted any more go first: the thread would read them before the others.
        for each in before.keys() - set(wanted):
            before.pop(each).cancel()
        self._ahead = {each: before.get(each) or self._begun(each) for each in wanted}
        return self._ahead.pop(ordinals).result()

    def _begun(self, ordinals: range) -> Future[Samples]:
        future: Future[Samples] = Future()
        self._jobs.put((ordinals, future))
        return future


def _work(jobs: _Jobs, read: Callable[[range], Samples]) -> None:
    """Do the jobs that nobody has cancelled, until None comes."""
    while (job := jobs.get()) is not None:
        ordinals, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read(ordinals))
            except BaseException as error:
                future.set_exception(error)
