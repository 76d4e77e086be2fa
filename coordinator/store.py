"""The event store: an append-only log with the spec of the run, in SQLite.

When `append` has returned, its events survive a crash of the process or the machine. A store has one owner
and takes one call at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from coordinator.state.event_codec import decode, encode
from coordinator.state.events import Event
from protocol.errors import ErrorCode, HetnodeError

APPLICATION_ID = 0x6865746E
"""'hetn', in the header of the SQLite file."""

# Never edit a released migration: append a new one. `PRAGMA user_version` is the number of those applied.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE run (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), spec TEXT NOT NULL)",
        "CREATE TABLE events (sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL)",
        "CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END",
        "CREATE TRIGGER events_last BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    ),
)


class Store(Protocol):
    """An event log. Every method raises STORE_CORRUPT where the log cannot be read or written.

    `blocks`: `append` waits for a disk, so it must not run on an event loop.
    """

    blocks: bool

    def load(self) -> tuple[str | None, tuple[Event, ...]]:
        """The spec (None before `begin`) and all events, in order."""

    def begin(self, spec_json: str) -> None:
        """Store the spec of the run. It cannot be changed later."""

    def append(self, events: Sequence[Event]) -> None:
        """Add `events`, all or none; they are durable when this returns."""

    def close(self) -> None:
        """Release the log. Nothing else may be called afterwards."""


class SqliteStore:
    """The log in one SQLite file, held exclusively until `close` or the end of the process.

    Raises:
        HetnodeError: RUN_FOLDER_IN_USE while another process or object holds the file; STORE_CORRUPT where it
            is not a log of this program, or damaged.
    """

    blocks = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reporting():
            # No waiting for a lock: another coordinator holds it until it ends. Autocommit, because
            # `_transaction` begins and ends transactions. Appends come from worker threads, one at a time.
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            with self._reporting():
                self._open()
        except HetnodeError:
            self._db.close()  # releases the lock, so that the file can be repaired
            raise

    def load(self) -> tuple[str | None, tuple[Event, ...]]:
        with self._reporting():
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            spec = self._db.execute("SELECT spec FROM run").fetchone()
            rows = self._db.execute("SELECT sequence, kind, body FROM events ORDER BY sequence").fetchall()
        if verdict != "ok":
            raise _corrupt(self.path, str(verdict))
        events = []
        for expected, (sequence, kind, body) in enumerate(rows, start=1):
            if sequence != expected:  # a replay with a gap would lead to another state
                raise _corrupt(self.path, f"event {expected} is missing")
            try:
                events.append(decode(kind, body))
            except ValueError as error:
                raise _corrupt(self.path, f"event {sequence} is unreadable ({error})") from None
        return (None if spec is None else spec[0]), tuple(events)

    def begin(self, spec_json: str) -> None:
        with self._reporting():
            self._db.execute("INSERT INTO run VALUES (1, ?)", (spec_json,))

    def append(self, events: Sequence[Event]) -> None:
        rows = [encode(event) for event in events]
        with self._reporting(), self._transaction():
            self._db.executemany("INSERT INTO events (kind, body) VALUES (?, ?)", rows)

    def close(self) -> None:
        self._db.close()

    def _open(self) -> None:
        run = self._db.execute
        # The operating system releases the lock when the process ends, also if it is killed.
        run("PRAGMA locking_mode = EXCLUSIVE")
        (application,) = run("PRAGMA application_id").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        # Three zeros are an empty file, which becomes a new log.
        if application != APPLICATION_ID and (application or tables or version):
            raise _corrupt(self.path, "it is a database of another program")
        if version > len(MIGRATIONS):
            raise _corrupt(self.path, f"a newer version wrote it (schema {version})")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")  # WAL alone may lose the newest commits in a power failure
        with self._transaction():
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    run(statement)
            run(f"PRAGMA application_id = {APPLICATION_ID}")
            run(f"PRAGMA user_version = {len(MIGRATIONS)}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN EXCLUSIVE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back after some errors, like a full disk
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn SQLite's errors into a HetnodeError with a remedy."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise _in_use(self.path) from None
            raise _corrupt(self.path, str(error)) from None


def _corrupt(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.STORE_CORRUPT,
        f"The event log {path} cannot be used: {why}.",
        "Check the disk and its free space; if the file is damaged, start the run in a new folder.",
    )


def _in_use(path: Path) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RUN_FOLDER_IN_USE,
        f"Another coordinator holds the event log {path}.",
        "Stop it, or give this one another folder.",
    )
