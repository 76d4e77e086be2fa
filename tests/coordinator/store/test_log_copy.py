"""A log is read from a copy, while its coordinator writes it and after that."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.run.state.events import CoordinatorStarted, PeerBanned, RunFinished
from coordinator.store.log_copy import LOG_FILE, has_log, last_status, opened_copy, read_copy
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Measurement
from tests.builders import keyed, spec_of
from tests.support.certificates import authority
from tests.support.coordinator_run import Run, play_round, started

KEY, SPEC = keyed(9), spec_of()


def opened(folder: Path) -> SqliteStore:
    return SqliteStore(folder / LOG_FILE, KEY.peer, KEY.sign)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_log_of_a_running_coordinator_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin(SPEC.canonical_json)
        store.append([CoordinatorStarted(float(number)) for number in range(5000)])
        before = content_of(tmp_path)
        spec, log = read_copy(tmp_path, KEY.peer)
        assert content_of(tmp_path) == before
        assert (spec, len(log)) == (SPEC, 5000)
        store.append([RunFinished(5000.0)])
        assert read_copy(tmp_path, KEY.peer)[1][-1] == RunFinished(5000.0)
    assert len(read_copy(tmp_path, KEY.peer)[1]) == 5001  # stopped


def test_rows_that_move_between_the_files_meanwhile_are_copied_again(tmp_path: Path) -> None:
    """SQLite moves rows from the second file to the first one, and begins the second one anew."""
    moved = []

    def copy(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        if source.name == LOG_FILE and len(moved) < 2:
            moved.append(source)
            # More than SQLite keeps in the second file.
            store.append([PeerBanned(1.0, KEY.peer, os.urandom(10_000).hex()) for _ in range(600)])
            store.append([CoordinatorStarted(0.0)])

    with closing(opened(tmp_path)) as store:
        store.begin(SPEC.canonical_json)
        store.append([CoordinatorStarted(0.0)])
        with opened_copy(tmp_path, KEY.peer, copy) as (_, copied):
            assert len(moved) == 2
            assert copied.end[0] == 1 + 2 * 601


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / LOG_FILE).unlink(), "there is none"),
        (lambda folder: (folder / LOG_FILE).write_bytes(b"no database" * 1000), "not a database"),
        (lambda folder: (folder / LOG_FILE).write_bytes(b""), "has not begun"),
        (lambda folder: (folder / "coordinator.head").unlink(), "is missing"),
    ],
)
def test_a_log_that_is_missing_or_damaged_is_one_message(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin(SPEC.canonical_json)
    damage(tmp_path)
    with pytest.raises(HetnodeError, match=reason) as error:
        read_copy(tmp_path, KEY.peer)
    assert error.value.code is ErrorCode.STORE_CORRUPT


def test_the_log_of_another_coordinator_is_refused(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.begin(SPEC.canonical_json)
    with pytest.raises(HetnodeError, match="not signed with the key of this coordinator"):
        read_copy(tmp_path, keyed(1).peer)


def test_a_run_that_has_not_begun_has_no_log(tmp_path: Path) -> None:
    assert not has_log(tmp_path)
    opened(tmp_path).close()
    with pytest.raises(HetnodeError, match="its run has not begun"):
        read_copy(tmp_path, KEY.peer)


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
def folder(tmp_path: Path, run: Run) -> Path:
    """That of the coordinator of `run`, which was killed while it wrote a measurement."""
    (tmp_path / "authority.pem").write_bytes(authority().pem)
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for round_number, loss in ((0, 5.0), (1, 3.0), (2, math.nan)):
            metrics.record_measurement(1.0, measured(round_number, loss))
        metrics.write(1.0, "finished", {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "measurement", "peer"')
    with closing(opened(tmp_path)) as store:
        store.begin(run.spec.canonical_json)
        store.append(run.events)
    return tmp_path


def test_the_last_status_is_that_of_the_newest_event(folder: Path, run: Run) -> None:
    before = content_of(folder)
    status = last_status(folder)
    assert content_of(folder) == before
    assert (status.rounds_decided, status.round_number) == (2, 3)
    assert status.stage_rounds_committed == 4
    assert status.tokens_committed > 0
    assert status.time == run.state.latest_at
    assert status.run == authority().run_id(run.spec)
    assert {peer.peer: peer.round_number for peer in status.peers} == {keyed(0).peer: 2, keyed(1).peer: 0}
    assert math.isnan(status.figures[0].validation_loss)


def test_without_the_authority_the_run_has_the_name_of_its_specification(folder: Path, run: Run) -> None:
    for name in ("authority.pem", "metrics.jsonl", "coordinator.head"):
        (folder / name).unlink()
    status = last_status(folder)
    assert (status.run, status.measurements) == (run.spec.name, ())
