"""A copy of a coordinator's folder, taken while the coordinator writes it."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.run.state.events import CoordinatorStarted
from coordinator.store.backup import back_up
from coordinator.store.log_copy import LOG_FILE, read_copy
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import keyed, spec_of

KEY = keyed(9)


def opened(folder: Path) -> SqliteStore:
    return SqliteStore(folder / LOG_FILE, KEY.peer, KEY.sign)


def test_a_copy_of_a_folder_in_use_goes_on_where_it_was_taken(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    (folder / "identity.key").write_text("secret")
    (folder / "identity.key").chmod(0o600)
    (folder / "history.sqlite").write_text("made from the log")
    (folder / "logs").mkdir()
    os.mkfifo(folder / "pipe")  # what has no end
    with closing(opened(folder)) as store:
        store.begin(spec_of().canonical_json)
        store.append([CoordinatorStarted(float(number)) for number in range(3000)])
        back_up(folder, out, KEY.peer)
        store.append([CoordinatorStarted(3000.0)])
    assert {path.name for path in out.iterdir()} == {"identity.key", LOG_FILE, "coordinator.head"}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert stat.S_IMODE((out / "identity.key").stat().st_mode) == 0o600
    with closing(opened(out)) as store:
        assert store.verify() == spec_of().canonical_json
        assert len(list(store.events())) == 3000
        store.append([CoordinatorStarted(9.0)])
    assert len(read_copy(out, KEY.peer)[1]) == len(read_copy(folder, KEY.peer)[1]) == 3001


def test_a_backup_overwrites_nothing_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    with pytest.raises(HetnodeError) as refused:
        back_up(folder, out, KEY.peer)
    assert refused.value.code is ErrorCode.STORE_CORRUPT
    with closing(opened(folder)) as store:
        store.begin(spec_of().canonical_json)
        store.append([CoordinatorStarted(0.0)])
        other = keyed(8)
        with pytest.raises(HetnodeError):
            back_up(folder, out, other.peer)  # another coordinator signed the head
        assert list(tmp_path.iterdir()) == [folder]
        back_up(folder, out, KEY.peer)
        with pytest.raises(FileExistsError):
            back_up(folder, out, KEY.peer)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "copy"}
