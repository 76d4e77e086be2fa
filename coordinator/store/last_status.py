"""The last status of a run, and answers about it, from the folder of its coordinator, which need not run."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

from coordinator.run.state.apply import replay
from coordinator.run.state.event_codec import decode
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.run_status import run_status
from coordinator.store.metrics import read_measurements
from coordinator.store.row_body import unpack_body
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import Measurement, RunStatus
from protocol.trust.run_id import run_id_of
from protocol.trust.tls import pin_of
from protocol.types import PeerId

LOG_FILE = "coordinator.sqlite"
_LAST = 2**63 - 1
"""The greatest number that a row can have."""


def has_log(folder: Path) -> bool:
    """Whether `folder` is that of a coordinator whose run has begun."""
    return (folder / LOG_FILE).exists()


def last_status(folder: Path) -> RunStatus:
    """The status as of the newest event in the log of `folder`; `time` is that of the event.

    Nothing in `folder` is written or locked, so a coordinator may start meanwhile. Heartbeats are not stored:
    the round of each peer is that of its newest measurement.

    Raises HetnodeError STORE_CORRUPT.
    """
    with copied(folder) as copy:
        state = replay(first_state(folder, copy), (event for _, event in events_in(copy)))
    newest = newest_measurements(folder / "metrics.jsonl")
    at = state.latest_at
    status = run_status(state, newest.values(), at, at)
    peers = (
        replace(each, round_number=newest[each.peer].round_number if each.peer in newest else 0)
        for each in status.peers
    )
    return replace(status, peers=tuple(peers))


def first_state(folder: Path, copy: sqlite3.Connection) -> State:
    """The state before the first event of the log of `folder`, of which `copy` is one."""
    spec = _spec(copy)
    try:
        certificate = load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        run = run_id_of(spec, pin_of(certificate))
    except (OSError, ValueError):
        run = spec.name  # the log alone was copied
    return State(spec, run)


def read_log(folder: Path) -> tuple[RunSpec, tuple[Event, ...]]:
    """The specification and the events of the log in `folder`, from a copy. Raises STORE_CORRUPT."""
    with copied(folder) as copy:
        return _spec(copy), tuple(event for _, event in events_in(copy))


def _spec(copy: sqlite3.Connection) -> RunSpec:
    """Raises ValueError if there is none."""
    found = copy.execute("SELECT spec FROM run").fetchone()
    if found is None:
        raise ValueError("its run has not begun")
    return RunSpec.from_json(found[0])


def events_in(copy: sqlite3.Connection, first: int = 1, last: int = _LAST) -> Iterator[tuple[int, Event]]:
    """The events `first` to `last` with their numbers, read as they are used. Raises ValueError."""
    query = "SELECT sequence, kind, body FROM events WHERE sequence BETWEEN ? AND ? ORDER BY sequence"
    for sequence, kind, body in copy.execute(query, (first, last)):
        yield sequence, decode(kind, unpack_body(body))


@contextmanager
def copied(folder: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the log in `folder`. Raises STORE_CORRUPT, also where the log proves unreadable inside.

    SQLite would write to the folder, and a coordinator that starts at that moment would find it in use.
    """
    path = folder / LOG_FILE
    try:
        with tempfile.TemporaryDirectory(prefix="hetnode-") as copies:
            for name in (LOG_FILE, f"{LOG_FILE}-wal"):
                with suppress(FileNotFoundError):
                    shutil.copyfile(folder / name, Path(copies) / name)
            with closing(sqlite3.connect(Path(copies) / LOG_FILE)) as copy:
                yield copy
    except (OSError, sqlite3.Error, ValueError) as error:
        raise HetnodeError(
            ErrorCode.STORE_CORRUPT,
            f"The event log {path} cannot be read: {error}.",
            "Name the folder of a coordinator. If it is starting at this moment, try again.",
        ) from None


def newest_measurements(path: Path) -> dict[PeerId, Measurement]:
    """The newest measurement of each member in a metrics file. Lines that hold none are left out."""
    with suppress(OSError):
        found = read_measurements(path, 0, path.stat().st_size)
        # Nobody shows what a member has told of the payloads of others.
        return {measured.peer: replace(measured, agreements=()) for _, measured, _ in found}
    return {}
