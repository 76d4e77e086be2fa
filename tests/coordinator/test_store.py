"""The event log: one contract for every implementation, and what SQLite adds to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.state.events import CoordinatorStarted, PeerLost, PeerSeen, RunFinished
from coordinator.store import MIGRATIONS, SqliteStore, Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId
from tests.support.memory_store import MemoryStore


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "log.sqlite")
    yield store
    store.close()


class TestContract:
    def test_a_new_log_is_empty(self, store: Store) -> None:
        assert store.load() == (None, ())

    def test_what_was_appended_is_loaded_in_order(self, store: Store) -> None:
        first = [CoordinatorStarted(1.0), PeerLost(2.0, PeerId("a"), 15.0)]
        store.begin("{}")
        store.append(first)
        store.append([])
        store.append([RunFinished(3.0)])
        assert store.load() == ("{}", (*first, RunFinished(3.0)))

    def test_the_spec_is_set_once(self, store: Store) -> None:
        store.begin("one")
        with pytest.raises(HetnodeError):
            store.begin("two")
        assert store.load()[0] == "one"

    def test_all_events_of_one_append_are_kept_or_none(self, store: Store) -> None:
        with pytest.raises(KeyError):
            store.append([RunFinished(1.0), PeerSeen(1.0, PeerId("a"), 1, 1)])
        assert store.load() == (None, ())


class TestSqlite:
    def test_another_process_finds_what_was_appended(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        first = SqliteStore(path)
        first.begin("{}")
        first.append([RunFinished(1.0)])
        first.close()
        second = SqliteStore(path)
        assert second.load() == ("{}", (RunFinished(1.0),))
        second.close()

    def test_the_log_of_a_live_coordinator_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        first = SqliteStore(path)
        with pytest.raises(HetnodeError) as error:
            SqliteStore(path)
        assert error.value.code is ErrorCode.RUN_FOLDER_IN_USE
        first.append([RunFinished(1.0)])
        first.close()
        SqliteStore(path).close()

    def test_a_file_that_is_no_database_is_refused_and_not_changed(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        path.write_bytes(b"not a database" * 100)
        with pytest.raises(HetnodeError) as error:
            SqliteStore(path)
        assert error.value.code is ErrorCode.STORE_CORRUPT
        assert path.read_bytes() == b"not a database" * 100

    def test_the_database_of_another_program_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        foreign = sqlite3.connect(path)
        foreign.execute("CREATE TABLE recipes (name)")
        foreign.close()
        before = path.read_bytes()
        with pytest.raises(HetnodeError, match="another program") as error:
            SqliteStore(path)
        assert error.value.code is ErrorCode.STORE_CORRUPT
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("UPDATE events SET kind = 'Gossip' WHERE sequence = 2", "unknown kind"),
            ("UPDATE events SET body = '{' WHERE sequence = 2", "event 2 is unreadable"),
            ("DELETE FROM events WHERE sequence = 1", "event 1 is missing"),
            (f"PRAGMA user_version = {len(MIGRATIONS) + 1}", "newer version"),
            ("DROP TABLE events", "no such table"),
        ],
    )
    def test_a_damaged_log_is_refused(self, tmp_path: Path, damage: str, message: str) -> None:
        path = tmp_path / "log.sqlite"
        store = SqliteStore(path)
        store.append([CoordinatorStarted(1.0), RunFinished(2.0)])
        store.close()
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("DROP TRIGGER events_stay")
        db.execute("DROP TRIGGER events_last")
        db.execute(damage)
        db.close()
        with pytest.raises(HetnodeError, match=message) as error:
            SqliteStore(path).load()
        assert error.value.code is ErrorCode.STORE_CORRUPT

    def test_events_can_be_neither_changed_nor_deleted(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        store = SqliteStore(path)
        store.append([RunFinished(2.0)])
        store.close()
        db = sqlite3.connect(path)
        for statement in ("UPDATE events SET body = '{}'", "DELETE FROM events"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)
        db.close()
