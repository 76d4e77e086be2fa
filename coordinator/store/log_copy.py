"""Reads the event log of a coordinator's folder from a copy, also while a coordinator writes it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from coordinator.run.state.events import Event
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId

_ATTEMPTS = 5
NAME = "coordinator.sqlite"


def read_copy(
    folder: Path, coordinator: PeerId, copy: Callable[[Path, Path], object] = shutil.copyfile
) -> tuple[str, tuple[Event, ...]]:
    """The specification, as JSON, and all events of the log in `folder`. Otherwise as :func:`opened_copy`."""
    with opened_copy(folder, coordinator, copy) as (spec, store):
        return spec, tuple(store.events())


@contextmanager
def opened_copy(
    folder: Path, coordinator: PeerId, copy: Callable[[Path, Path], object] = shutil.copyfile
) -> Iterator[tuple[str, SqliteStore]]:
    """The specification, as JSON, and a verified copy of the log in `folder`, which may be in use.

    The coordinator holds its database exclusively, so this copies its files and opens the copy. The hash
    chain and the signed head show whether the copy is whole: if the coordinator has moved its newest rows
    from one file to the other meanwhile, this copies again. Nothing is written below `folder`.

    Args:
        coordinator: its peer id; the head of the log has its signature.
        copy: copies a file.

    Raises:
        HetnodeError: STORE_CORRUPT if there is no log, it is damaged, or its run has not begun.
    """
    if not (folder / NAME).is_file():
        raise _no_log(folder, "there is none")
    with tempfile.TemporaryDirectory(prefix="hetnode-log-") as target:
        spec, store = _verified(folder, Path(target), coordinator, copy)
        with closing(store):
            yield spec, store


def _verified(
    folder: Path, target: Path, coordinator: PeerId, copy: Callable[[Path, Path], object]
) -> tuple[str, SqliteStore]:
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
    folder: Path, target: Path, coordinator: PeerId, copy: Callable[[Path, Path], object]
) -> tuple[str, SqliteStore]:
    for former in target.iterdir():
        former.unlink()
    # The head first: it must not be ahead of the rows that are copied.
    for name in (f"{Path(NAME).stem}.head", NAME, f"{NAME}-wal"):
        if (folder / name).exists():
            copy(folder / name, target / name)
    store = SqliteStore(target / NAME, coordinator, _sign_nothing)
    try:
        spec = store.verify()
        if spec is None:  # also if the files do not belong together
            raise _no_log(folder, "its run has not begun")
    except BaseException:
        store.close()
        raise
    return spec, store


def _sign_nothing(_: bytes) -> bytes:
    raise AssertionError("a copy is only read")


def _no_log(folder: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.STORE_CORRUPT,
        f"The event log of {folder} cannot be read: {why}.",
        "Name the folder of a coordinator that has begun its run.",
    )
