"""The file ``history.sqlite``: its writer opens it, or makes it anew, and adds rows; queries open it to read.

The file is derived from the event log and the metrics file, so there are no migrations: whoever changes a
table or what history_fold makes of an event increases HISTORY_VERSION, and the coordinator writes
the file anew at its next start.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from coordinator.store.history_sql import COLUMNS, CREATED, INSERTED
from coordinator.store.history_tables import TABLES, BegunAnew, Change, RunTotals, TableRow
from coordinator.store.store import transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

HISTORY_FILE = "history.sqlite"
"""In the folder of the coordinator."""
HISTORY_ID = 0x68746869
"""'hthi', in the header of the SQLite file."""
HISTORY_VERSION = 8
"""`PRAGMA user_version` of the file."""
Changes: TypeAlias = tuple[Change, ...]
"""What one event or one measurement changes: all of it or nothing."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CACHE_KILOBYTES = 16_384
_VALUES = {table: attrgetter(*(each.name for each in COLUMNS[table])) for table in TABLES}
"""By table, what gives the values of a row."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the content of the file is wrong, so that only a new file helps."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def remove_history(path: Path) -> None:
    """Remove the file and what belongs to it, if it is there."""
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


def progress_of(path: Path, spec: RunSpec, run: str) -> tuple[int, float | None]:
    """Number and time of the newest event in the file; 0 if it is no good history of `run`."""
    with suppress(sqlite3.Error):
        if path.exists():
            # Not read-only: the newest rows may be in a WAL that a killed process has left.
            with closing(sqlite3.connect(path, timeout=0)) as database:
                found = _run_in(database, spec, run)
                if found is not None:
                    return found[:2]
    return 0, None


def _run_in(database: sqlite3.Connection, spec: RunSpec, run: str) -> tuple[int, float | None, int] | None:
    """Sequence, time and measured bytes; None unless this version wrote the file for `run`."""
    if not _is_of_this_version(database):
        return None
    found = database.execute("SELECT run, spec, sequence, at, measured FROM run").fetchone()
    return found[2:] if found is not None and found[:2] == (run, spec.hash) else None


def _is_of_this_version(database: sqlite3.Connection) -> bool:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return bool((application, version) == (HISTORY_ID, HISTORY_VERSION))


class HistoryFile(AbstractContextManager["HistoryFile"]):
    """The open file, for its one writer. All methods raise sqlite3.Error.

    A file that is damaged, of another version, of another run or of another program is replaced.

    Attributes:
        sequence: of the newest event in it.
        measured: the bytes of the metrics file whose measurements are in it.
    """

    def __init__(self, path: Path, spec: RunSpec, run: str) -> None:
        self._path, self._spec, self._run = path, spec, run
        self._db = self._connect()
        try:
            try:
                found = _run_in(self._db, spec, run)
            except sqlite3.DatabaseError as error:
                # An empty file has no tables yet.
                if not is_damage(error) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                    raise
                found = None
            if found is None:
                self.clear()
            else:
                self.sequence, _, self.measured = found
                self._configure()
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
        with transaction(self._db, "IMMEDIATE"):
            for table in TABLES:
                for statement in CREATED[table]:
                    self._db.execute(statement)
            self._add(RunTotals(run=self._run, spec=self._spec.hash, stages=self._spec.swarm.stages))
            # The run itself has lines in the journal, too.
            self._db.execute(
                "INSERT INTO peers (number, peer, strikes, failures, stage_tokens, stage_rounds,"
                " payload_bytes, link_bytes) VALUES (0, '', 0, 0, 0, 0, 0, 0)"
            )
            self._db.execute(f"PRAGMA application_id = {HISTORY_ID}")
            self._db.execute(f"PRAGMA user_version = {HISTORY_VERSION}")
        self.sequence = self.measured = 0

    def write(
        self, changes: Iterable[Changes], sequence: int = 0, at: float | None = None, measured: int = 0
    ) -> None:
        """Add `changes`, all or none. The other arguments say how far the history is with them."""
        with transaction(self._db, "IMMEDIATE"):
            for group in changes:
                for change in group:
                    if not self._add(change):
                        break
            self._add(RunTotals(sequence=sequence, at=at, measured=measured))
        self.sequence, self.measured = max(self.sequence, sequence), max(self.measured, measured)

    def _add(self, change: Change) -> bool:
        """Whether what came with `change` counts as well."""
        if isinstance(change, BegunAnew):
            for table in ("contributions", "stage_rounds"):
                self._db.execute(f"DELETE FROM {table} WHERE round_number = ?", (change.round_number,))
            return True
        kind: type[TableRow] = type(change)
        found = self._db.execute(INSERTED[kind], _VALUES[kind](change))
        return not kind.IS_ONCE or found.rowcount == 1

    def _connect(self) -> sqlite3.Connection:
        # As private as the event log: only the owner of the folder reads what peers did.
        self._path.touch(mode=0o600)
        return sqlite3.connect(self._path, timeout=5.0, isolation_level=None)

    def _configure(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")  # others read while this writes
        # The log of events is the truth: a flush for each transaction would only protect its copy.
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that sees one moment of the history. Raises NO_HISTORY, also for errors within.

    One for each query: opening takes below a millisecond, and no query sees a file that was replaced since.
    """
    # The path as a URI: a question mark in a folder's name would end it.
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as database:
            if not _is_of_this_version(database):
                raise _no_history(path, "it is not complete, or another version of hetnode wrote it")
            database.execute("BEGIN")
            yield database
    except sqlite3.Error as error:
        raise _no_history(path, str(error) if path.exists() else "there is none") from None


def _no_history(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NO_HISTORY,
        f"The history {path} cannot be read: {why}.",
        "The coordinator writes it again from its event log when it starts: start it once on that folder.",
    )
