"""Snapshots of the state: equal when they are read, refused when they are not of this run and program."""

from __future__ import annotations

import zlib

import pytest

from coordinator.state import state_snapshot
from coordinator.state.record_codec import pack
from coordinator.state.state_snapshot import StateSnapshot, read_snapshot, write_snapshot
from protocol.types import PeerId
from tests.builders import keyed
from tests.support.coordinator_run import Run, play_rounds, started_and_attested

A, B = keyed(0), keyed(1)
HASH = bytes(range(32))


@pytest.fixture(scope="module")
def run() -> Run:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 4)
    return run


@pytest.fixture(scope="module")
def written(run: Run) -> bytes:
    return write_snapshot(StateSnapshot(7, HASH, run.state), A.sign)


def read(data: bytes, run: Run, coordinator: PeerId = A.peer) -> StateSnapshot:
    return read_snapshot(data, coordinator, run.spec.hash, run.state.run)


def test_a_snapshot_has_the_state_and_its_place_in_the_log(run: Run, written: bytes) -> None:
    found = read(written, run)
    assert found == StateSnapshot(7, HASH, run.state)
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


def test_a_snapshot_of_other_rules_or_records_is_refused(
    run: Run, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state_snapshot, "RULES", state_snapshot.RULES + 1)
        with pytest.raises(ValueError, match="another version"):
            read(written, run)
    monkeypatch.setattr(state_snapshot, "layout", lambda _: "another")
    with pytest.raises(ValueError, match="another version"):
        read(written, run)


def test_a_state_beyond_the_limit_is_neither_written_nor_read(
    run: Run, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_snapshot, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        write_snapshot(StateSnapshot(7, HASH, run.state), A.sign)
    with pytest.raises(ValueError, match="damaged"):
        read(written, run)


def test_numbers_and_texts_take_little_room(run: Run, written: bytes) -> None:
    plain = pack(StateSnapshot, StateSnapshot(7, HASH, run.state))
    assert len(written) < len(plain) < 40_000
    assert len(zlib.compress(plain, 9)) > 0.8 * len(written)
