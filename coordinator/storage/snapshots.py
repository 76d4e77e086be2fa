"""The file ``snapshot`` beside an event log: a start reads it, and replays only the rows after it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from coordinator.explain.log_index import IndexRecord
from coordinator.history.ledger import LedgerRecord
from coordinator.state.state import State
from coordinator.storage.run_snapshot import MOST_BYTES, RunSnapshot, read_snapshot, write_snapshot
from coordinator.storage.store import SqliteStore
from protocol.spec.run import RunSpec
from protocol.trust.envelope import Signer
from protocol.types import PeerId

log = logging.getLogger(__name__)

SNAPSHOT_FILE = "snapshot"
ROWS_BETWEEN = 50_000
"""Rows of the log between two snapshots: a start replays at most these, in about two seconds."""
_CLOSE_SECONDS = 10.0


class Snapshots:
    """The newest snapshot of a run. Belongs to one event loop; a thread of its own writes the file.

    A file that cannot be read or written costs time at a start, and nothing else.

    Args:
        coordinator: peer id of the key of `sign`.
    """

    def __init__(self, path: Path, coordinator: PeerId, sign: Signer) -> None:
        self._path, self._coordinator, self._sign = path, coordinator, sign
        self._rows = 0
        self._writing: threading.Thread | None = None

    def read(self, store: SqliteStore, spec: RunSpec, run: str) -> RunSnapshot:
        """The snapshot, if it is of the verified `store`; otherwise that of a run without events."""
        try:
            found = self._read(store, spec, run)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.info("the snapshot %s is not used, because %s: the whole log is read", self._path, error)
        else:
            self._rows = found.rows
            log.info(
                "the run goes on from its snapshot: row %d of the log, which has %d", self._rows, store.end[0]
            )
            return found
        return RunSnapshot(0, b"", State(spec, run), IndexRecord(), b"", LedgerRecord())

    def is_due(self, rows: int) -> bool:
        """Whether the log has grown enough for another one, and none is being written."""
        is_writing = self._writing is not None and self._writing.is_alive()
        return rows - self._rows >= ROWS_BETWEEN and not is_writing

    def write(self, snapshot: RunSnapshot) -> None:
        """Write `snapshot` in the thread, in place of the one before."""
        self._rows = snapshot.rows
        # A daemon: a disk that hangs must not keep the process from ending.
        self._writing = threading.Thread(target=self._write, args=(snapshot,), name="snapshot", daemon=True)
        self._writing.start()

    def close(self) -> None:
        """Wait until the file is written, but not for long."""
        if self._writing is not None:
            self._writing.join(_CLOSE_SECONDS)

    def _read(self, store: SqliteStore, spec: RunSpec, run: str) -> RunSnapshot:
        if self._path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too long")
        found = read_snapshot(self._path.read_bytes(), self._coordinator, spec.hash, run)
        if store.row_hash(found.rows) != found.row_hash:
            raise ValueError("it is not of this log")
        return found

    def _write(self, snapshot: RunSnapshot) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            data = write_snapshot(snapshot, self._sign)
            # As private as the event log.
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except (OSError, ValueError) as error:
            log.warning("no snapshot of the run was written: %s", error)
