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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

from coordinator.history.row_builder import BuilderRecord, RowBuilder
from coordinator.history.rows import Row, milliseconds
from coordinator.state.events import Event
from coordinator.state.program import program_hash
from coordinator.state.record_codec import pack, unpack
from coordinator.storage.history_database import (
    HistoryDatabase,
    Progress,
    forget_builder,
    is_damage,
    progress_of,
    remove_history,
)
from coordinator.storage.metrics import read_measurements
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
KEPT_EVENTS = 50_000
"""What makes the rows is kept after so many events: a start reads at most these again."""
_AGAIN = "The coordinator completes it at its next start."

T = TypeVar("T")
ReadEvents: TypeAlias = Callable[[int, int], Sequence[tuple[int, Event]]]
_Stored: TypeAlias = tuple[int, Event]
_Measured: TypeAlias = tuple[float, Measurement, int]
_Item: TypeAlias = _Stored | _Measured


@dataclass(frozen=True)
class _KeptBuilder:
    """What a builder of rows knew after an event of a run, and the program that wrote it."""

    program: str
    run: str
    sequence: int
    builder: BuilderRecord


def _kept_in(progress: Progress, run: str) -> _KeptBuilder:
    """The builder in a file; a new one if it has none that helps."""
    with suppress(ValueError):
        kept = unpack(_KeptBuilder, progress.builder)
        if (kept.program, kept.run) == (program_hash(), run) and kept.sequence <= progress.sequence:
            return kept
    return _KeptBuilder("", run, 0, BuilderRecord())


