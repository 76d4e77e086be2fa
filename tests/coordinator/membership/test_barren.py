"""A pipeline that withholds its payloads while it claims to train is parted: its members meet others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.membership.silence import MOST_WITHHELD_ROUNDS
from coordinator.placement.rules import may_be_neighbours
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import (
    Attest,
    Await,
    Leave,
    Offer,
    Report,
    ReportLink,
    UpdateAddresses,
)
from coordinator.run.state.events import LinkFailed, PeerRetreated
from coordinator.run.state.state import State
from coordinator.status.causes import peer_cause
from coordinator.status.document import document
from coordinator.status.run_status import run_status
from protocol.status import CauseCode, ReplicaStatus
from protocol.types import Reachability, Role
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    codes_of,
    members_by_replica,
    play_rounds,
    started_and_attested,
)

A, B, C, D, E = (keyed(i) for i in range(5))
"""A is a full replica; B and C, and D and E, are pipelines where a run has them."""


def withheld_round(run: Run, *withholding: Keyed) -> None:
    """The members `withholding` end their phase without a payload; all others deliver and follow."""
    number, plan = run.state.current_round, run.state.plans[-1]
    names = {peer.peer for peer in withholding}
    payloads = dict[int, tuple[Keyed, ...]]()
    for stage in range(run.spec.swarm.stages):
        for replica in plan.replicas:
            host = next(peer for peer in ALL if peer.peer == replica.host_of(stage).peer)
            if host.peer in names:
                run.accept(Await(host.peer, stage, number, epoch=plan.epoch))
            elif run.state.takes_part(host.peer, number):
                payloads[stage] = (*payloads.get(stage, ()), host)
    run.now += 30
    for stage, hosts in payloads.items():
        told = [host.payload(run.spec, stage, number) for host in hosts]
        for host, payload in zip(hosts, told, strict=True):
            run.accept(Offer(host.peer, payload))
        for host in hosts:
            run.accept(Report(host.peer, stage, number, tuple(told)))
    for peer in ALL:
        if (reservation := run.state.reservations.get(peer.peer)) is not None:
            for stage in reservation.stages:
                run.accept(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))
    assert run.state.current_round == number + 1


def status_of(run: Run, index: int) -> ReplicaStatus:
    status = run_status(run.state, [], run.now, 0.0)
    return next(each for each in status.replicas if each.index == index)


def test_the_status_says_since_when_a_replica_sends_nothing() -> None:
    run = started_and_attested(1, 1)
    play_rounds(run, 2)
    assert status_of(run, 1).cause is None
    withheld_round(run, B, C)
    withheld_round(run, B, C)
    cause = status_of(run, 1).cause
    assert cause is not None
    assert (cause.code, cause.replicas, cause.round_number) == (CauseCode.NO_PAYLOAD, (1,), 2)
    shown = document(run_status(run.state, [], run.now, 0.0))["replicas"][1]["cause"]
    assert (shown["code"], shown["round_number"]) == ("no-payload", 2)
    assert shown["text"] == "replica-1 has sent no payload since round 2"
    play_rounds(run)
    assert status_of(run, 1).cause is None, "it delivers again"


def test_a_pipeline_that_withholds_is_left_out_and_its_members_are_apart() -> None:
    run = started_and_attested(1, 1)
    play_rounds(run, 2)
    for _ in range(MOST_WITHHELD_ROUNDS + 1):
        withheld_round(run, B, C)
    assert members_by_replica(run) == {0: [A.peer]}, "there is nobody else with whom they could train"
    assert "apart" in run.state.plans[-1].reason
    assert not may_be_neighbours(run.state, run.state.peers[B.peer], run.state.peers[C.peer])
    assert not any(isinstance(event, PeerRetreated) for event in run.events)
    causes = codes_of(peer_cause(run.state, C.peer))
    assert causes[-1] is CauseCode.NO_PAYLOAD
    assert "no payload since round 2" in str(document(run_status(run.state, [], run.now, 0.0)))


def test_the_members_of_two_pipelines_change_partners() -> None:
    run = started_and_attested(1, 2)
    play_rounds(run, 2)
    for _ in range(MOST_WITHHELD_ROUNDS + 1):
        withheld_round(run, B, C, D, E)
    for _ in range(3):
        withheld_round(run)
    formed = {tuple(members) for members in members_by_replica(run).values()}
    assert formed == {(A.peer,), (B.peer, E.peer), (D.peer, C.peer)}


def test_of_a_pipeline_that_never_delivers_only_the_member_that_goes_on_so_rests() -> None:
    """C spoils each pipeline in which it is. B and D are honest."""
    run = started_and_attested(1, 2)
    play_rounds(run, 2)
    spoiled = 0
    for _ in range(40 - run.state.current_round):
        replicas = [
            each for each in run.state.plans[-1].replicas if any(m.peer == C.peer for m in each.members)
        ]
        names = [member.peer for each in replicas for member in each.members]
        spoiled += bool(names)
        withheld_round(run, *(peer for peer in ALL if peer.peer in names))
    assert spoiled <= 20, "the rests of C become longer"
    assert run.state.failures[C.peer][0] >= 4
    assert max(run.state.failures.get(peer.peer, (0, 0))[0] for peer in (B, D, E)) <= 1


def test_they_change_partners_with_a_pipeline_that_delivers() -> None:
    run = started_and_attested(1, 2)
    play_rounds(run, 2)
    for _ in range(MOST_WITHHELD_ROUNDS + 1):
        withheld_round(run, B, C)
    assert members_by_replica(run) == {0: [A.peer], 1: [B.peer, E.peer], 2: [D.peer, C.peer]}
    withheld_round(run)
    assert not run.state.failures, "all deliver, so nobody was at fault"


def test_a_pipeline_that_delivers_in_every_second_round_only_stays() -> None:
    run = started_and_attested(1, 1)
    for _ in range(8):
        withheld_round(run, B, C)
        withheld_round(run)
    assert len(members_by_replica(run)) == 2


def test_a_full_replica_has_no_neighbours_to_part_it_from() -> None:
    run = started_and_attested(2)
    for _ in range(6):
        withheld_round(run, B)
    assert len(members_by_replica(run)) == 2
    cause = status_of(run, 1).cause
    assert cause is not None
    assert cause.code is CauseCode.NO_PAYLOAD


def test_the_only_replica_goes_on_with_the_members_that_it_has() -> None:
    run = started_and_attested(0, 1)
    play_rounds(run, 2)
    for _ in range(6):
        number, epoch = run.state.current_round, run.state.plans[-1].epoch
        for stage, host in enumerate((A, B)):
            run.accept(Await(host.peer, stage, number, epoch=epoch))
        if run.state.current_round == number:
            run.now += 5
            for stage in (0, 1):
                run.accept(
                    Attest((A, B)[stage].peer, stage, number - 1, "stage", anchor_of(stage, number - 1))
                )
    assert members_by_replica(run) == {0: [A.peer, B.peer]}


def test_a_refused_frame_parts_both_ends_and_names_them() -> None:
    run = started_and_attested(1, 2)
    play_rounds(run, 2)
    why = "its backward frame has values that are not finite"
    (event,) = run.accept(ReportLink(B.peer, run.state.plans[-1].epoch, C.peer, "", why))
    assert isinstance(event, LinkFailed)
    assert run.state.failures[B.peer] == run.state.failures[C.peer] == (1, 3)
    text = str(document(run_status(run.state, [], run.now, 0.0)))
    assert "frame-refused" in text
    assert why in text
    withheld_round(run)
    assert [B.peer, C.peer] not in members_by_replica(run).values()


@pytest.mark.parametrize("again", ["joins", "moves"])
def test_nobody_ends_it_by_coming_back(again: str) -> None:
    run = started_and_attested(1, 1)
    play_rounds(run, 2)
    run.accept(ReportLink(B.peer, run.state.plans[-1].epoch, C.peer, "", "why"))
    if again == "joins":
        run.accept(Leave(C.peer, "interrupted"))
        run.accept(C.join(run.spec, Role.STAGE))
    else:
        run.accept(UpdateAddresses(C.peer, "h:1", Reachability.OPEN, "h:1", ""))
    assert not may_be_neighbours(run.state, run.state.peers[B.peer], run.state.peers[C.peer])


def test_a_newcomer_takes_the_place_of_the_member_that_is_apart() -> None:
    run = started_and_attested(1, 1)
    play_rounds(run, 2)
    for _ in range(MOST_WITHHELD_ROUNDS + 1):
        withheld_round(run, B, C)
    run.accept(D.join(run.spec, Role.STAGE))
    attest(run, D)
    withheld_round(run)
    withheld_round(run)
    assert [B.peer, D.peer] in members_by_replica(run).values()


def test_a_replay_of_the_log_gives_the_same_state() -> None:
    run = started_and_attested(1, 1)
    for _ in range(5):
        withheld_round(run, B, C)
    again = replay(State(run.spec, run.spec.name), run.events)
    assert replace(again, last_seen=run.state.last_seen) == run.state
