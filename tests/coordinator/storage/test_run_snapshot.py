"""Snapshots of a run: equal when they are read, refused when they are not of this run and program."""

from __future__ import annotations

import zlib

import pytest

from coordinator.explain.log_index import LogIndex
from coordinator.history.ledger import Ledger
from coordinator.state.record_codec import pack
from coordinator.storage import run_snapshot
from coordinator.storage.run_snapshot import RunSnapshot, read_snapshot, write_snapshot
from protocol.types import PeerId
from tests.builders import keyed
from tests.support.coordinator_run import Run, play_rounds, started_and_attested
from tests.support.history import stored

A, B = keyed(0), keyed(1)
HASH = bytes(range(32))


@pytest.fixture(scope="module")
def run() -> Run:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 4)
    return run


def snapshot_of(run: Run) -> RunSnapshot:
    index, ledger = LogIndex(run.state.stages), Ledger(run.spec)
    for event in stored(run.events):
        index.note(event)
        ledger.record(event)
    return RunSnapshot(7, HASH, run.state, index.known, bytes(range(16)), ledger.known)


@pytest.fixture(scope="module")
def written(run: Run) -> bytes:
    return write_snapshot(snapshot_of(run), A.sign)


def read(data: bytes, run: Run, coordinator: PeerId = A.peer) -> RunSnapshot:
    return read_snapshot(data, coordinator, run.spec.hash, run.state.run)


def test_a_snapshot_has_the_state_and_its_place_in_the_log(run: Run, written: bytes) -> None:
    found = read(written, run)
    assert found == snapshot_of(run)
    assert found.state.last_seen == run.state.last_seen  # which the states' equality passes over
    assert list(found.state.peers) == list(run.state.peers)
    plan, assigned = found.state.plans[-1], found.state.assignments[found.state.plans[-1].epoch]
    assert all(any(each.replica is replica for replica in plan.replicas) for each in assigned.values())
    assert write_snapshot(found, A.sign) == written


def test_a_damaged_snapshot_is_refused(run: Run, written: bytes) -> None:
    for size in (0, 10, 92, 100, len(written) - 1):
        with pytest.raises(ValueError, match=r"no snapshot|damaged"):
            read(written[:size], run)
    for place in (0, 30, 90, 95, len(written) // 2, len(written) - 1):
        with pytest.raises(ValueError, match=r"no snapshot|damaged"):
            read(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :], run)


def test_a_snapshot_of_another_key_or_run_is_refused(run: Run, written: bytes) -> None:
    with pytest.raises(ValueError, match="not signed with the key"):
        read(written, run, B.peer)
    for spec_hash, name in ((run.spec.hash, "another"), ("another", run.state.run)):
        with pytest.raises(ValueError, match="belongs to run"):
            read_snapshot(written, A.peer, spec_hash, name)


def test_a_snapshot_of_another_program_is_refused(
    run: Run, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_snapshot, "program_hash", lambda: "another")
    with pytest.raises(ValueError, match="another version"):
        read(written, run)


def test_a_snapshot_beyond_the_limit_is_neither_written_nor_read(
    run: Run, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_snapshot, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        write_snapshot(snapshot_of(run), A.sign)
    with pytest.raises(ValueError, match="damaged"):
        read(written, run)


def test_numbers_and_texts_take_little_room(run: Run, written: bytes) -> None:
    plain = pack(RunSnapshot, snapshot_of(run))
    assert len(written) < len(plain) < 40_000
    assert len(zlib.compress(plain, 9)) > 0.8 * len(written)
