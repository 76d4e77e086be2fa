"""The event store: an append-only log with the spec of the run, in SQLite.

When `append` has returned, its events survive a crash of the process or the machine. A store has one owner
and takes one call at a time. The rows form a hash chain (coordinator.store.event_chain), and a file
beside the log holds its newest row hash with the coordinator's signature: `verify` checks both.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeAlias

from coordinator.run.state.events import Event, RoundDecided
from coordinator.store.event_chain import first_hash, next_hash
from coordinator.store.event_codec import STORED_KINDS, decode, encode
from coordinator.store.log_head import LogHead
from coordinator.store.row_body import pack_body, unpack_body
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import Signer
from protocol.trust.private_file import FULL_DISK
from protocol.types import Decision, PeerId

log = logging.getLogger(__name__)

APPLICATION_ID = 0x6865746E
"""'hetn', in the header of the SQLite file."""

SCHEMA = (
    "CREATE TABLE run (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), spec TEXT NOT NULL)",
    "CREATE TABLE events (sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL,"
    " row_hash BLOB NOT NULL)",
    "CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER events_last BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    # An index: the events say the same.
    "CREATE TABLE decisions (round INTEGER, stage INTEGER, sequence INTEGER NOT NULL,"
    " PRIMARY KEY (round, stage)) WITHOUT ROWID",
)
SCHEMA_VERSION = 4
"""`PRAGMA user_version` of the file. A log of another version is refused."""
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC)
StoredRow: TypeAlias = tuple[str, bytes]
"""The kind and the packed body of a row."""
_ROWS_AT_ONCE = 500
"""Rows of the log that are read before an append gets its turn."""


@contextmanager
def transaction(database: sqlite3.Connection, lock: str) -> Iterator[None]:
    """All that is written meanwhile, or nothing of it. `lock`: IMMEDIATE or EXCLUSIVE."""
    database.execute(f"BEGIN {lock}")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite itself rolls back after some errors, like a full disk
            database.execute("ROLLBACK")
        raise


class Store(Protocol):
    """An event log. Every method raises STORE_CORRUPT where the log cannot be used.

    It raises DISK_FULL where the disk takes no more of the log; then nothing has changed.

    `blocks`: `append` waits for a disk, so it must not run on an event loop.
    """

    blocks: bool

    @property
    def end(self) -> tuple[int, bytes]:
        """The number of rows and the newest row hash, after `verify`, `begin` or `append`."""

    def verify(self) -> str | None:
        """The spec, None before `begin`. Checks every row of the log."""

    def events(self) -> Iterator[Event]:
        """All events in order. Call :meth:`verify` before, and nothing else before it has ended."""

    def begin(self, spec_json: str) -> None:
        """Store the spec of the run. It cannot be changed later."""

    def append(self, events: Sequence[Event]) -> None:
        """Add `events` to a run that has begun, all or none; they are durable when this returns."""

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        """The events `first` to `last` with their numbers, those of `kinds` alone if there are any.

        The first event of a log has number 1. Safe in another thread than `append`, which waits for a part of
        the reading at most.
        """

    def decision(self, stage: int, round_number: int) -> Decision | None:
        """The decision of a (stage, round); None if it is not made. Safe in another thread, as `read` is."""

    def close(self) -> None:
        """Release the log. Nothing else may be called afterwards."""


class SqliteStore:
    """The log in one SQLite file, held exclusively until `close` or the end of the process.

    The head of the log is in a file of the same name with the suffix ``.head``.

    Args:
        coordinator: peer id of the key of `sign`; None reads a log whose head nobody can check.
        sign: signs the head of the log.

    Raises:
        HetnodeError: RUN_FOLDER_IN_USE while another process or object holds the file; STORE_CORRUPT where it
            is not a log of this program, or damaged.
    """

    blocks = True

    def __init__(self, path: Path, coordinator: PeerId | None, sign: Signer) -> None:
        self.path, self.end = path, (0, b"")
        self.coordinator, self.sign = coordinator, sign
        self.head = LogHead(path.with_suffix(".head"), coordinator or PeerId(""), sign)
        # The lock on the file admits one connection, so who reads while the run goes on shares this one.
        self._turn = threading.Lock()
        with self._reporting():
            # No waiting for a lock: another coordinator holds it until it ends. Autocommit, because
            # `transaction` begins and ends transactions. Appends come from worker threads, one at a time.
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            with self._reporting():
                self._open()
        except HetnodeError:
            self._db.close()  # releases the lock, so that the file can be repaired
            raise

    @property
    def files(self) -> tuple[Path, ...]:
        """Where the log is on disk: the file, and what SQLite has not moved into it yet."""
        return self.path, self.path.with_name(f"{self.path.name}-wal")

    def load(self) -> tuple[str | None, tuple[Event, ...]]:
        """The verified log as a whole: the spec (None before `begin`), and all events in order."""
        spec = self.verify()
        return spec, () if spec is None else tuple(self.events())

    def verify(self) -> str | None:
        with self._reporting():
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            spec = self._db.execute("SELECT spec FROM run").fetchone()
            (rows,) = self._db.execute("SELECT count(*) FROM events").fetchone()
        if verdict != "ok":
            raise _corrupt(self.path, str(verdict))
        if spec is None:
            if rows:
                raise _corrupt(self.path, "the specification of its run is missing")
            return None
        with self._reporting():
            self.end = self._verified(spec[0])
        return str(spec[0])

    def events(self) -> Iterator[Event]:
        with self._reporting():
            # Read as they are used: all events of a long run would take gigabytes.
            for row in self._db.execute("SELECT sequence, kind, body FROM events ORDER BY sequence"):
                yield self._event(*row)

    def begin(self, spec_json: str) -> None:
        with self._reporting(), transaction(self._db, "EXCLUSIVE"):
            self._db.execute("INSERT INTO run VALUES (1, ?)", (spec_json,))
            # Before the commit: from then on, a log without a head has lost it.
            self.head.create(0, first_hash(spec_json))
        self.end = 0, first_hash(spec_json)

    def append(self, events: Sequence[Event]) -> None:
        self._append(events, [(kind, pack_body(body)) for kind, body in map(encode, events)])

    def append_rows(self, rows: Sequence[StoredRow]) -> Sequence[Event]:
        """As :meth:`append`, for the next rows of the log that this one copies. Returns their events."""
        events = [self._event(self.end[0] + place, *row) for place, row in enumerate(rows, start=1)]
        self._append(events, rows)
        return events

    def rows_after(self, sequence: int, most_bytes: int) -> list[StoredRow]:
        """The rows after row `sequence`, up to `most_bytes`, but one at least if there is any."""
        query = "SELECT kind, body FROM events WHERE sequence > ? ORDER BY sequence LIMIT ?"
        with self._turn, self._reporting():
            rows = self._db.execute(query, (sequence, _ROWS_AT_ONCE)).fetchall()
        sizes = accumulate(len(body) for _, body in rows)
        fitting = sum(size <= most_bytes for size in sizes)
        return list(rows[: max(1, fitting)])

    def _append(self, events: Sequence[Event], encoded: Sequence[StoredRow]) -> None:
        with self._turn, self._reporting():
            with transaction(self._db, "EXCLUSIVE"):
                length, row_hash = self._end()
                rows = []
                for kind, body in encoded:
                    row_hash = next_hash(row_hash, kind, body)
                    rows.append((kind, body, row_hash))
                self._db.executemany("INSERT INTO events (kind, body, row_hash) VALUES (?, ?, ?)", rows)
                decided = [
                    (event.decision.round_number, event.decision.stage, sequence)
                    for sequence, event in enumerate(events, start=length + 1)
                    if isinstance(event, RoundDecided)
                ]
                self._db.executemany("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?)", decided)
            self.end = length + len(rows), row_hash
            # After the commit: a head ahead of its log would accuse an honest log of a missing row.
            try:
                self.head.write(*self.end)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                log.warning("%s is behind its log: %s", self.head.path, error)  # the next append writes it

    def row_hash(self, sequence: int) -> bytes | None:
        """The row hash of a row, or before the first one with 0; None if there is no such row."""
        with self._turn, self._reporting():
            if not sequence:
                return first_hash(self._db.execute("SELECT spec FROM run").fetchone()[0])
            row = self._db.execute("SELECT row_hash FROM events WHERE sequence = ?", (sequence,)).fetchone()
        return None if row is None else bytes(row[0])

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        query = "SELECT sequence, kind, body FROM events WHERE sequence BETWEEN ? AND ?"
        names = [name for kind in kinds for name in STORED_KINDS[kind]]
        if names:
            query += f" AND kind IN ({', '.join('?' * len(names))})"
        found = []
        for start in range(first, last + 1, _ROWS_AT_ONCE):
            end = min(last, start + _ROWS_AT_ONCE - 1)
            with self._turn, self._reporting():
                rows = self._db.execute(f"{query} ORDER BY sequence", (start, end, *names)).fetchall()
            found += [(row[0], self._event(*row)) for row in rows]
        return found

    def decision(self, stage: int, round_number: int) -> Decision | None:
        with self._turn, self._reporting():
            row = self._db.execute(
                "SELECT sequence FROM decisions WHERE round = ? AND stage = ?", (round_number, stage)
            ).fetchone()
        if row is None:
            return None
        for _, event in self.read(row[0], row[0]):
            if isinstance(event, RoundDecided):
                decision = event.decision
                if (decision.stage, decision.round_number) == (stage, round_number):
                    return decision
        raise _corrupt(self.path, f"row {row[0]} is not the decision that its index says")

    def _event(self, sequence: int, kind: str, body: bytes) -> Event:
        try:
            return decode(kind, unpack_body(body))
        except ValueError as error:
            raise _corrupt(self.path, f"row {sequence} is unreadable ({error})") from None

    def close(self) -> None:
        with self._turn:  # a thread may read yet
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
        if application and version != SCHEMA_VERSION:
            raise _corrupt(self.path, f"another version of hetnode wrote it (schema {version})")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")  # WAL alone may lose the newest commits in a power failure
        if application:
            return
        with transaction(self._db, "EXCLUSIVE"):
            for statement in SCHEMA:
                run(statement)
            run(f"PRAGMA application_id = {APPLICATION_ID}")
            run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _end(self) -> tuple[int, bytes]:
        """The number of rows, and the row hash of the last one."""
        last = self._db.execute(
            "SELECT sequence, row_hash FROM events ORDER BY sequence DESC LIMIT 1"
        ).fetchone()
        if last is not None:
            return last[0], last[1]
        spec = self._db.execute("SELECT spec FROM run").fetchone()
        if spec is None:
            raise _corrupt(self.path, "its run has not begun")
        return 0, first_hash(spec[0])

    def _verified(self, spec_json: str) -> tuple[int, bytes]:
        """The end of the chain. Raises STORE_CORRUPT, naming a row, or unless it contains the signed head."""
        row_hash, rows, signed, problem = first_hash(spec_json), 0, None, ""
        try:
            signed, signed_hash = (0, row_hash) if self.coordinator is None else self.head.read()
        except ValueError as error:
            problem = str(error)
        found = row_hash if signed == 0 else None
        query = "SELECT sequence, kind, body, row_hash FROM events ORDER BY sequence"
        for rows, (sequence, kind, body, stored_hash) in enumerate(self._db.execute(query), start=1):
            if sequence != rows:  # a replay with a gap would lead to another state
                raise _corrupt(self.path, f"row {rows} is missing")
            row_hash = next_hash(row_hash, kind, body)
            if stored_hash != row_hash:
                what = "the specification of the run or row 1" if sequence == 1 else f"row {sequence}"
                raise _corrupt(self.path, f"{what} was changed, removed, inserted or moved")
            if rows == signed:
                found = row_hash
        if signed is None:
            raise _corrupt(self.path, problem)
        if signed > rows:
            missing = f"rows {rows + 1} to {signed} are" if signed > rows + 1 else f"row {signed} is"
            raise _corrupt(self.path, f"{missing} missing at its end")
        if found != signed_hash:
            raise _corrupt(
                self.path, f"the rows up to row {signed} are not those that this coordinator wrote"
            )
        return rows, row_hash

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn the errors of SQLite and of the head's file into a HetnodeError with a remedy."""
        try:
            yield
        except OSError as error:
            raise (_full if error.errno in FULL_DISK else _corrupt)(self.path, str(error)) from None
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_BUSY:
                raise _in_use(self.path) from None
            if code in _FULL:
                raise _full(self.path, str(error)) from None
            raise _corrupt(self.path, str(error)) from None


def _corrupt(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.STORE_CORRUPT,
        f"The event log {path} cannot be used: {why}.",
        "Check the disk. If the file is damaged, restore the coordinator's whole folder "
        "from one backup, or start the run in a new folder.",
    )


def _full(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.DISK_FULL,
        f"The event log {path} cannot be written: {why}.",
        "Make room on that disk: what was written before is intact, and the run goes on by itself.",
    )


def _in_use(path: Path) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RUN_FOLDER_IN_USE,
        f"Another coordinator holds the event log {path}.",
        "Stop it, or give this one another folder.",
    )
