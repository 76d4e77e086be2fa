"""How long the open round and the run still take, by the status."""

from __future__ import annotations

import pytest

from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Heartbeat
from coordinator.run.state.state import KEPT_DURATIONS, State
from coordinator.status.run_status import run_status
from protocol.status import CauseCode, RunPhase, RunStatus, Wait
from protocol.types import Role
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import Run, joined_run, leave, measure, settle

A, B = (keyed(i) for i in range(2))
ROUNDS = 10


@pytest.fixture
def run() -> Run:
    """Two full replicas of one stage."""
    return joined_run(spec_of(1, 2, rounds=ROUNDS), Role.REPLICA, Role.REPLICA)


def rounds(run: Run, *seconds: float) -> None:
    for each in seconds:
        run.now += each
        settle(run, 0, run.state.current_round, (A, B))


def shown(run: Run) -> RunStatus:
    return run_status(run.state, (), run.now, 0.0)


def test_nothing_is_known_before_the_run() -> None:
    spec = spec_of(1, 2, rounds=ROUNDS)
    status = shown(Run(spec))
    assert (status.round_number, status.round_seconds) == (0, 0.0)
    assert (status.expected_round_seconds, status.remaining_seconds) == (None, None)


def test_the_first_round_is_expected_from_the_measured_speed(run: Run) -> None:
    assert shown(run).expected_round_seconds is None
    measure(run, A, flops=1e6)
    measure(run, B, flops=1e6)
    status = shown(run)
    assert status.expected_round_seconds
    assert status.remaining_seconds == pytest.approx(ROUNDS * status.expected_round_seconds)


def test_later_rounds_are_expected_from_the_last_ones(run: Run) -> None:
    rounds(run, 100, 10, 12)
    run.now += 5
    status = shown(run)
    assert (status.round_number, status.round_seconds, status.expected_round_seconds) == (4, 5.0, 12.0)
    assert status.remaining_seconds == pytest.approx(7 * 12 - 5)
    run.now += 60  # longer than expected
    assert shown(run).remaining_seconds == pytest.approx(6 * 12)


def test_only_the_last_rounds_tell(run: Run) -> None:
    rounds(run, *[40] * 3, *[20] * KEPT_DURATIONS)
    assert shown(run).expected_round_seconds == 20
    assert replay(State(run.spec, run.state.run), run.events).round_durations == run.state.round_durations


def test_a_run_that_cannot_go_on_has_no_end_in_sight(run: Run) -> None:
    rounds(run, 10)
    leave(run, A, B)
    status = shown(run)
    assert (status.expected_round_seconds, status.remaining_seconds) == (10.0, None)


def test_after_the_last_round_nothing_remains(run: Run) -> None:
    rounds(run, *[10] * ROUNDS)
    status = shown(run)
    assert status.phase is RunPhase.FINISHED
    assert (status.round_seconds, status.expected_round_seconds, status.remaining_seconds) == (0.0, None, 0.0)


def test_what_a_peer_waits_for_is_forgotten_when_it_leaves(run: Run) -> None:
    run.accept(Heartbeat(A.peer, 1, 0, waits=(Wait.NEIGHBOUR,)))
    assert [peer.waits for peer in shown(run).peers] == [(Wait.NEIGHBOUR,), ()]
    leave(run, A)
    assert [peer.waits for peer in shown(run).peers] == [(), ()]


def test_a_peer_without_an_assignment_is_told_why() -> None:
    run = joined_run(spec_of(1, 2, rounds=ROUNDS), *[Role.REPLICA] * 3)
    *training, late = shown(run).peers
    assert not any(peer.cause for peer in training)
    assert late.cause is not None
    assert (late.cause.code, late.cause.stages) == (CauseCode.FOLLOWS, (0,))
    leave(run, keyed(2))
    assert shown(run).peers[-1].cause is None
