"""The event log: one contract for every implementation, and what SQLite adds to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.run.state.events import CoordinatorStarted, PeerLost, PeerSeen, RoundDecided, RunFinished
from coordinator.store.event_chain import first_hash, next_hash
from coordinator.store.row_body import pack_body, unpack_body
from coordinator.store.store import SCHEMA_VERSION, SqliteStore, Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Aborted, PeerId
from tests.builders import keyed
from tests.support.memory_store import MemoryStore


def opened(path: Path, key: int = 0) -> SqliteStore:
    """The log at `path`, of the coordinator with this key."""
    return SqliteStore(path, keyed(key).peer, keyed(key).sign)


def written(path: Path) -> bytes:
    """Write a log of four rows to `path`, and return the row hash of its last row."""
    store = opened(path)
    store.begin("{}")
    store.append([CoordinatorStarted(1.0), PeerLost(2.0, PeerId("a"), 15.0)])
    store.append([PeerLost(3.0, PeerId("b"), 15.0), RunFinished(4.0)])
    store.close()
    _, row_hash = store.head.read()
    return row_hash


def damaged(path: Path, *statements: str) -> None:
    """Run `statements` on a closed log, as someone with a text editor for databases would."""
    db = sqlite3.connect(path, isolation_level=None)
    for name in ("events_stay", "events_last"):
        db.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        db.execute(statement)
    db.close()


def refusal_of(path: Path, key: int = 0) -> HetnodeError:
    """The error with which the log at `path` is refused."""
    with pytest.raises(HetnodeError) as error, closing(opened(path, key)) as store:
        store.load()
    assert error.value.code is ErrorCode.STORE_CORRUPT
    assert "backup" in error.value.remedy
    return error.value


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else opened(tmp_path / "log.sqlite")
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

    def test_a_part_of_the_log_is_read_with_the_numbers_of_its_events(self, store: Store) -> None:
        store.begin("{}")
        lost = [PeerLost(float(number), PeerId("a"), 15.0) for number in range(2, 1200)]
        store.append([CoordinatorStarted(1.0), *lost, RunFinished(1200.0)])
        assert store.read(1, 2) == [(1, CoordinatorStarted(1.0)), (2, lost[0])]
        assert [number for number, _ in store.read(400, 1100)] == list(range(400, 1101))
        ends = [(1, CoordinatorStarted(1.0)), (1200, RunFinished(1200.0))]
        assert store.read(1, 1200, (CoordinatorStarted, RunFinished)) == ends
        assert store.read(1200, 9999) == ends[1:]
        assert store.read(5, 4) == store.read(2000, 3000) == []

    def test_the_spec_is_set_once(self, store: Store) -> None:
        store.begin("one")
        with pytest.raises(HetnodeError):
            store.begin("two")
        assert store.load()[0] == "one"

    def test_all_events_of_one_append_are_kept_or_none(self, store: Store) -> None:
        store.begin("{}")
        with pytest.raises(KeyError):
            store.append([RunFinished(1.0), PeerSeen(1.0, PeerId("a"), 1, 1)])
        assert store.load() == ("{}", ())


class TestSqlite:
    def test_a_thread_may_read_while_another_appends(self, tmp_path: Path) -> None:
        store = opened(tmp_path / "log.sqlite")
        store.begin("{}")
        store.append([CoordinatorStarted(1.0)])
        found: list[int] = []

        def read_on() -> None:
            while not found or found[-1] < 100:
                numbers = [number for number, _ in store.read(1, 1000)]
                assert numbers == list(range(1, len(numbers) + 1))
                found.append(len(numbers))

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_on)
            for number in range(2, 101):
                store.append([PeerLost(float(number), PeerId("a"), 15.0)])
            reading.result(60)
        assert found == sorted(found)
        store.close()

    def test_the_log_of_a_live_coordinator_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        first = opened(path)
        with pytest.raises(HetnodeError) as error:
            opened(path)
        assert error.value.code is ErrorCode.RUN_FOLDER_IN_USE
        first.begin("{}")
        first.append([RunFinished(1.0)])
        first.close()
        opened(path).close()

    def test_a_file_that_is_no_database_is_refused_and_not_changed(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        path.write_bytes(b"not a database" * 100)
        with pytest.raises(HetnodeError) as error:
            opened(path)
        assert error.value.code is ErrorCode.STORE_CORRUPT
        assert path.read_bytes() == b"not a database" * 100

    def test_the_database_of_another_program_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        foreign = sqlite3.connect(path)
        foreign.execute("CREATE TABLE recipes (name)")
        foreign.close()
        before = path.read_bytes()
        with pytest.raises(HetnodeError, match="another program") as error:
            opened(path)
        assert error.value.code is ErrorCode.STORE_CORRUPT
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (f"PRAGMA user_version = {SCHEMA_VERSION + 1}", "another version"),
            ("DROP TABLE events", "no such table"),
        ],
    )
    def test_a_damaged_database_is_refused(self, tmp_path: Path, damage: str, message: str) -> None:
        path = tmp_path / "log.sqlite"
        written(path)
        damaged(path, damage)
        assert message in refusal_of(path).cause

    def test_a_row_of_an_unknown_kind_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        row_hash = written(path)
        db = sqlite3.connect(path, isolation_level=None)
        body = pack_body("{}")
        row = ("Gossip", body, next_hash(row_hash, "Gossip", body))
        db.execute("INSERT INTO events (kind, body, row_hash) VALUES (?, ?, ?)", row)
        db.close()
        assert "row 5 is unreadable (unknown kind" in refusal_of(path).cause

    def test_a_decision_is_found_by_an_index_that_is_checked(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        written(path)
        decisions = [Aborted(stage, 1, 1, "r") for stage in range(2)]
        with closing(opened(path)) as store:
            store.append([RoundDecided(5.0, each) for each in decisions])
            assert [store.decision(stage, 1) for stage in range(2)] == decisions
            assert store.decision(0, 2) is None
        damaged(path, "UPDATE decisions SET sequence = 5 WHERE stage = 1")
        with closing(opened(path)) as store, pytest.raises(HetnodeError) as error:
            store.decision(1, 1)
        assert error.value.code is ErrorCode.STORE_CORRUPT

    def test_events_can_be_neither_changed_nor_deleted(self, tmp_path: Path) -> None:
        path = tmp_path / "log.sqlite"
        written(path)
        db = sqlite3.connect(path)
        for statement in ("UPDATE events SET body = '{}'", "DELETE FROM events"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)
        db.close()


class TestChain:
    """An edited log is refused, with the number of the first row that does not fit."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """A log of four rows."""
        written(tmp_path / "log.sqlite")
        return tmp_path / "log.sqlite"

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            # a body, a kind, a row_hash, and the specification
            (["UPDATE events SET body = '{}' WHERE sequence = 2"], "row 2 was changed"),
            (["UPDATE events SET kind = 'PeerDraining' WHERE sequence = 3"], "row 3 was changed"),
            (["UPDATE events SET row_hash = zeroblob(32) WHERE sequence = 3"], "row 3 was changed"),
            (["UPDATE run SET spec = '{ }'"], "the specification of the run or row 1 was changed"),
            (["DELETE FROM run"], "the specification of its run is missing"),
            # removed
            (["DELETE FROM events WHERE sequence = 1"], "row 1 is missing"),
            (["DELETE FROM events WHERE sequence = 3"], "row 3 is missing"),
            (
                [
                    "DELETE FROM events WHERE sequence = 2",
                    "UPDATE events SET sequence = sequence - 1 WHERE sequence > 2",
                ],
                "row 2 was changed, removed",
            ),
            # inserted
            (
                [
                    "UPDATE events SET sequence = sequence + 10 WHERE sequence > 1",
                    "UPDATE events SET sequence = sequence - 9 WHERE sequence > 1",
                    "INSERT INTO events SELECT 2, kind, body, row_hash FROM events WHERE sequence = 1",
                ],
                "row 2 was changed, removed, inserted",
            ),
            # two rows in the other order, each with its own row_hash
            (
                [
                    "UPDATE events SET sequence = 9 WHERE sequence = 2",
                    "UPDATE events SET sequence = 2 WHERE sequence = 3",
                    "UPDATE events SET sequence = 3 WHERE sequence = 9",
                ],
                "row 2 was changed, removed, inserted or moved",
            ),
            # its end
            (["DELETE FROM events WHERE sequence = 4"], "row 4 is missing at its end"),
            (["DELETE FROM events WHERE sequence > 2"], "rows 3 to 4 are missing at its end"),
            (["DELETE FROM events"], "rows 1 to 4 are missing at its end"),
        ],
    )
    def test_an_edited_log_is_refused(self, path: Path, damage: list[str], message: str) -> None:
        damaged(path, *damage)
        assert message in refusal_of(path).cause

    def test_a_chain_that_was_computed_anew_does_not_fit_the_signed_head(self, path: Path) -> None:
        db = sqlite3.connect(path)
        rows = db.execute("SELECT kind, body FROM events ORDER BY sequence").fetchall()
        db.close()
        rows[1] = rows[1][0], pack_body(unpack_body(rows[1][1]).replace("15", "16"))
        damaged(path, "DELETE FROM events")
        db, row_hash = sqlite3.connect(path, isolation_level=None), first_hash("{}")
        for kind, body in rows:
            row_hash = next_hash(row_hash, kind, body)
            db.execute("INSERT INTO events (kind, body, row_hash) VALUES (?, ?, ?)", (kind, body, row_hash))
        db.close()
        assert "the rows up to row 4 are not those that this coordinator wrote" in refusal_of(path).cause

    def test_a_head_that_is_lost_unreadable_or_of_another_key_is_refused(self, path: Path) -> None:
        head = path.with_suffix(".head")
        former = head.read_bytes()
        for content in (
            b"",
            b"junk",
            former[:40],
            former.replace(b" ", b" -"),
            b"-1 00 00",
            b"9" * 5000 + b" 00 00",
            b"\xff" * 9,
        ):
            head.write_bytes(content)
            assert "log.head is unreadable" in refusal_of(path).cause
        head.write_bytes(former.replace(b"4 ", b"3 ", 1))
        assert "log.head is not signed" in refusal_of(path).cause
        head.unlink()
        assert "log.head, the file with its newest hash, is missing" in refusal_of(path).cause
        head.write_bytes(former)
        assert "log.head is not signed" in refusal_of(path, key=1).cause
        opened(path).load()

    def test_a_crash_before_the_head_was_written_costs_nothing(self, path: Path) -> None:
        head = path.with_suffix(".head")
        former = head.read_bytes()
        store = opened(path)
        store.append([RunFinished(5.0)])
        store.close()
        head.write_bytes(former)
        store = opened(path)
        assert len(store.load()[1]) == 5
        store.append([RunFinished(6.0)])
        assert len(store.load()[1]) == 6
        store.close()
