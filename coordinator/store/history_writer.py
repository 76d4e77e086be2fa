"""Writes the history of a run to ``history.sqlite``, in a thread of its own.

The event log and the metrics file are the truth: what this file lacks, a later start of the coordinator reads
from them. So the run never waits for it, and no failure here ends the run.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from coordinator.run.state.apply import apply
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history_file import Changes, HistoryFile, is_damage, progress_of, remove_history
from coordinator.store.history_fold import changes_of, changes_of_measurement
from coordinator.store.metrics import read_measurements
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import Measurement

log = logging.getLogger(__name__)

MOST_WAITING = 65_536
"""Events and measurements that may wait for the disk: those of several rounds of a thousand peers."""
_MOST_IN_BATCH = 4096
GATHER_SECONDS = 0.1
"""How long a batch waits for more: one transaction for the reports of many peers."""
RETRY_SECONDS = 5.0
CLOSE_SECONDS = 10.0
FLUSH_SECONDS = 2.0
_AGAIN = "The coordinator completes it at its next start."


def write_events(
    path: Path, state: State, events: Iterable[tuple[int, Event]], metrics: Path | None = None
) -> State:
    """Write the history of the numbered `events` of a log, the first of which follows `state`, to a new file.

    It also has the measurements in the file `metrics`, if that is there. Returns the state after the events.
    """
    numbered = iter(events)
    with HistoryFile(path, state.spec, state.run) as file:
        while batch := list(islice(numbered, _MOST_IN_BATCH)):
            changes: list[Changes] = []
            for sequence, event in batch:
                before, state = state, apply(state, event)
                changes.append(tuple(changes_of(sequence, event, before, state)))
            file.write(changes, batch[-1][0], batch[-1][1].at)
        if metrics is not None and metrics.exists():
            found = read_measurements(metrics, 0, metrics.stat().st_size)
            while told := list(islice(found, _MOST_IN_BATCH)):
                file.write(tuple(changes_of_measurement(at, each)) for at, each, _ in told)
    return state


class _Item(NamedTuple):
    """What an event or a measurement changes, and how far the history is with it."""

    changes: Changes
    sequence: int = 0
    at: float | None = None
    measured: int = 0
    written: threading.Event | None = None


_CAUGHT_UP = _Item((), -1)
"""All events of the log as it was before the start have come."""


class HistoryWriter:
    """The only writer of a history. Call its methods from one thread; none of them waits for the disk.

    First :meth:`catch_up` gets all events of the log as it was before the start, then :meth:`record` the
    later ones. What the file has of them is passed over.

    Args:
        path: of the file. One that is missing, damaged, of another version or run is written anew.
        time_of: the time of an event of the log, by its number; None if there is no such event.
        metrics: the metrics file; its first `metrics_size` bytes hold the measurements so far.
    """

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        run: str,
        time_of: Callable[[int], float | None],
        metrics: Path,
        metrics_size: int,
    ) -> None:
        self._path, self._spec, self._run = path, spec, run
        self._metrics, self._metrics_size = metrics, metrics_size
        self._sequence = 0
        self._written, at = progress_of(path, spec, run)
        if self._written and time_of(self._written) != at:
            self._written = 0  # the log was restored from a copy: the file is ahead of it, or of another log
        self._items: queue.Queue[_Item | None] = queue.Queue(MOST_WAITING)
        self._closing, self._gave_up = threading.Event(), False
        self._problem = ""
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)

    @property
    def problem(self) -> str:
        """A sentence: why the history is not complete; "" if nothing has failed."""
        return self._problem

    def start(self) -> None:
        self._thread.start()

    def catch_up(self, event: Event, before: State, after: State) -> None:
        """Add the next event of the log as it was before the start. This waits for the disk, if it works."""
        if (item := self._next(event, before, after)) is None:
            return
        while not self._gave_up:
            with suppress(queue.Full):
                self._items.put(item, timeout=GATHER_SECONDS)
                return
            if self._problem:
                self._give_up(f"The history of the run lacks events: {self._problem} {_AGAIN}")

    def has_caught_up(self) -> None:
        """All events of the log were there; the measurements so far follow them."""
        self._put(_CAUGHT_UP)

    def record(self, event: Event, before: State, after: State) -> None:
        """Add the event that follows those so far in the log, and led from state `before` to `after`."""
        if (item := self._next(event, before, after)) is not None:
            self._put(item)

    def record_measurement(self, at: float, measured: Measurement, metrics_size: int) -> None:
        """Add a measurement that now is in the first `metrics_size` bytes of the metrics file."""
        self._put(_Item(tuple(changes_of_measurement(at, measured)), measured=metrics_size))

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all that came so far is written, but not for long. May be called in any thread."""
        written = threading.Event()
        self._put(_Item((), written=written))
        written.wait(0.0 if self._problem else seconds)

    def close(self, seconds: float | None = CLOSE_SECONDS) -> None:
        """Write what waits, and close the file; wait so many seconds for that, or until it is done.

        No effect if it was not started.
        """
        self._closing.set()
        with suppress(queue.Full):
            self._items.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _next(self, event: Event, before: State, after: State) -> _Item | None:
        """The next event of the log, if the file lacks it."""
        self._sequence += 1
        if self._gave_up or self._sequence <= self._written:
            return None
        try:
            changes = tuple(changes_of(self._sequence, event, before, after))
        except Exception:
            self._end_by_bug()
            return None
        return _Item(changes, self._sequence, event.at)

    def _put(self, item: _Item) -> None:
        if self._gave_up:
            return
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self._give_up(f"The history of the run lacks its newest events: the disk is too slow. {_AGAIN}")

    def _end_by_bug(self) -> None:
        # A bug here must cost nothing but pages.
        log.exception("the history of the run ends here")
        self._give_up(f"The history of the run ends here, because of an internal error. {_AGAIN}")

    def _give_up(self, problem: str) -> None:
        """From now on nothing is added: a history with a gap would be wrong."""
        self._gave_up = True
        self._say(problem)

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("%s", problem)

    # In the thread

    def _work(self) -> None:
        try:
            with HistoryFile(self._path, self._spec, self._run) as file:
                if file.sequence != self._written:
                    file.clear()
                while not self._gave_up and (batch := self._next_batch()):
                    if _CAUGHT_UP in batch:
                        place = batch.index(_CAUGHT_UP)
                        self._write(file, batch[:place])
                        self._read_measurements(file)
                        batch = batch[place + 1 :]
                    self._write(file, batch)
        except (OSError, sqlite3.Error, HetnodeError) as error:
            self._give_up(f"The history of the run cannot be written: {error}. {_AGAIN}")
            if isinstance(error, sqlite3.Error) and is_damage(error):
                remove_history(self._path)
        except Exception:
            self._end_by_bug()

    def _read_measurements(self, file: HistoryFile) -> None:
        """Add the measurements that the metrics file had at the start."""
        begin = file.measured if file.measured <= self._metrics_size else 0
        found = iter(read_measurements(self._metrics, begin, self._metrics_size))
        while batch := list(islice(found, _MOST_IN_BATCH)):
            items = [_Item(tuple(changes_of_measurement(at, each)), measured=end) for at, each, end in batch]
            self._write(file, items)

    def _next_batch(self) -> list[_Item]:
        """What waits; empty when the writer is closed and nothing does."""
        first = self._items.get() if not self._closing.is_set() else self._waiting()
        if first is None:
            first = self._waiting()
        if first is None:
            return []
        self._closing.wait(GATHER_SECONDS)
        return [first, *self._all_waiting()]

    def _all_waiting(self) -> Iterator[_Item]:
        for _ in range(_MOST_IN_BATCH):
            if (item := self._waiting()) is None:
                return
            yield item

    def _waiting(self) -> _Item | None:
        """The next item, or None if there is none now. The mark of `close` is no item."""
        with suppress(queue.Empty):
            while (item := self._items.get_nowait()) is None:
                pass
            return item
        return None

    def _write(self, file: HistoryFile, batch: Sequence[_Item]) -> None:
        """Add `batch`; again and again while the disk is full, as long as the newer events can wait."""
        newest = [each for each in batch if each.sequence][-1:]
        sequence, at = (newest[0].sequence, newest[0].at) if newest else (0, None)
        measured = max((each.measured for each in batch), default=0)
        while batch and not self._gave_up:
            try:
                file.write((each.changes for each in batch), sequence, at, measured)
            except sqlite3.Error as error:
                if self._closing.is_set() or is_damage(error):
                    raise
                self._say(f"The history of the run waits: {error}. The run itself goes on.")
                self._closing.wait(RETRY_SECONDS)
            else:
                if self._problem and not self._gave_up:
                    log.info("the history of the run is written again")
                    self._problem = ""
                for each in batch:
                    if each.written is not None:
                        each.written.set()
                return
