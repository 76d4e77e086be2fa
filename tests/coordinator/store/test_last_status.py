"""The last status of a run from the folder of its coordinator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from coordinator.store.last_status import has_log, last_status, newest_measurements
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Measurement
from tests.builders import keyed
from tests.support.certificates import authority
from tests.support.coordinator_run import Run, play_round, started

COORDINATOR = keyed(9)


def measured(round_number: int, loss: float = 2.0) -> Measurement:
    return Measurement(
        keyed(0).peer, round_number, 0, 0, loss, loss, complete=True, tokens=64, inner_seconds=2.0
    )


@pytest.fixture
def run() -> Run:
    run = started(replicas=2, stages=2, rounds=5)
    for _ in range(2):
        run.now += 20
        play_round(run)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "authority.pem").write_bytes(authority().pem)
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for round_number, loss in ((0, 5.0), (1, 3.0), (2, math.nan)):
            metrics.record_measurement(1.0, measured(round_number, loss))
        metrics.write(1.0, "finished", {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "measurement", "peer"')  # a coordinator was killed here
    return tmp_path


def store_in(folder: Path, run: Run) -> SqliteStore:
    store = SqliteStore(folder / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign)
    store.begin(run.spec.canonical_json)
    store.append(run.events)
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_status_is_that_of_the_newest_event(folder: Path, run: Run) -> None:
    store_in(folder, run).close()
    status = last_status(folder)
    assert (status.rounds_decided, status.round_number) == (2, 3)
    assert status.stage_rounds_committed == 4
    assert status.tokens_committed > 0
    assert status.time == run.state.latest_at
    assert status.run == authority().run_id(run.spec)
    assert {peer.peer: peer.round_number for peer in status.peers} == {keyed(0).peer: 2, keyed(1).peer: 0}
    assert math.isnan(status.figures[0].validation_loss)


def test_a_log_that_a_coordinator_holds_is_read_and_not_disturbed(folder: Path, run: Run) -> None:
    """What the coordinator has not moved from the write-ahead file counts, too."""
    *before, last = run.events
    store = store_in(folder, replace_events(run, before))
    found = contents(folder)
    assert "coordinator.sqlite-wal" in found
    assert last_status(folder).rounds_decided <= 2
    assert contents(folder) == found
    store.append([last])
    assert last_status(folder).time == run.state.latest_at
    store.close()


def replace_events(run: Run, events: list[object]) -> Run:
    other = Run(run.spec)
    other.events = events  # type: ignore[assignment]
    return other


def test_a_coordinator_can_start_after_the_folder_was_read(folder: Path, run: Run) -> None:
    store_in(folder, run).close()
    before = contents(folder)
    last_status(folder)
    assert contents(folder) == before
    store = SqliteStore(folder / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign)
    assert len(store.load()[1]) == len(run.events)
    store.close()


def test_without_the_authority_the_run_has_the_name_of_its_specification(folder: Path, run: Run) -> None:
    store_in(folder, run).close()
    for name in ("authority.pem", "metrics.jsonl"):
        (folder / name).unlink()
    status = last_status(folder)
    assert (status.run, status.measurements) == (run.spec.name, ())


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough for a header" * 20])
def test_what_is_no_log_is_one_message(folder: Path, content: bytes) -> None:
    assert not has_log(folder)
    (folder / "coordinator.sqlite").write_bytes(content)
    with pytest.raises(HetnodeError) as error:
        last_status(folder)
    assert error.value.code is ErrorCode.STORE_CORRUPT
    assert newest_measurements(folder / "nowhere") == {}
