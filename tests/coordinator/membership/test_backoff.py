"""A replica that gives up again and again rests longer each time: the others are held up ever less."""

from __future__ import annotations

from coordinator.run.state.commands import Retreat
from coordinator.status.causes import peer_cause
from protocol.status import CauseCode
from tests.builders import keyed
from tests.support.coordinator_run import Run, attest, codes_of, pass_time, play_round, started

A, C = keyed(0), keyed(2)


def gives_up(run: Run) -> None:
    run.accept(Retreat(C.peer, run.state.plans[-1].epoch, "neighbour-lost"))


def rounds_until_seated(run: Run) -> int:
    waited = 0
    while not run.state.takes_part(C.peer, run.state.current_round):
        attest(run, C)
        play_round(run, followers=(C,))
        waited += 1
    return waited


def test_each_failure_in_a_row_makes_a_replica_rest_longer() -> None:
    run = started(3, rounds=60)
    play_round(run)
    pauses = []
    for _ in range(4):
        gives_up(run)
        pauses.append(rounds_until_seated(run))
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2
    assert pauses[-1] >= 8


def test_a_payload_in_a_commit_ends_the_count() -> None:
    run = started(3, rounds=60)
    for _ in range(2):
        play_round(run)
        gives_up(run)
        rounds_until_seated(run)
    play_round(run)
    assert not run.state.retreats


def test_a_peer_in_backoff_sees_the_reason() -> None:
    run = started(3, rounds=60)
    play_round(run)
    for _ in range(2):
        gives_up(run)
        rounds_until_seated(run)
    gives_up(run)
    attest(run, C)
    play_round(run, followers=(C,))
    assert codes_of(peer_cause(run.state, C.peer))[-1] is CauseCode.MEMBER_RESTS


def test_the_only_replica_tries_again_at_once() -> None:
    run = started(1, rounds=60)
    for _ in range(4):
        run.accept(Retreat(A.peer, run.state.plans[-1].epoch, "payload-unavailable"))
        attest(run, A)
        pass_time(run, 3 * run.spec.timing.heartbeat, A)
        assert run.state.takes_part(A.peer, run.state.current_round)
