"""A start from a snapshot knows the same as one from the whole log, and falls back to the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.history.row_builder import BuilderRecord
from coordinator.state.apply import replay
from coordinator.state.events import Event, RoundCommitted
from coordinator.state.state import State
from coordinator.storage import history_writer, snapshots
from coordinator.storage.history_database import progress_of
from coordinator.storage.history_schema import HISTORY_FILE
from coordinator.storage.restored_run import RestoredRun, restore_run
from coordinator.storage.snapshots import SNAPSHOT_FILE, Snapshots
from coordinator.storage.store import SqliteStore
from protocol.spec.run import RunSpec
from tests.builders import keyed
from tests.support.coordinator_process import running
from tests.support.coordinator_run import leave, play_rounds, started_and_attested
from tests.support.history import dump, stored, write_history

COORDINATOR = keyed(99)
LOG = "coordinator.sqlite"
BETWEEN = 100


@pytest.fixture(scope="module")
def run() -> tuple[RunSpec, list[Event]]:
    """The specification and the log of a run, in which a peer leaves."""
    run = started_and_attested(3, rounds=60)
    play_rounds(run, 20)
    leave(run, keyed(2))
    play_rounds(run, 22)
    return run.spec, stored(run.events)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots and builders are kept after few events."""
    monkeypatch.setattr(snapshots, "ROWS_BETWEEN", BETWEEN)
    monkeypatch.setattr(history_writer, "KEPT_EVENTS", BETWEEN)
    monkeypatch.setattr(history_writer, "GATHER_SECONDS", 0.0)


@asynccontextmanager
async def start(folder: Path, spec: RunSpec) -> AsyncIterator[RestoredRun]:
    store = SqliteStore(folder / LOG, COORDINATOR.peer, COORDINATOR.sign)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        yield restore_run(stack, store, spec, spec.name, folder)


def go_on(started: RestoredRun, events: Sequence[Event], batch: int = 7) -> None:
    """Store `events` as the command loop does, in batches, and show them to all tables."""
    state = started.state
    started.history.start()
    for begin in range(0, len(events), batch):
        issued = events[begin : begin + batch]
        started.store.append(issued)
        state = replay(state, issued)
        for event in issued:
            for table in (started.index.note, started.decisions.note, started.ledger.record):
                table(event)
            started.history.record(event)
            started.keep_snapshot(state)


async def whole(folder: Path, run: tuple[RunSpec, list[Event]]) -> None:
    """A coordinator that has had all events, and was stopped."""
    spec, events = run
    async with start(folder, spec) as first:
        go_on(first, events)


def rows_of_snapshot(folder: Path, spec: RunSpec) -> int:
    store = SqliteStore(folder / LOG, COORDINATOR.peer, COORDINATOR.sign)
    try:
        store.verify()
        found = Snapshots(folder / SNAPSHOT_FILE, COORDINATOR.peer, COORDINATOR.sign)
        return found.read(store, spec, spec.name).rows
    finally:
        store.close()


def ends_a_round(event: Event) -> bool:
    return isinstance(event, RoundCommitted) and event.decision.stage == 1


def known(started: RestoredRun) -> tuple[object, ...]:
    tables = started.index.known, started.decisions.numbers, started.ledger.known
    return started.state, *tables, started.store.end


async def test_a_start_from_a_snapshot_knows_what_one_from_the_log_knows(
    tmp_path: Path, run: tuple[RunSpec, list[Event]]
) -> None:
    spec, events = run
    half = len(events) // 2
    async with start(tmp_path, spec) as first:
        go_on(first, events[:half])
    assert half - 2 * BETWEEN < rows_of_snapshot(tmp_path, spec) < half
    assert not tmp_path.joinpath(SNAPSHOT_FILE).stat().st_mode & 0o077
    async with start(tmp_path, spec) as second:
        go_on(second, events[half:])
    assert len(events) - 2 * BETWEEN < rows_of_snapshot(tmp_path, spec) < len(events)
    async with start(tmp_path, spec) as third:
        from_snapshot = known(third)
    tmp_path.joinpath(SNAPSHOT_FILE).unlink()
    async with start(tmp_path, spec) as fourth:
        assert known(fourth) == from_snapshot
        assert fourth.state == replay(State(spec, spec.name), events)
    write_history(tmp_path / "expected.sqlite", spec, events)
    assert dump(tmp_path / HISTORY_FILE) == dump(tmp_path / "expected.sqlite")


