"""The file ``history.sqlite`` as its writer holds it: opens it, or makes it anew; adds rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from coordinator.history.rows import Measured, Row
from coordinator.storage.history_schema import (
    BEGIN_RUN,
    HISTORY_ID,
    HISTORY_VERSION,
    KEEP_BUILDER,
    MEASURED,
    MEASUREMENT_SUMS,
    PROGRESS,
    STATEMENTS,
    TABLES,
)
from protocol.spec.run import RunSpec

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CACHE_KILOBYTES = 16_384


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the content of the file is wrong, so that only a new file helps."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def remove_history(path: Path) -> None:
    """Remove the file and what belongs to it, if it is there."""
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


@dataclass(frozen=True)
class Progress:
    """Sequence and time of the newest event in a file, and what `keep_builder` has put there."""

    sequence: int = 0
    at: int = 0
    builder: bytes = b""


def progress_of(path: Path) -> Progress:
    """That of the file; nothing if it cannot be read. The file is not changed."""
    with suppress(sqlite3.Error):
        if path.exists():
            # Not read-only: the newest rows may be in a WAL that a killed process has left.
            with closing(sqlite3.connect(path, timeout=0)) as database:
                found = database.execute("SELECT sequence, at, builder FROM run").fetchone()
                if found is not None and all(isinstance(each, int) for each in found[:2]):
                    return Progress(found[0], found[1], found[2] if isinstance(found[2], bytes) else b"")
    return Progress()


def forget_builder(path: Path) -> None:
    """Remove what `keep_builder` has put into the file, if that can be done."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=5.0)) as database:
        database.execute(KEEP_BUILDER, (None,))
        database.commit()


class HistoryDatabase(AbstractContextManager["HistoryDatabase"]):
    """The open file. All methods raise sqlite3.Error.

    A file that is damaged, of another version, of another run or of another program is replaced.

    Attributes:
        sequence: of the newest event in it; `newest_at`: the time of that event in milliseconds.
        measured: the bytes of the metrics file whose measurements are in it.
    """

    def __init__(self, path: Path, spec: RunSpec, run: str) -> None:
        self._path, self._spec, self._run = path, spec, run
        self._db = self._connect()
        try:
            try:
                is_good = self._read()
            except sqlite3.DatabaseError as error:
                # An empty file has no tables yet.
                if not is_damage(error) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                    raise
                is_good = False
            if is_good:
                self._configure()
            else:
                self.clear()
        except BaseException:
            self._db.close()
            raise

    def __exit__(self, *_: object) -> None:
        # One plain file is left, which can be copied and read anywhere. Not while others read it.
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()

    def clear(self) -> None:
        """Begin with an empty history of this run."""
        self._db.close()
        remove_history(self._path)
        self._db = self._connect()
        self._configure()
        self._db.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            self._db.execute(statement)
        swarm, rounds = self._spec.swarm.stages, self._spec.rounds
        self._db.execute(BEGIN_RUN, (self._run, self._spec.hash, swarm, rounds))
        self._db.execute(f"PRAGMA application_id = {HISTORY_ID}")
        self._db.execute(f"PRAGMA user_version = {HISTORY_VERSION}")
        self._db.execute("COMMIT")
        self.sequence = self.newest_at = self.measured = 0

    def write(self, rows: Iterable[Row], sequence: int = 0, at: int = 0, measured: int = 0) -> None:
        """Add `rows`, all or none. `sequence`, `at` and `measured` as above; 0 leaves each as it is."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for kind, same in groupby(rows, type):
                if kind is Measured:
                    self._add_measurements(same)
                    continue
                values = list(same)
                for statement in STATEMENTS[kind]:
                    self._db.executemany(statement, values)
            self._db.execute(PROGRESS, (sequence, at, measured))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back after some errors, like a full disk
                self._db.execute("ROLLBACK")
            raise
        self.sequence, self.newest_at = sequence or self.sequence, at or self.newest_at
        self.measured = measured or self.measured

    def keep_builder(self, builder: bytes) -> None:
        """Replace what a later start gets from :func:`progress_of`."""
        self._db.execute(KEEP_BUILDER, (builder,))

    def _add_measurements(self, rows: Iterable[Row]) -> None:
        for row in rows:
            assert isinstance(row, Measured)
            if self._db.execute(MEASURED, row).rowcount == 1:
                values = row._asdict()
                for statement in MEASUREMENT_SUMS:
                    self._db.execute(statement, values)

    def _connect(self) -> sqlite3.Connection:
        # As private as the event log: only the owner of the folder reads what peers did.
        self._path.touch(mode=0o600)
        return sqlite3.connect(self._path, timeout=5.0, isolation_level=None)

    def _configure(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")  # others read while this writes
        # The log of events is the truth: a flush for each transaction would only protect its copy.
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")

    def _read(self) -> bool:
        """Whether the file is a history of this run that this version wrote."""
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if (application, version) != (HISTORY_ID, HISTORY_VERSION):
            return False
        found = self._db.execute("SELECT run, spec, sequence, at, measured FROM run").fetchone()
        if found is None or found[:2] != (self._run, self._spec.hash):
            return False
        self.sequence, self.newest_at, self.measured = found[2:]
        return True
