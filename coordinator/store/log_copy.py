"""Reads a run from the folder of its coordinator, which may be running: its log and its last status."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

from coordinator.run.state.apply import replay
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.run_status import run_status
from coordinator.store.metrics import newest_in
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.run_id import run_id_of
from protocol.trust.tls import pin_of
from protocol.types import PeerId

_ATTEMPTS = 5
LOG_FILE, PARTNER_FILE = "coordinator.sqlite", "partner"


def kept_spec(folder: Path) -> RunSpec | None:
    """The specification of the run in `folder`: of its log, else of its run file; None without both.

    Raises HetnodeError BAD_SPEC for a run file that cannot be read.
    """
    file = folder / "run.toml"
    with suppress(sqlite3.Error, ValueError, TypeError):
        if has_log(folder):
            with closing(sqlite3.connect(folder / LOG_FILE, timeout=0)) as log:
                log.execute(
                    "PRAGMA locking_mode = EXCLUSIVE"
                )  # writes no file of its own: the disk may be full
                return RunSpec.from_json(log.execute("SELECT spec FROM run").fetchone()[0])
    return resolve(file=file) if file.exists() and file.stat().st_size else None


def has_log(folder: Path) -> bool:
    """Whether `folder` is that of a coordinator whose run has begun."""
    return (folder / LOG_FILE).exists()


def last_status(folder: Path) -> RunStatus:
    """The status as of the newest event in the log of `folder`; `time` is that of the event.

    Heartbeats are not stored: the round of each peer is that of its newest measurement.

    Raises HetnodeError STORE_CORRUPT.
    """
    with opened_copy(folder) as (spec, store):
        return status_after(folder, replay(first_state(folder, spec), store.events()))


def status_after(folder: Path, state: State) -> RunStatus:
    """As :func:`last_status`, where `state` is that after the newest event."""
    newest = newest_in(folder / "metrics.jsonl")
    status = run_status(state, newest.values(), state.latest_at, state.latest_at)
    peers = (
        replace(each, round_number=newest[each.peer].round_number if each.peer in newest else 0)
        for each in status.peers
    )
    return replace(status, peers=tuple(peers))


def first_state(folder: Path, spec: RunSpec) -> State:
    """The state before the first event of the log of `folder`, whose run has the specification `spec`."""
    try:
        certificate = load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        run = run_id_of(spec, pin_of(certificate))
    except (OSError, ValueError):
        run = spec.name  # the log alone was copied
    return State(spec, run)


def read_copy(folder: Path, coordinator: PeerId | None = None) -> tuple[RunSpec, tuple[Event, ...]]:
    """The specification and all events of the log in `folder`. Otherwise as :func:`opened_copy`."""
    with opened_copy(folder, coordinator) as (spec, store):
        return spec, tuple(store.events())


@contextmanager
def opened_copy(
    folder: Path, coordinator: PeerId | None = None, copy: Callable[[Path, Path], object] = shutil.copyfile
) -> Iterator[tuple[RunSpec, SqliteStore]]:
    """The specification and a verified copy of the log in `folder`, which may be in use.

    The coordinator holds its database exclusively, so this copies its files and opens the copy. The hash
    chain and the signed head show whether the copy is whole: if the coordinator has moved its newest rows
    from one file to the other meanwhile, this copies again. Nothing is written below `folder`.

    Args:
        coordinator: its peer id; the head of the log must have its signature. None reads no head.
        copy: copies a file.

    Raises:
        HetnodeError: STORE_CORRUPT if there is no log, it is damaged, or its run has not begun.
    """
    if not has_log(folder):
        raise _no_log(folder, "there is none")
    with tempfile.TemporaryDirectory(prefix="hetnode-log-") as target:
        spec, store = verified_copy(folder, Path(target), coordinator, copy)
        with closing(store):
            yield spec, store


def verified_copy(
    folder: Path,
    target: Path,
    coordinator: PeerId | None,
    copy: Callable[[Path, Path], object] = shutil.copyfile,
) -> tuple[RunSpec, SqliteStore]:
    """As :func:`opened_copy`, in `target`, of which every file may go. The caller closes the store."""
    for attempt in range(_ATTEMPTS):
        try:
            return _verified_once(folder, target, coordinator, copy)
        except HetnodeError:
            if attempt == _ATTEMPTS - 1:
                raise
        except OSError as error:
            raise _no_log(folder, str(error)) from None
    raise AssertionError("the last attempt returns or raises")


def _verified_once(
    folder: Path, target: Path, coordinator: PeerId | None, copy: Callable[[Path, Path], object]
) -> tuple[RunSpec, SqliteStore]:
    for former in target.iterdir():
        former.unlink()
    # The head first: it must not be ahead of the rows that are copied.
    for name in (f"{Path(LOG_FILE).stem}.head", LOG_FILE, f"{LOG_FILE}-wal"):
        with suppress(FileNotFoundError):
            copy(folder / name, target / name)
    store = SqliteStore(target / LOG_FILE, coordinator, _sign_nothing)
    try:
        spec = store.verify()
        if spec is None:  # also if the files do not belong together
            raise _no_log(folder, "its run has not begun")
        return RunSpec.from_json(spec), store
    except BaseException as error:
        store.close()
        if isinstance(error, ValueError):
            raise _no_log(folder, f"its specification is damaged ({error})") from None
        raise


def _sign_nothing(_: bytes) -> bytes:
    raise AssertionError("a copy is only read")


def _no_log(folder: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.STORE_CORRUPT,
        f"The event log of {folder} cannot be read: {why}.",
        "Name the folder of a coordinator that has begun its run.",
    )