async def test_a_history_goes_on_from_what_it_has_kept(
    tmp_path: Path, run: tuple[RunSpec, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, events = run
    await whole(tmp_path, (spec, events[:-5]))
    read, former = list[int](), SqliteStore.read

    def note(self: SqliteStore, first: int, last: int, kinds: Sequence[type[Event]] = ()) -> object:
        read.append(first)
        return former(self, first, last, kinds)

    monkeypatch.setattr(SqliteStore, "read", note)
    async with start(tmp_path, spec) as second:
        go_on(second, events[-5:])
    assert min(read) > len(events) - 3 * BETWEEN
    write_history(tmp_path / "expected.sqlite", spec, events)
    assert dump(tmp_path / HISTORY_FILE) == dump(tmp_path / "expected.sqlite")


@pytest.mark.parametrize("builder", [b"", b"damaged"])
async def test_a_history_without_what_it_has_kept_reads_the_log(
    tmp_path: Path, run: tuple[RunSpec, list[Event]], builder: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, events = run
    with monkeypatch.context() as patch:
        patch.setattr(history_writer, "pack", lambda *_: builder)
        await whole(tmp_path, (spec, events[:-5]))
    assert progress_of(tmp_path / HISTORY_FILE).builder == builder
    async with start(tmp_path, spec) as second:
        go_on(second, events[-5:])
    write_history(tmp_path / "expected.sqlite", spec, events)
    assert dump(tmp_path / HISTORY_FILE) == dump(tmp_path / "expected.sqlite")


@pytest.mark.parametrize("at_a_decision", [True, False])
async def test_a_builder_that_cannot_go_on_is_made_anew(
    tmp_path: Path, run: tuple[RunSpec, list[Event]], at_a_decision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a start that finds it wrong in earlier events, or by the next if it finds that in new ones."""
    spec, events = run
    decided = [number for number, each in enumerate(events[:-60], start=1) if ends_a_round(each)][-1]
    stopped = decided if at_a_decision else decided + 9
    former = history_writer.pack

    def without_peers(kind: type[object], kept: Any) -> bytes:
        return former(kind, replace(kept, builder=BuilderRecord(round_number=kept.builder.round_number)))

    with monkeypatch.context() as patch:
        patch.setattr(history_writer, "pack", without_peers)
        await whole(tmp_path, (spec, events[:stopped]))
    async with start(tmp_path, spec) as second:
        go_on(second, events[stopped:])
        second.history.close(None)
        assert ("internal error" in second.history.problem) == at_a_decision
    async with start(tmp_path, spec) as third:
        third.history.complete()
        assert not third.history.problem
    write_history(tmp_path / "expected.sqlite", spec, events)
    assert dump(tmp_path / HISTORY_FILE) == dump(tmp_path / "expected.sqlite")


async def test_a_snapshot_that_is_not_of_this_log_is_not_used(
    tmp_path: Path, run: tuple[RunSpec, list[Event]], caplog: pytest.LogCaptureFixture
) -> None:
    """It is damaged, of another key, or the log was restored from an older copy and has gone on otherwise."""
    caplog.set_level(logging.INFO)
    spec, events = run
    logs = {"new": events, "old": events[:150], "other": [*events[:150], events[0], *events[150:]]}
    for name, log in logs.items():
        (tmp_path / name).mkdir()
        await whole(tmp_path / name, (spec, log))
    data = (tmp_path / "new" / SNAPSHOT_FILE).read_bytes()
    for name in ("old", "other"):
        (tmp_path / name / SNAPSHOT_FILE).write_bytes(data)
    (tmp_path / "new" / SNAPSHOT_FILE).write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    for name, cause in (("old", "not of this log"), ("other", "not of this log"), ("new", "damaged")):
        caplog.clear()
        async with start(tmp_path / name, spec) as started:
            assert started.state == replay(State(spec, spec.name), logs[name])
            assert started.index.length == started.ledger.rows == started.store.end[0] == len(logs[name])
        assert cause in caplog.text
        assert "the whole log is read" in caplog.text


async def test_a_coordinator_writes_snapshots_and_starts_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(snapshots, "ROWS_BETWEEN", 10)
    a, b = keyed(0), keyed(1)
    async with running(started_and_attested(2).spec, tmp_path) as first:
        await first.join(a)
        await first.join(b)
        for number in (1, 2):
            for stage in range(2):
                await first.settle(stage, number, a, b)
        before = (await first.status()).rounds_decided
    assert (tmp_path / SNAPSHOT_FILE).exists()
    (tmp_path / f"{SNAPSHOT_FILE}.new").write_bytes(b"left by a killed coordinator")
    monkeypatch.setattr(snapshots, "ROWS_BETWEEN", 10_000)
    async with running(started_and_attested(2).spec, tmp_path, first.address) as second:
        assert "goes on from its snapshot" in caplog.text
        assert (await second.status()).rounds_decided == before == 2
        for stage in range(2):
            await second.settle(stage, 3, a, b)
        assert (await second.status()).rounds_decided == 3
