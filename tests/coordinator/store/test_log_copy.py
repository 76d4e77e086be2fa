"""A log is read from a copy, while its coordinator writes it and after that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.run.state.events import CoordinatorStarted, PeerBanned, RunFinished
from coordinator.store.log_copy import NAME, read_copy
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import keyed

KEY = keyed(0)


def opened(folder: Path) -> SqliteStore:
    return SqliteStore(folder / NAME, KEY.peer, KEY.sign)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_log_of_a_running_coordinator_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin("spec")
        store.append([CoordinatorStarted(float(number)) for number in range(5000)])
        before = content_of(tmp_path)
        spec, log = read_copy(tmp_path, KEY.peer)
        assert content_of(tmp_path) == before
        assert (spec, len(log)) == ("spec", 5000)
        store.append([RunFinished(5000.0)])
        assert read_copy(tmp_path, KEY.peer)[1][-1] == RunFinished(5000.0)
    assert len(read_copy(tmp_path, KEY.peer)[1]) == 5001  # stopped


def test_rows_that_move_between_the_files_meanwhile_are_copied_again(tmp_path: Path) -> None:
    """SQLite moves rows from the second file to the first one, and begins the second one anew."""
    moved = []

    def copy(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        if source.name == NAME and len(moved) < 2:
            moved.append(source)
            # More than SQLite keeps in the second file.
            store.append([PeerBanned(1.0, KEY.peer, os.urandom(10_000).hex()) for _ in range(600)])
            store.append([CoordinatorStarted(0.0)])

    with closing(opened(tmp_path)) as store:
        store.begin("spec")
        store.append([CoordinatorStarted(0.0)])
        _, log = read_copy(tmp_path, KEY.peer, copy)
        assert len(moved) == 2
        assert len(log) == 1 + 2 * 601


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / NAME).unlink(), "there is none"),
        (lambda folder: (folder / NAME).write_bytes(b"no database" * 1000), "not a database"),
        (lambda folder: (folder / "coordinator.head").unlink(), "is missing"),
    ],
)
def test_a_log_that_is_missing_or_damaged_is_one_message(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin("spec")
    damage(tmp_path)
    with pytest.raises(HetnodeError, match=reason) as error:
        read_copy(tmp_path, KEY.peer)
    assert error.value.code is ErrorCode.STORE_CORRUPT


def test_the_log_of_another_coordinator_is_refused(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin("spec")
    with pytest.raises(HetnodeError, match="not signed with the key of this coordinator"):
        read_copy(tmp_path, keyed(1).peer)


def test_a_run_that_has_not_begun_has_no_log(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(HetnodeError, match="its run has not begun"):
        read_copy(tmp_path, KEY.peer)
