"""Plans while a peer drains: its replica goes on with a spare, or without it."""

from __future__ import annotations

from coordinator.run.state.commands import Drain, Leave, Offer, Report
from protocol.errors import ErrorCode
from protocol.status import RunPhase
from protocol.types import Aborted, Lifecycle, Role
from tests.builders import decisions_in, spec_of
from tests.support.coordinator_run import (
    ALL,
    Run,
    drain,
    join,
    latest_reason,
    leave,
    members_by_replica,
    play_round,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F = ALL[:6]


class TestDraining:
    def test_the_next_plan_is_made_without_it_and_goes_on_with_a_spare(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        play_rounds(run)
        drain(run, C)
        assert run.state.peers[C.peer].lifecycle is Lifecycle.DRAINING
        assert len(run.state.plans) == 1
        play_rounds(run)
        assert len(run.state.decisions[1, 2].entries) == 2, "it has finished its round"
        assert members_by_replica(run)[1] == [B.peer, E.peer]
        assert "which drains" in latest_reason(run)

    def test_its_neighbours_finish_the_round_before_they_become_spares(self) -> None:
        run = started_and_attested(1, 1)
        drain(run, C)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 1)))
        payloads = run.state.round_of(0, 1).group.descriptors
        for peer in (A, B):
            run.accept(Report(peer.peer, 0, 1, payloads))
        assert run.state.plans[-1].from_round == 2
        assert [run.state.peers[peer.peer].lifecycle for peer in (B, C)] == ["training", "draining"]
        for peer in (A, C):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 1, 1)))
        payloads = run.state.round_of(1, 1).group.descriptors
        for peer in (A, C):
            run.accept(Report(peer.peer, 1, 1, payloads))
        assert len(run.state.decisions[1, 1].entries) == 2
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING

    def test_without_a_spare_its_replica_does_not_train(self) -> None:
        run = started_and_attested(1, 1)
        drain(run, C)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer]}
        assert latest_reason(run) == "goes on without replica-1, of which a member drains"

    def test_the_only_replica_keeps_a_draining_member_until_its_successor_is_ready(self) -> None:
        run = started_and_attested(0, 1)
        drain(run, B)
        play_rounds(run, 2)
        assert members_by_replica(run) == {0: [A.peer, B.peer]}
        run.accept(C.join(run.spec, Role.STAGE))
        assert slot_of(run, C) == (0, 1)
        assert B.peer not in run.state.reservations
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer, B.peer]}, "its successor has not caught up yet"
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer, C.peer]}
        run.accept(Leave(B.peer, "drained"))
        play_rounds(run)
        assert not decisions_in(run.events, Aborted)

    def test_the_last_round_is_confirmed_by_a_member_that_drains_without_an_assignment(self) -> None:
        run = started_and_attested(0, 1, rounds=2)
        drain(run, B)
        run.accept(C.join(run.spec, Role.STAGE))
        play_round(run)
        play_round(run)
        assert run.state.phase is RunPhase.FINISHED

    def test_a_drained_peer_that_leaves_after_its_part_is_no_failure(self) -> None:
        run = started_and_attested(1, 1)
        drain(run, B)
        hosts = {0: (A, B), 1: (A, C)}
        payloads = {
            stage: tuple(peer.payload(run.spec, stage, 1) for peer in hosts[stage]) for stage in hosts
        }
        for payload in payloads[0]:
            run.accept(Offer(payload.owner, payload))
        for peer in hosts[0]:
            run.accept(Report(peer.peer, 0, 1, payloads[0]))
        run.accept(Leave(B.peer, "drained"))
        assert not run.state.failures
        run.accept(Offer(A.peer, payloads[1][0]))
        assert run.state.round_of(1, 1).group is None, (
            "the round still waits for the neighbour of the peer that left"
        )
        run.accept(Offer(C.peer, payloads[1][1]))
        for peer in hosts[1]:
            run.accept(Report(peer.peer, 1, 1, payloads[1]))
        assert len(run.state.decisions[1, 1].entries) == 2

    def test_the_round_does_not_wait_for_a_peer_that_leaves_before_its_part(self) -> None:
        run = started_and_attested(1, 1)
        drain(run, C)
        run.accept(Leave(C.peer, "drained"))
        assert run.state.complete_replicas(1) == [run.state.plans[0].replicas[0]]
        assert not run.state.failures

    def test_a_second_drain_changes_nothing(self) -> None:
        run = started_and_attested(1, 1)
        drain(run, C)
        assert run.accept(Drain(C.peer, "again")) == ()
        leave(run, C)
        run.refuse(Drain(C.peer, "late"), ErrorCode.UNKNOWN_PEER)

    def test_a_spare_that_drains_is_no_spare(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        play_rounds(run)
        drain(run, E)
        leave(run, C)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer]}

    def test_a_peer_that_drains_before_the_start_is_not_counted(self) -> None:
        run = Run(spec_of(2, 2))
        run.accept(A.join(run.spec))
        drain(run, A)
        run.accept(B.join(run.spec))
        assert run.state.phase is RunPhase.GATHERING
        run.accept(C.join(run.spec))
        assert members_by_replica(run, 1) == {0: [B.peer], 1: [C.peer]}
