"""Pipelines of unreliable peers: spares, moves to other stages, draining, repeated failures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.eligibility import is_synced, peer_rests_until
from coordinator.placement.links import links_between
from coordinator.placement.replan import next_plan
from coordinator.state.apply import replay
from coordinator.state.commands import Attest, Drain, Leave, Offer, Report, Retreat
from coordinator.state.events import AssignmentReserved, PeerJoined, PlanAdopted, RoundAborted
from coordinator.state.state import State
from coordinator.state.text import short
from coordinator.status.messages import peer_message
from protocol.errors import ErrorCode
from protocol.status import RunPhase
from protocol.types import (
    Dialer,
    Lifecycle,
    Link,
    Member,
    Plan,
    Replica,
    ReservedAssignment,
    Role,
    StageRange,
)
from tests.builders import Keyed, spec_of
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    join,
    latest_reason,
    leave,
    measure,
    members_by_replica,
    pass_time,
    play_round,
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


def drain(run: Run, peer: Keyed) -> None:
    run.accept(Drain(peer.peer, "a test"))


class TestSpares:
    def test_a_spare_takes_the_assignment_of_a_lost_member_with_the_next_plan(self) -> None:
        run = started_and_attested(1, 1)
        join(run, D, E)
        play_rounds(run)
        assert len(run.state.plans) == 2, "a complete pipeline of spares trains"
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        play_rounds(run)
        leave(run, C)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer, E.peer]}
        assert latest_reason(run) == (
            f"replica-1 goes on with {short(E.peer)} for {short(C.peer)} (stage 1), which is gone"
        )
        assert run.state.peers[E.peer].lifecycle is Lifecycle.TRAINING
        play_rounds(run)
        assert len(run.state.decisions[1, 3].entries) == 2

    def test_a_replaced_peer_is_a_spare_when_it_returns(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        leave(run, C)
        play_rounds(run)
        assert (slot_of(run, E), slot_of(run, C)) == ((1, 1), (2, 1))
        join(run, C)
        assert run.state.reservations[C.peer] == ReservedAssignment(C.peer, 2, 1, StageRange(1, 2))
        leave(run, E)
        play_rounds(run, 2)
        assert members_by_replica(run)[1] == [B.peer, C.peer]

    def test_a_peer_that_is_back_and_in_sync_within_the_round_keeps_its_assignment(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        play_rounds(run)
        leave(run, C)
        join(run, C)
        play_rounds(run)
        assert members_by_replica(run)[1] == [B.peer, C.peer]
        assert latest_reason(run) == "replica-1 returns"

    def test_a_peer_that_is_back_but_lags_behind_is_replaced_by_a_spare(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        join(run, D, E)
        play_rounds(run, 2)
        leave(run, C)
        run.accept(C.join(run.spec, Role.STAGE))
        assert slot_of(run, C) == (1, 1)
        play_rounds(run, asleep=(C,))
        assert members_by_replica(run)[1] == [B.peer, E.peer]
        assert "must catch up" in latest_reason(run)
        assert slot_of(run, C) == (2, 1)

    def test_a_replica_that_trains_never_gives_members_away(self) -> None:
        run = started_and_attested(0, 2)
        leave(run, A)
        play_rounds(run, 3)
        assert members_by_replica(run) == {1: [C.peer, D.peer]}

    def test_a_broken_replica_gives_its_members_to_the_one_before_it(self) -> None:
        run = started_and_attested(1, 2)
        leave(run, B, E)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [D.peer, C.peer]}
        assert f"{short(D.peer)} for {short(B.peer)} (stage 0)" in latest_reason(run)
        assert "goes on without replica-2, which lost a member" in latest_reason(run)

    def test_a_spare_that_has_not_caught_up_gets_no_assignment(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=2)
        play_rounds(run, 2)
        run.accept(D.join(run.spec, Role.STAGE))
        run.accept(E.join(run.spec, Role.STAGE))
        leave(run, C)
        play_rounds(run, asleep=(D, E))
        assert members_by_replica(run) == {0: [A.peer]}

    def test_a_spare_that_its_neighbour_cannot_reach_gets_no_assignment(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=9)
        leave(run, B)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        attest(run, B)
        play_rounds(run)
        join(run, D)
        join(run, E, endpoint="")
        leave(run, C)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer]}

    def test_a_stalled_run_goes_on_with_a_spare_at_once(self) -> None:
        run = started_and_attested(0, 1, grouping__spares=2)
        join(run, C, D)
        play_rounds(run)
        run.now += 10
        leave(run, B)
        assert members_by_replica(run) == {0: [A.peer, D.peer]}
        assert "round 2 starts anew" in latest_reason(run)
        play_rounds(run)
        assert run.state.decisions[1, 2].committed

    def test_a_pipeline_of_spares_trains_only_if_enough_spares_remain(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=1)
        join(run, D, E)
        play_rounds(run, 2)
        assert sorted(members_by_replica(run)) == [0, 1]
        assert "keeps 1 stage peer as spares" in peer_message(run.state, run.spec, D.peer)
        join(run, F)
        play_rounds(run)
        assert members_by_replica(run)[2] == [D.peer, E.peer]


class TestLayouts:
    def wide(self, **more: Any) -> Run:
        """A run of four stages whose one pipeline has two members with two stages each."""
        run = started_and_attested(1, 0, stages=4, **more)
        for peer in (B, C):
            run.accept(peer.join(run.spec, Role.STAGE))
        ends = ((B, StageRange(0, 2)), (C, StageRange(2, 4)))
        members = tuple(Member(peer.peer, stages, "h:1") for peer, stages in ends)
        pipeline = Replica(1, members, (Link(run.spec.link.k, Dialer.UPSTREAM),))
        run.apply(PlanAdopted(run.now, Plan(2, 1, 0, (*run.state.plans[0].replicas, pipeline), "a test")))
        for peer in (B, C):
            attest(run, peer)
        return run

    def test_a_pipeline_of_late_peers_has_the_most_common_layout(self) -> None:
        run = self.wide()
        join(run, D, E)
        play_rounds(run)
        stages = [member.stages for member in run.state.plans[-1].replica_of(D.peer).members]
        assert stages == [StageRange(0, 2), StageRange(2, 4)]

    def test_a_spare_replaces_only_a_member_with_the_same_stages(self) -> None:
        run = self.wide(grouping__spares=9)
        join(run, D, E)
        leave(run, B)
        play_rounds(run)
        assert members_by_replica(run)[1] == [D.peer, C.peer]

    def test_a_peer_gets_no_assignment_beyond_its_memory(self) -> None:
        run = self.wide()
        needed = [
            memory_needed(run.spec, StageRange(0, 2), 2, "cpu"),
            memory_needed(run.spec, StageRange(2, 4), 1, "cpu"),
        ]
        assert needed[0] != needed[1]
        fitting = needed.index(min(needed))
        join(run, D, memory_bytes=int(min(needed) / 0.9) + 2)
        assert slot_of(run, D)[1] == fitting
        run.accept(E.join(run.spec, Role.STAGE, memory_bytes=1000))
        assert E.peer not in run.state.reservations
        assert "lacks the memory" in peer_message(run.state, run.spec, E.peer)
        run.accept(F.join(run.spec, Role.STAGE, memory_bytes=0))
        assert slot_of(run, F)[1] == 1 - fitting, "a peer with unknown memory fits everywhere"


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
        run = started_and_attested(1, 1, stages=3)
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
        settle = run.spec.grouping.settle_rounds
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
        assert not any(isinstance(event, RoundAborted) for event in run.events)

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


class TestRepeatedFailures:
    def lose_and_rejoin(self, run: Run, peer: Keyed, times: int) -> None:
        for _ in range(times):
            leave(run, peer)
            join(run, peer)
            number = run.state.current_round
            play_rounds(run)
            assert run.state.failures[peer.peer][1] == number

    def test_a_peer_that_is_lost_again_and_again_rests_longer_each_time(self) -> None:
        run = started_and_attested(1, 1)
        self.lose_and_rejoin(run, C, 3)
        assert run.state.failures[C.peer] == (3, 3)
        assert peer_rests_until(run.state, C.peer) == 7
        assert "rests until round 7 after 3 failures" in peer_message(run.state, run.spec, C.peer)
        play_rounds(run, 2)
        assert sorted(members_by_replica(run)) == [0]
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer, C.peer]}

    def test_a_spare_takes_its_assignment_while_it_rests(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=9)
        join(run, D)
        self.lose_and_rejoin(run, C, 3)
        join(run, E)
        play_rounds(run)
        assert members_by_replica(run)[1] == [B.peer, E.peer]
        assert (
            f"{short(E.peer)} for {short(C.peer)} (stage 1), which rests until round 7 after 3 failures"
            in latest_reason(run)
        )

    def test_a_committed_round_removes_a_failure(self) -> None:
        run = started_and_attested(1, 1)
        self.lose_and_rejoin(run, C, 1)
        assert members_by_replica(run)[1] == [B.peer, C.peer]
        play_rounds(run)
        assert not run.state.failures

    def test_no_peer_rests_while_no_other_replica_trains(self) -> None:
        run = started_and_attested(0, 1)
        for _ in range(3):
            leave(run, B)
            join(run, B)
            pass_time(run, run.spec.timing.heartbeat, A, B)
            play_rounds(run)
        assert members_by_replica(run)[0] == [A.peer, B.peer]

    def test_a_retreat_from_a_neighbour_that_is_lost_is_no_failure(self) -> None:
        run = started_and_attested(1, 1)
        leave(run, C)
        run.accept(Retreat(B.peer, 1, "neighbour-lost"))
        assert run.state.failures == {C.peer: (1, 1)}


def shuffled(state: State, seed: int) -> State:
    """The same state with every mapping in another order."""
    order = random.Random(seed)

    def mixed(value: object) -> object:
        if isinstance(value, Mapping):
            items = [(key, mixed(each)) for key, each in value.items()]
            order.shuffle(items)
            return dict(items)
        return value

    return replace(state, **{each.name: mixed(getattr(state, each.name)) for each in fields(state)})


steps = st.lists(
    st.tuples(
        st.sampled_from(["joins", "dies", "drains", "measures", "all measure", "round", "round"]),
        st.integers(0, 9),
        st.sampled_from([1e8, 2e8, 1e9]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2), st.integers(0, 2**16))
@example(
    script=[
        *[("dies", 0, 1e8), ("dies", 1, 1e8), ("all measure", 0, 1e8)],
        *[("round", 0, 1e8), ("drains", 3, 1e8), ("drains", 5, 1e8)],
    ],
    spares=0,
    seed=0,
)
def test_plans_after_any_history_are_valid_and_do_not_depend_on_order(
    script: list[tuple[str, int, float]], spares: int, seed: int
) -> None:
    run = started_and_attested(
        1, 3, rounds=60, grouping__spares=spares, grouping__settle_rounds=1, link__least_k=2, link__most_k=16
    )
    for what, number, flops in script:
        peer = ALL[number]
        known = run.state.peers.get(peer.peer)
        is_live = known is not None and known.is_live
        if what == "joins" and not is_live:
            run.accept(peer.join(run.spec, Role.STAGE if number else Role.REPLICA, memory_bytes=0))
        elif what == "dies" and is_live:
            leave(run, peer)
        elif what == "drains" and is_live:
            drain(run, peer)
        elif what == "measures" and is_live:
            measure(run, peer, flops, bandwidth=flops / 1e4)
        elif what == "all measure":
            for i, each in enumerate(ALL):
                if each.peer in run.state.peers and run.state.peers[each.peer].is_live:
                    measure(run, each, flops if (number + i) % 3 else 10 * flops, bandwidth=1e7)
        elif what == "round" and run.state.complete_replicas(run.state.current_round):
            play_rounds(run)
        state, epoch, next_round = run.state, len(run.state.plans) + 1, run.state.current_round + 1
        found = next_plan(state, run.spec, epoch, next_round, 0)
        assert next_plan(shuffled(state, seed), run.spec, epoch, next_round, 0) == found
        if isinstance(found, Plan):
            assert_valid(run, found)
    assert replay(State.of(run.spec), run.events) == run.state


def assert_valid(run: Run, plan: Plan) -> None:
    state, spec = run.state, run.spec
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())
    members = [member for replica in plan.replicas for member in replica.members]
    assert len({member.peer for member in members}) == len(members)
    assert all(state.peers[member.peer].is_live for member in members)
    for replica in plan.replicas:
        assert [s for member in replica.members for s in member.stages] == list(range(spec.swarm.stages))
        assert len(replica.links) == len(replica.members) - 1
        assert all(
            a.endpoint or b.endpoint for a, b in zip(replica.members, replica.members[1:], strict=False)
        )
        assert replica.weight == spec.microbatches_of(replica) / spec.inner.microbatches
        former = next((each for each in newest.replicas if each.index == replica.index), None)
        if former is None or former.members != replica.members:
            for member in replica.members:
                assert state.peers[member.peer].is_staying
                assert is_synced(state, state.reservations[member.peer], plan.from_round)
                assert state.reservations[member.peer].stages == member.stages
    assert sum(map(spec.microbatches_of, plan.replicas)) == spec.inner.microbatches * len(plan.replicas)
    assigned_next = {member.peer for member in members}
    for replica in newest.replicas:
        stays = all(m.peer not in absent and state.peers[m.peer].is_staying for m in replica.members)
        lost_member = stays and not assigned_next.issuperset(m.peer for m in replica.members)
        assert not lost_member or "takes the place of" in plan.reason
    assert plan.reason