class HistoryWriter:
    """The only writer of a history. Call its methods from one thread; none of them waits for the disk.

    Args:
        path: of the file. If it is missing, damaged, of another version or of another run, it is written anew
            from the log.
        read: reads events of the log by their first and last number, in another thread.
        metrics: the metrics file; its first `metrics_size` bytes hold the measurements so far.
        rows: of the log, before those that :meth:`pass_over` gets.
    """

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        run: str,
        read: ReadEvents,
        metrics: Path,
        metrics_size: int,
        rows: int = 0,
    ) -> None:
        self._path, self._spec, self._run = path, spec, run
        self._read, self._metrics, self._metrics_size = read, metrics, metrics_size
        progress = progress_of(path)
        self._written, self._written_at = progress.sequence, progress.at
        self._sequence = self._stored = rows
        kept = _kept_in(progress, run)
        self._builder, self._built = RowBuilder(spec, kept.builder), kept.sequence
        self._kept = kept.sequence
        self._items: queue.Queue[_Item | None] = queue.Queue(MOST_WAITING)
        self._closing, self._gave_up = threading.Event(), False
        self._problem = ""
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)

    @property
    def problem(self) -> str:
        """A sentence: why the history is not complete; "" if nothing has failed."""
        return self._problem

    def pass_over(self, event: Event) -> None:
        """The next event of the log as it was before the start; those that the file lacks are read later.

        Give it all of them before :meth:`start`: so the log need not be decoded twice.
        """
        self._sequence += 1
        if not self._built == self._sequence - 1 < self._written:
            return
        try:
            self._builder.of_event(self._sequence, event)
            self._built = self._sequence
        except Exception:
            log.exception("the history of the run is written anew")
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._builder, self._written, self._built, self._kept = RowBuilder(self._spec), 0, 0, 0

    def start(self) -> None:
        self._stored = self._sequence
        self._thread.start()

    def record(self, event: Event) -> None:
        """Add the event that follows those so far in the log."""
        self._sequence += 1
        self._put((self._sequence, event))

    def record_measurement(self, at: float, measured: Measurement, metrics_size: int) -> None:
        """Add a measurement that now is in the first `metrics_size` bytes of the metrics file."""
        self._put((at, measured, metrics_size))

    def close(self, seconds: float | None = CLOSE_SECONDS) -> None:
        """Write what waits, and close the file; wait so many seconds for that, or until it is done.

        No effect if it was not started.
        """
        self._closing.set()
        with suppress(queue.Full):
            self._items.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def complete(self) -> None:
        """Add what the file lacks of a finished run: a killed process may not have written its end."""
        self.start()
        self.close(None)

    def _put(self, item: _Item) -> None:
        if self._gave_up:
            return
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self._give_up(f"The history of the run lacks its newest events: the disk is too slow. {_AGAIN}")

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
            with HistoryDatabase(self._path, self._spec, self._run) as database:
                self._catch_up(database)
                while not self._gave_up and (batch := self._next_batch()):
                    self._write(database, *self._rows(batch))
                    self._keep_builder(database, KEPT_EVENTS)
                if not self._gave_up:
                    self._keep_builder(database, KEPT_EVENTS // 10)
        except (OSError, sqlite3.Error, HetnodeError) as error:
            self._give_up(f"The history of the run cannot be written: {error}. {_AGAIN}")
            if isinstance(error, sqlite3.Error) and is_damage(error):
                remove_history(self._path)
        except Exception:
            # A bug here must cost nothing but pages.
            log.exception("the history of the run ends here")
            forget_builder(self._path)  # the next start makes all rows again, from the first event on
            self._give_up(f"The history of the run ends here, because of an internal error. {_AGAIN}")

    def _catch_up(self, database: HistoryDatabase) -> None:
        if database.sequence != self._written or not self._is_of_this_log():
            # The log was restored from a copy: the file is ahead of it, or of another log.
            self._begin_anew()
        try:
            for batch in self._logged(self._built + 1, self._written):
                self._rows(batch)  # they are in the file, and the builder has to see them
        except HetnodeError:
            raise
        except Exception:
            log.exception("the history of the run is written anew")
            self._begin_anew()
        if database.sequence != self._written:
            database.clear()
        if self._stored - self._written > _MOST_IN_BATCH:
            log.info("the history of the run lacks %d events of the log", self._stored - self._written)
        for batch in self._logged(self._written + 1, self._stored):
            self._write(database, *self._rows(batch))
            self._keep_builder(database, KEPT_EVENTS)
        begin = database.measured if database.measured <= self._metrics_size else 0
        for found in _batches(read_measurements(self._metrics, begin, self._metrics_size)):
            self._write(database, *self._rows(found))

    def _is_of_this_log(self) -> bool:
        if self._written > self._stored or self._built > self._written:
            return False
        return not self._written or any(
            milliseconds(event.at) == self._written_at
            for _, event in self._read(self._written, self._written)
        )

    def _logged(self, first: int, last: int) -> Iterator[Sequence[_Stored]]:
        """The events `first` to `last` of the log."""
        for begin in range(first, last + 1, _MOST_IN_BATCH):
            yield self._read(begin, min(last, begin + _MOST_IN_BATCH - 1))

    def _keep_builder(self, database: HistoryDatabase, events: int) -> None:
        """Keep what the builder knows in the file, if so many events have come since that was done last."""
        if self._built - self._kept < events or (known := self._builder.known) is None:
            return
        # It only saves time at a later start; a disk that is full says so when rows are written.
        with suppress(sqlite3.OperationalError):
            database.keep_builder(
                pack(_KeptBuilder, _KeptBuilder(program_hash(), self._run, self._built, known))
            )
            self._kept = self._built

    def _next_batch(self) -> list[_Item]:
        """What waits; empty when the writer is closed and nothing does."""
        first = self._items.get() if not self._closing.is_set() else self._waiting()
        if first is None:
            first = self._waiting()
        if first is None:
            return []
        self._closing.wait(GATHER_SECONDS)
        batch = [first]
        while len(batch) < _MOST_IN_BATCH and (item := self._waiting()) is not None:
            batch.append(item)
        return batch

    def _waiting(self) -> _Item | None:
        """The next item, or None if there is none now. The mark of `close` is no item."""
        with suppress(queue.Empty):
            while (item := self._items.get_nowait()) is None:
                pass
            return item
        return None

    def _rows(self, batch: Iterable[_Item]) -> tuple[list[Row], int, int, int]:
        """The rows of `batch`, the last sequence, its time, and how much of the metrics file is read."""
        rows: list[Row] = []
        sequence = at = measured = 0
        for item in batch:
            if len(item) == 2:
                sequence, event = item
                at = milliseconds(event.at)
                rows += self._builder.of_event(sequence, event)
                self._built = sequence
            else:
                time, measurement, measured = item
                rows += self._builder.of_measurement(time, measurement)
        return rows, sequence, at, measured

    def _write(self, database: HistoryDatabase, rows: list[Row], *progress: int) -> None:
        """Add `rows`; again and again while the disk is full, as long as the newer events can wait."""
        while not self._gave_up:
            try:
                database.write(rows, *progress)
            except sqlite3.Error as error:
                if self._closing.is_set() or is_damage(error):
                    raise
                self._say(f"The history of the run waits: {error}. The run itself goes on.")
                self._closing.wait(RETRY_SECONDS)
            else:
                if self._problem and not self._gave_up:
                    log.info("the history of the run is written again")
                    self._problem = ""
                return


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, _MOST_IN_BATCH)):
        yield batch
