"""Peers that move to other stages: when, where to, and what stops a move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.rules import links_between
from coordinator.run.state.commands import Attest
from coordinator.run.state.events import AssignmentReserved, PeerJoined, PlanAdopted
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.types import Member, Plan, Replica, ReservedAssignment, Role, StageRange
from tests.builders import spec_of
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    join,
    leave,
    members_by_replica,
    pass_time,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F = ALL[:6]


def formed(*layouts: Sequence[int], **more: Any) -> Run:
    """A run with pipelines of these layouts: the first stage of each member, with the peers in order."""
    stages = 3
    run = Run(spec_of(stages, 0, len(layouts), 40, swarm__members=2, **more))
    peers, replicas = iter(ALL), []
    for index, firsts in enumerate(layouts):
        members = []
        for first, stop in zip(firsts, [*firsts[1:], stages], strict=True):
            join = next(peers).join(run.spec, Role.STAGE)
            run.apply(PeerJoined(run.now, join.peer, join.role, join.capacity, join.endpoint))
            members.append(Member(join.peer, StageRange(first, stop), join.endpoint))
        replicas.append(Replica(index, tuple(members), links_between(members, run.spec.link.k)))
    run.apply(PlanAdopted(run.now, Plan(1, 1, 0, tuple(replicas), "a test")))
    for peer in ALL:
        if peer.peer in run.state.reservations:
            attest(run, peer)
    return run


def replaced(run: Run, **fields: Any) -> Run:
    run.state = replace(run.state, **fields)
    return run


class TestMoves:
    def run_with_hole(self, **more: Any) -> Run:
        """Replica 1 of three has lost its last member; two spares have the first stages."""
        run = started_and_attested(1, 1, stages=3, **more)
        join(run, E, F)
        play_rounds(run)
        leave(run, D)
        return run

    def test_a_spare_moves_if_no_other_can_replace_the_member(self) -> None:
        run = self.run_with_hole()
        assert slot_of(run, F) == (2, 1), "a lost peer may come back within the round"
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer]}
        assert run.state.reservations[F.peer] == ReservedAssignment(F.peer, 1, 2, StageRange(2, 3)), (
            "the last peer to join moves"
        )
        assert slot_of(run, E) == (2, 0)
        play_rounds(run, 2)
        assert members_by_replica(run)[1] == [B.peer, C.peer, F.peer]

    def test_a_peer_that_is_back_within_the_round_finds_its_reservation(self) -> None:
        run = self.run_with_hole()
        join(run, D)
        play_rounds(run)
        assert (slot_of(run, D), slot_of(run, F)) == ((1, 2), (2, 1))

    def test_a_peer_does_not_move_twice_within_settle_rounds(self) -> None:
        run = self.run_with_hole()
        play_rounds(run)
        join(run, D)
        assert slot_of(run, D) == (2, 1), "it gets the former assignment of the peer that moved"
        play_rounds(run)
        leave(run, B, D)
        play_rounds(run)
        assert run.state.reservations[F.peer].stages == StageRange(2, 3)
        assert members_by_replica(run)[1] == [E.peer, C.peer, F.peer]

    def test_no_peer_moves_beyond_its_memory(self) -> None:
        run = started_and_attested(1, 1, stages=3, **{"inner.microbatch_size": 1})
        needed = memory_needed(run.spec, StageRange(1, 2), 2, "cpu")
        assert needed < memory_needed(run.spec, StageRange(2, 3), 1, "cpu")
        join(run, E)
        join(run, F, memory_bytes=int(needed / 0.9) + 2)
        play_rounds(run)
        leave(run, D)
        play_rounds(run)
        assert (slot_of(run, E), slot_of(run, F)) == ((1, 2), (2, 1))

    def test_no_peer_moves_to_or_away_from_stages_without_another_host(self) -> None:
        run = started_and_attested(0, 2)
        play_rounds(run, 3)
        leave(run, A, C)
        pass_time(run, 60, B, D)
        assert not any(isinstance(event, AssignmentReserved) for event in run.events)
        assert run.state.current_round == 4

    def test_while_nothing_trains_a_pipeline_is_filled_with_peers_of_others(self) -> None:
        run = formed((0, 1), (0, 2))
        play_rounds(run, 8)
        leave(run, A, D)
        pass_time(run, 10, B, C)
        assert run.state.reservations[C.peer] == ReservedAssignment(C.peer, 0, 0, StageRange(0, 1))
        assert run.state.reservations[B.peer].stages == StageRange(1, 3)
        assert members_by_replica(run) == {0: [C.peer, B.peer]}
        play_rounds(run, 2)

    def test_while_nothing_trains_peers_that_settle_or_rest_move_too(self) -> None:
        run = formed((0, 1), (0, 2))
        run = replaced(run, moved_at={C.peer: 1}, failures={C.peer: (5, 1)})
        leave(run, A, D)
        pass_time(run, 10, B, C)
        assert members_by_replica(run) == {0: [C.peer, B.peer]}

    def test_while_nothing_trains_no_peer_moves_if_equal_stages_are_enough(self) -> None:
        run = formed((0, 1), (0, 1, 2))
        play_rounds(run, 2)
        leave(run, B, C)
        pass_time(run, 10, A, D, E)
        assert members_by_replica(run) == {1: [A.peer, D.peer, E.peer]}
        assert not run.state.moved_at

    def test_while_nothing_trains_no_peer_leaves_stages_without_a_host(self) -> None:
        run = formed((0, 1), (0, 2))
        play_rounds(run, 2)
        leave(run, A, C)
        pass_time(run, 60, B, D)
        assert not run.state.moved_at

    def test_while_nothing_trains_no_peer_moves_if_a_replica_only_has_to_catch_up(self) -> None:
        run = formed((0, 1), (0, 2))
        play_rounds(run, 2)
        leave(run, A)
        run.accept(Attest(D.peer, 2, 2, "stage", "another"))
        pass_time(run, 60, B, C, D)
        assert not run.state.moved_at
        attest(run, D)
        assert members_by_replica(run) == {1: [C.peer, D.peer]}

    def test_a_peer_that_moves_keeps_the_state_of_stages_in_both_assignments(self) -> None:
        run = formed((0, 1), (0, 2))
        play_rounds(run, 2)
        run.apply(AssignmentReserved(run.now, ReservedAssignment(C.peer, 0, 0, StageRange(0, 1))))
        assert run.state.synced[C.peer] == {0: 2}

    def test_a_complete_pipeline_of_spares_trains_if_no_other_replica_does(self) -> None:
        run = started_and_attested(1, 0, grouping__spares=2)
        join(run, B, C)
        play_rounds(run, 2)
        assert list(members_by_replica(run)) == [0]
        leave(run, A)
        pass_time(run, 10, B, C)
        assert members_by_replica(run) == {1: [B.peer, C.peer]}

    def test_members_of_a_broken_pipeline_move_only_after_settle_rounds(self) -> None:
        run = started_and_attested(1, 2)
        leave(run, C, E)
        settle = SETTLE_ROUNDS
        play_rounds(run, settle)
        assert (slot_of(run, B), slot_of(run, D)) == ((1, 0), (2, 0))
        play_rounds(run, 3)
        assert sorted(len(chain) for chain in members_by_replica(run).values()) == [1, 2]

    def test_no_peer_moves_if_a_spare_has_the_stages_of_a_lost_member(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=9)
        join(run, D, E, F)
        leave(run, C)
        play_rounds(run, 2)
        assert members_by_replica(run)[1] == [B.peer, E.peer]
        assert slot_of(run, F) == (3, 0)
