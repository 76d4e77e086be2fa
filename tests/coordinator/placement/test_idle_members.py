"""Members that only send heartbeats keep no place from those that train."""

from __future__ import annotations

from coordinator.placement.reservations import Vacancies
from coordinator.placement.rules import is_overdue
from coordinator.run.state.commands import Leave
from protocol.types import Role
from tests.builders import Keyed, keyed
from tests.support.coordinator_run import (
    Run,
    attest,
    members_by_replica,
    pass_time,
    play_round,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F = (keyed(i) for i in range(6))
SHORT = {"timing__link": 20.0, "timing__match_window": 10.0}


def running(replicas: int = 1, pipelines: int = 0) -> Run:
    run = started_and_attested(replicas, pipelines, rounds=60, **SHORT)
    play_round(run)
    return run


def stage(run: Run, peer: Keyed) -> None:
    run.accept(peer.join(run.spec, Role.STAGE))


def train(run: Run, honest: tuple[Keyed, ...], idle: tuple[Keyed, ...], seconds: float) -> None:
    """`honest` peers follow; the time of a round passes, in which the `idle` ones send heartbeats."""
    end = run.now + seconds
    while run.now < end:
        for peer in honest:
            if peer.peer in run.state.reservations and not run.state.takes_part(
                peer.peer, run.state.current_round
            ):
                attest(run, peer)
        pass_time(run, 5, A, *honest, *idle)
        play_round(run)


def members(run: Run) -> list[list[str]]:
    return [each for each in members_by_replica(run).values() if len(each) > 1]


def test_a_newcomer_takes_the_place_of_one_that_never_attests() -> None:
    run = running()
    stage(run, B)  # idle
    stage(run, C)
    train(run, (C,), (B,), 40)
    assert not members(run)
    stage(run, D)
    assert slot_of(run, D) == (1, 0)
    train(run, (C, D), (B,), 20)
    assert members(run) == [[D.peer, C.peer]]


def test_a_spare_that_waits_takes_it_as_soon_as_it_ends() -> None:
    run = running()
    stage(run, B)  # idle
    stage(run, C)
    stage(run, D)
    train(run, (C, D), (B,), 60)
    assert members(run) == [[D.peer, C.peer]]


def test_two_that_wait_beside_idle_members_form_a_pipeline() -> None:
    run = running()
    for peer in (B, C, D, E):  # C and E are idle: both honest peers have stage 0
        stage(run, peer)
    assert [slot_of(run, peer) for peer in (B, D)] == [(1, 0), (2, 0)]
    train(run, (B, D), (C, E), 90)
    assert [sorted(each) for each in members(run)] == [sorted([B.peer, D.peer])]


def test_two_that_wait_for_lost_members_form_a_pipeline() -> None:
    run = running()
    for peer in (B, C, D, E):
        stage(run, peer)
    for peer in (C, E):
        run.accept(Leave(peer.peer, "interrupted"))
    train(run, (B, D), (), 60)
    assert [sorted(each) for each in members(run)] == [sorted([B.peer, D.peer])]


def test_one_that_attested_once_and_then_no_more_loses_its_place() -> None:
    run = running()
    stage(run, B)
    attest(run, B)
    train(run, (), (B,), 20)
    stage(run, C)
    train(run, (C,), (B,), 40)
    stage(run, D)
    train(run, (C, D), (B,), 20)
    assert members(run) == [[D.peer, C.peer]]


def test_many_idle_members_before_them_do_not_stop_two_honest_ones() -> None:
    run = running()
    idle = tuple(keyed(i) for i in range(10, 18))
    for peer in idle:
        stage(run, peer)
    stage(run, B)
    stage(run, C)
    train(run, (B, C), idle, 240)
    assert [sorted(each) for each in members(run)] == [sorted([B.peer, C.peer])]


def test_who_is_slow_keeps_its_place_while_nobody_waits_for_it() -> None:
    run = running()
    stage(run, B)
    train(run, (), (B,), 90)
    assert slot_of(run, B) == (1, 0)
    stage(run, C)
    attest(run, B)
    attest(run, C)
    train(run, (B, C), (), 10)
    assert members(run) == [[B.peer, C.peer]]


def test_who_follows_is_never_overdue() -> None:
    run = running()
    stage(run, B)
    train(run, (B,), (), 120)
    assert not is_overdue(run.state, run.state.peers[B.peer], run.now)
    assert not any(each.slot == (1, 0) for each in Vacancies(run.state, run.now).vacant)


def test_idle_members_do_not_hold_a_run_without_another_replica() -> None:
    run = started_and_attested(0, 1, rounds=60, **SHORT)
    play_round(run)
    for peer in (C, D):
        run.accept(peer.join(run.spec, Role.STAGE))  # both idle
    run.accept(Leave(B.peer, "interrupted"))
    run.accept(E.join(run.spec, Role.STAGE))
    attest(run, E)
    pass_time(run, 60, A, C, D, E)
    attest(run, E)
    pass_time(run, 10, A, C, D, E)
    play_round(run)
    assert members(run) == [[A.peer, E.peer]]
