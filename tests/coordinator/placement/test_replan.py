"""Pipelines of unreliable peers: spares that stand in, moves, draining, flapping."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.eligibility import is_synced, peer_rests_until
from coordinator.placement.initial_placement import links_between
from coordinator.placement.replan import regroup
from coordinator.state.apply import replay
from coordinator.state.commands import Attest, Drain, Leave, Offer, Report, Retreat
from coordinator.state.events import PeerJoined, PlaceGiven, PlanAdopted, RoundAborted
from coordinator.state.state import Phase, State
from coordinator.state.text import short
from coordinator.status.messages import waiting_of
from protocol.errors import ErrorCode
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
from tests.support.run_state import (
    ALL,
    Keyed,
    Run,
    attests,
    dies,
    joins,
    measures,
    one_round,
    passes,
    place,
    reason,
    rounds,
    running,
    seated,
    spec_of,
)

A, B, C, D, E, F = ALL[:6]


def formed(*layouts: Sequence[int], **more: Any) -> Run:
    """A run that has begun with pipelines of these layouts, each the first stages of its members; the peers
    in order.
    """
    stages = 3
    run = Run(spec_of(stages, 0, len(layouts), 40, swarm__members=2, **more))
    peers, replicas = iter(ALL), []
    for index, firsts in enumerate(layouts):
        members = []
        for first, stop in zip(firsts, [*firsts[1:], stages], strict=True):
            join = next(peers).join(run.spec, Role.STAGE)
            run.happens(PeerJoined(run.now, join.peer, join.role, join.capacity, join.endpoint))
            members.append(Member(join.peer, StageRange(first, stop), join.endpoint))
        replicas.append(Replica(index, tuple(members), links_between(members, run.spec.link.k)))
    run.happens(PlanAdopted(run.now, Plan(1, 1, 0, tuple(replicas), "a test")))
    for peer in ALL:
        if peer.peer in run.state.places:
            attests(run, peer)
    return run


def replaced(run: Run, **fields: Any) -> Run:
    run.state = replace(run.state, **fields)
    return run


def drains(run: Run, peer: Keyed) -> None:
    run.does(Drain(peer.peer, "a test"))


class TestSpares:
    def test_a_spare_takes_the_seat_of_a_lost_member_with_the_next_plan(self) -> None:
        run = running(1, 1)
        joins(run, D, E)
        rounds(run)
        assert len(run.state.plans) == 2, "a complete bench trains"
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        rounds(run)
        dies(run, C)
        rounds(run)
        assert seated(run) == {0: [A.peer], 1: [B.peer, E.peer]}
        assert reason(run) == (
            f"replica-1 goes on with {short(E.peer)} for {short(C.peer)} (stage 1), which is gone"
        )
        assert run.state.peers[E.peer].lifecycle is Lifecycle.TRAINING
        rounds(run)
        assert len(run.state.decisions[1, 3].entries) == 2

    def test_whoever_was_replaced_becomes_the_spare_when_it_returns(self) -> None:
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        dies(run, C)
        rounds(run)
        assert (place(run, E), place(run, C)) == ((1, 1), (2, 1))
        joins(run, C)
        assert run.state.places[C.peer] == ReservedAssignment(C.peer, 2, 1, StageRange(1, 2))
        dies(run, E)
        rounds(run, 2)
        assert seated(run)[1] == [B.peer, C.peer]

    def test_who_comes_back_within_the_round_and_has_caught_up_keeps_its_seat(self) -> None:
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        rounds(run)
        dies(run, C)
        joins(run, C)
        rounds(run)
        assert seated(run)[1] == [B.peer, C.peer]
        assert reason(run) == "replica-1 returns"

    def test_who_comes_back_and_lags_behind_is_replaced_and_swaps_places(self) -> None:
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        rounds(run, 2)
        dies(run, C)
        run.does(C.join(run.spec, Role.STAGE))
        assert place(run, C) == (1, 1)
        rounds(run, asleep=(C,))
        assert seated(run)[1] == [B.peer, E.peer]
        assert "must catch up" in reason(run)
        assert place(run, C) == (2, 1)

    def test_a_replica_that_stands_is_never_robbed(self) -> None:
        run = running(0, 2)
        dies(run, A)
        rounds(run, 3)
        assert seated(run) == {1: [C.peer, D.peer]}

    def test_a_broken_replica_lends_its_members_to_the_one_before_it(self) -> None:
        run = running(1, 2)
        dies(run, B, E)
        rounds(run)
        assert seated(run) == {0: [A.peer], 1: [D.peer, C.peer]}
        assert f"{short(D.peer)} for {short(B.peer)} (stage 0)" in reason(run)
        assert "goes on without replica-2, which lost a member" in reason(run)

    def test_a_spare_that_has_not_caught_up_takes_no_seat(self) -> None:
        run = running(1, 1, grouping__spares=2)
        rounds(run, 2)
        run.does(D.join(run.spec, Role.STAGE))
        run.does(E.join(run.spec, Role.STAGE))
        dies(run, C)
        rounds(run, asleep=(D, E))
        assert seated(run) == {0: [A.peer]}

    def test_a_spare_that_its_neighbour_cannot_reach_takes_no_seat(self) -> None:
        run = running(1, 1, grouping__spares=9)
        dies(run, B)
        run.does(B.join(run.spec, Role.STAGE, endpoint=""))
        attests(run, B)
        rounds(run)
        joins(run, D)
        joins(run, E, endpoint="")
        dies(run, C)
        rounds(run)
        assert seated(run) == {0: [A.peer]}

    def test_a_stalled_run_goes_on_with_a_spare_at_once(self) -> None:
        run = running(0, 1, grouping__spares=2)
        joins(run, C, D)
        rounds(run)
        run.now += 10
        dies(run, B)
        assert seated(run) == {0: [A.peer, D.peer]}
        assert "round 2 starts anew" in reason(run)
        rounds(run)
        assert run.state.decisions[1, 2].committed

    def test_a_bench_trains_only_when_enough_spares_stay_behind(self) -> None:
        run = running(1, 1, grouping__spares=1)
        joins(run, D, E)
        rounds(run, 2)
        assert sorted(seated(run)) == [0, 1]
        assert "keeps 1 stage peer as spares" in waiting_of(run.state, run.spec, D.peer)
        joins(run, F)
        rounds(run)
        assert seated(run)[2] == [D.peer, E.peer]


class TestLayouts:
    def wide(self, **more: Any) -> Run:
        """A run of four stages whose one pipeline has two members with two stages each."""
        run = running(1, 0, stages=4, **more)
        for peer in (B, C):
            run.does(peer.join(run.spec, Role.STAGE))
        ends = ((B, StageRange(0, 2)), (C, StageRange(2, 4)))
        members = tuple(Member(peer.peer, stages, "h:1") for peer, stages in ends)
        pipeline = Replica(1, members, (Link(run.spec.link.k, Dialer.UPSTREAM),))
        run.happens(PlanAdopted(run.now, Plan(2, 1, 0, (*run.state.plans[0].replicas, pipeline), "a test")))
        for peer in (B, C):
            attests(run, peer)
        return run

    def test_a_pipeline_of_latecomers_has_the_layout_of_most(self) -> None:
        run = self.wide()
        joins(run, D, E)
        rounds(run)
        stages = [member.stages for member in run.state.plans[-1].replica_of(D.peer).members]
        assert stages == [StageRange(0, 2), StageRange(2, 4)]

    def test_a_spare_stands_in_for_equal_stages_alone(self) -> None:
        run = self.wide(grouping__spares=9)
        joins(run, D, E)
        dies(run, B)
        rounds(run)
        assert seated(run)[1] == [D.peer, C.peer]

    def test_a_peer_gets_no_place_beyond_its_memory(self) -> None:
        run = self.wide()
        needed = [
            memory_needed(run.spec, StageRange(0, 2), 2, "cpu"),
            memory_needed(run.spec, StageRange(2, 4), 1, "cpu"),
        ]
        assert needed[0] != needed[1]
        fitting = needed.index(min(needed))
        joins(run, D, memory_bytes=int(min(needed) / 0.9) + 2)
        assert place(run, D)[1] == fitting
        run.does(E.join(run.spec, Role.STAGE, memory_bytes=1000))
        assert E.peer not in run.state.places
        assert "lacks the memory" in waiting_of(run.state, run.spec, E.peer)
        run.does(F.join(run.spec, Role.STAGE, memory_bytes=0))
        assert place(run, F)[1] == 1 - fitting, "unknown memory holds everything"


class TestMoves:
    def run_with_hole(self, **more: Any) -> Run:
        """Replica 1 of three has lost its last member; two spares have the first stages."""
        run = running(1, 1, stages=3, **more)
        joins(run, E, F)
        rounds(run)
        dies(run, D)
        return run

    def test_a_spare_moves_where_nobody_can_stand_in(self) -> None:
        run = self.run_with_hole()
        assert place(run, F) == (2, 1), "who was lost may come back within the round"
        rounds(run)
        assert seated(run) == {0: [A.peer]}
        assert run.state.places[F.peer] == ReservedAssignment(F.peer, 1, 2, StageRange(2, 3)), (
            "who joined last"
        )
        assert place(run, E) == (2, 0)
        rounds(run, 2)
        assert seated(run)[1] == [B.peer, C.peer, F.peer]

    def test_who_comes_back_within_the_round_finds_its_place(self) -> None:
        run = self.run_with_hole()
        joins(run, D)
        rounds(run)
        assert (place(run, D), place(run, F)) == ((1, 2), (2, 1))

    def test_a_peer_moves_once_in_a_while(self) -> None:
        run = self.run_with_hole()
        rounds(run)
        joins(run, D)
        assert place(run, D) == (2, 1), "where the one was that has its place"
        rounds(run)
        dies(run, B, D)
        rounds(run)
        assert run.state.places[F.peer].stages == StageRange(2, 3)
        assert seated(run)[1] == [E.peer, C.peer, F.peer]

    def test_nobody_moves_beyond_its_memory(self) -> None:
        run = running(1, 1, stages=3)
        needed = memory_needed(run.spec, StageRange(1, 2), 2, "cpu")
        assert needed < memory_needed(run.spec, StageRange(2, 3), 1, "cpu")
        joins(run, E)
        joins(run, F, memory_bytes=int(needed / 0.9) + 2)
        rounds(run)
        dies(run, D)
        rounds(run)
        assert (place(run, E), place(run, F)) == ((1, 2), (2, 1))

    def test_nobody_moves_to_stages_that_nobody_has_any_more_nor_away_from_such(self) -> None:
        run = running(0, 2)
        rounds(run, 3)
        dies(run, A, C)
        passes(run, 60, B, D)
        assert not any(isinstance(event, PlaceGiven) for event in run.events)
        assert run.state.current_round == 4

    def test_while_nothing_trains_a_pipeline_is_made_of_whoever_has_the_stages(self) -> None:
        run = formed((0, 1), (0, 2))
        rounds(run, 8)
        dies(run, A, D)
        passes(run, 10, B, C)
        assert run.state.places[C.peer] == ReservedAssignment(C.peer, 0, 0, StageRange(0, 1))
        assert run.state.places[B.peer].stages == StageRange(1, 3)
        assert seated(run) == {0: [C.peer, B.peer]}
        rounds(run, 2)

    def test_while_nothing_trains_peers_that_settle_or_rest_move_too(self) -> None:
        run = formed((0, 1), (0, 2))
        run = replaced(run, moved={C.peer: 1}, lapses={C.peer: (5, 1)})
        dies(run, A, D)
        passes(run, 10, B, C)
        assert seated(run) == {0: [C.peer, B.peer]}

    def test_while_nothing_trains_nobody_moves_if_equal_stages_are_enough(self) -> None:
        run = formed((0, 1), (0, 1, 2))
        rounds(run, 2)
        dies(run, B, C)
        passes(run, 10, A, D, E)
        assert seated(run) == {1: [A.peer, D.peer, E.peer]}
        assert not run.state.moved

    def test_while_nothing_trains_nobody_leaves_stages_that_nobody_else_has(self) -> None:
        run = formed((0, 1), (0, 2))
        rounds(run, 2)
        dies(run, A, C)
        passes(run, 60, B, D)
        assert not run.state.moved

    def test_while_nothing_trains_nobody_moves_if_a_replica_only_has_to_catch_up(self) -> None:
        run = formed((0, 1), (0, 2))
        rounds(run, 2)
        dies(run, A)
        run.does(Attest(D.peer, 2, 2, "stage", "another"))
        passes(run, 60, B, C, D)
        assert not run.state.moved
        attests(run, D)
        assert seated(run) == {1: [C.peer, D.peer]}

    def test_who_moves_keeps_what_it_has_of_both_stages_and_no_more(self) -> None:
        run = formed((0, 1), (0, 2))
        rounds(run, 2)
        run.happens(PlaceGiven(run.now, ReservedAssignment(C.peer, 0, 0, StageRange(0, 1))))
        assert run.state.synced[C.peer] == {0: 2}

    def test_a_complete_bench_trains_where_nobody_else_does(self) -> None:
        run = running(1, 0, grouping__spares=2)
        joins(run, B, C)
        rounds(run, 2)
        assert list(seated(run)) == [0]
        dies(run, A)
        passes(run, 10, B, C)
        assert seated(run) == {1: [B.peer, C.peer]}

    def test_members_of_a_broken_pipeline_move_only_after_a_while(self) -> None:
        run = running(1, 2)
        dies(run, C, E)
        settle = run.spec.grouping.settle_rounds
        rounds(run, settle)
        assert (place(run, B), place(run, D)) == ((1, 0), (2, 0))
        rounds(run, 3)
        assert sorted(len(chain) for chain in seated(run).values()) == [1, 2]

    def test_a_lost_member_of_whom_there_is_a_spare_moves_nobody(self) -> None:
        run = running(1, 1, grouping__spares=9)
        joins(run, D, E, F)
        dies(run, C)
        rounds(run, 2)
        assert seated(run)[1] == [B.peer, E.peer]
        assert place(run, F) == (3, 0)


class TestDraining:
    def test_the_next_plan_is_made_without_it_and_goes_on_with_a_spare(self) -> None:
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        rounds(run)
        drains(run, C)
        assert run.state.peers[C.peer].lifecycle is Lifecycle.DRAINING
        assert len(run.state.plans) == 1
        rounds(run)
        assert len(run.state.decisions[1, 2].entries) == 2, "it has finished its round"
        assert seated(run)[1] == [B.peer, E.peer]
        assert "which drains" in reason(run)

    def test_its_neighbours_end_the_round_before_they_follow(self) -> None:
        run = running(1, 1)
        drains(run, C)
        for peer in (A, B):
            run.does(Offer(peer.peer, peer.payload(run.spec, 0, 1)))
        payloads = run.state.round_of(0, 1).group.descriptors
        for peer in (A, B):
            run.does(Report(peer.peer, 0, 1, payloads))
        assert run.state.plans[-1].from_round == 2
        assert [run.state.peers[peer.peer].lifecycle for peer in (B, C)] == ["training", "draining"]
        for peer in (A, C):
            run.does(Offer(peer.peer, peer.payload(run.spec, 1, 1)))
        payloads = run.state.round_of(1, 1).group.descriptors
        for peer in (A, C):
            run.does(Report(peer.peer, 1, 1, payloads))
        assert len(run.state.decisions[1, 1].entries) == 2
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING

    def test_without_a_spare_its_replica_does_not_stand(self) -> None:
        run = running(1, 1)
        drains(run, C)
        rounds(run)
        assert seated(run) == {0: [A.peer]}
        assert reason(run) == "goes on without replica-1, of which a member drains"

    def test_the_only_replica_goes_on_until_somebody_is_there_in_its_stead(self) -> None:
        run = running(0, 1)
        drains(run, B)
        rounds(run, 2)
        assert seated(run) == {0: [A.peer, B.peer]}
        run.does(C.join(run.spec, Role.STAGE))
        assert place(run, C) == (0, 1)
        assert B.peer not in run.state.places
        rounds(run)
        assert seated(run) == {0: [A.peer, B.peer]}, "its successor has not caught up yet"
        rounds(run)
        assert seated(run) == {0: [A.peer, C.peer]}
        run.does(Leave(B.peer, "drained"))
        rounds(run)
        assert not any(isinstance(event, RoundAborted) for event in run.events)

    def test_the_last_round_is_confirmed_by_a_member_that_drains_without_a_place(self) -> None:
        run = running(0, 1, rounds=2)
        drains(run, B)
        run.does(C.join(run.spec, Role.STAGE))
        one_round(run)
        one_round(run)
        assert run.state.phase is Phase.FINISHED

    def test_who_leaves_when_its_part_is_done_breaks_nothing(self) -> None:
        run = running(1, 1)
        drains(run, B)
        hosts = {0: (A, B), 1: (A, C)}
        payloads = {
            stage: tuple(peer.payload(run.spec, stage, 1) for peer in hosts[stage]) for stage in hosts
        }
        for payload in payloads[0]:
            run.does(Offer(payload.owner, payload))
        for peer in hosts[0]:
            run.does(Report(peer.peer, 0, 1, payloads[0]))
        run.does(Leave(B.peer, "drained"))
        assert not run.state.lapses
        run.does(Offer(A.peer, payloads[1][0]))
        assert run.state.round_of(1, 1).group is None, "the neighbour of who left is still waited for"
        run.does(Offer(C.peer, payloads[1][1]))
        for peer in hosts[1]:
            run.does(Report(peer.peer, 1, 1, payloads[1]))
        assert len(run.state.decisions[1, 1].entries) == 2

    def test_who_leaves_before_its_part_is_done_is_not_waited_for(self) -> None:
        run = running(1, 1)
        drains(run, C)
        run.does(Leave(C.peer, "drained"))
        assert run.state.complete_replicas(1) == [run.state.plans[0].replicas[0]]
        assert not run.state.lapses

    def test_draining_twice_is_draining_once(self) -> None:
        run = running(1, 1)
        drains(run, C)
        assert run.does(Drain(C.peer, "again")) == ()
        dies(run, C)
        run.refuses(Drain(C.peer, "late"), ErrorCode.UNKNOWN_PEER)

    def test_a_spare_that_drains_is_no_spare(self) -> None:
        run = running(1, 1, grouping__spares=2)
        joins(run, D, E)
        rounds(run)
        drains(run, E)
        dies(run, C)
        rounds(run)
        assert seated(run) == {0: [A.peer]}

    def test_who_drains_before_the_run_starts_is_not_counted(self) -> None:
        run = Run(spec_of(2, 2))
        run.does(A.join(run.spec))
        drains(run, A)
        run.does(B.join(run.spec))
        assert run.state.phase is Phase.GATHERING
        run.does(C.join(run.spec))
        assert seated(run, 1) == {0: [B.peer], 1: [C.peer]}


class TestFlapping:
    def flaps(self, run: Run, peer: Keyed, times: int) -> None:
        for _ in range(times):
            dies(run, peer)
            joins(run, peer)
            number = run.state.current_round
            rounds(run)
            assert run.state.lapses[peer.peer][1] == number

    def test_who_is_lost_again_and_again_rests_ever_longer(self) -> None:
        run = running(1, 1)
        self.flaps(run, C, 3)
        assert run.state.lapses[C.peer] == (3, 3)
        assert peer_rests_until(run.state, C.peer) == 7
        assert "rests until round 7 after 3 failures" in waiting_of(run.state, run.spec, C.peer)
        rounds(run, 2)
        assert sorted(seated(run)) == [0]
        rounds(run)
        assert seated(run) == {0: [A.peer], 1: [B.peer, C.peer]}

    def test_others_take_its_seat_meanwhile(self) -> None:
        run = running(1, 1, grouping__spares=9)
        joins(run, D)
        self.flaps(run, C, 3)
        joins(run, E)
        rounds(run)
        assert seated(run)[1] == [B.peer, E.peer]
        assert f"{short(E.peer)} for {short(C.peer)} (stage 1), which rests after 3 failures" in reason(run)

    def test_a_round_that_counts_takes_a_failure_off(self) -> None:
        run = running(1, 1)
        self.flaps(run, C, 1)
        assert seated(run)[1] == [B.peer, C.peer]
        rounds(run)
        assert not run.state.lapses

    def test_nobody_rests_while_nobody_else_trains(self) -> None:
        run = running(0, 1)
        for _ in range(3):
            dies(run, B)
            joins(run, B)
            passes(run, run.spec.timing.heartbeat, A, B)
            rounds(run)
        assert seated(run)[0] == [A.peer, B.peer]

    def test_a_retreat_from_a_neighbour_that_is_lost_is_no_failure(self) -> None:
        run = running(1, 1)
        dies(run, C)
        run.does(Retreat(B.peer, 1, "neighbour-lost"))
        assert run.state.lapses == {C.peer: (1, 1)}


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
def test_any_history_gives_sound_plans_that_no_order_changes(
    script: list[tuple[str, int, float]], spares: int, seed: int
) -> None:
    run = running(
        1, 3, rounds=60, grouping__spares=spares, grouping__settle_rounds=1, link__least_k=2, link__most_k=16
    )
    for what, number, flops in script:
        peer = ALL[number]
        known = run.state.peers.get(peer.peer)
        is_live = known is not None and known.is_live
        if what == "joins" and not is_live:
            run.does(peer.join(run.spec, Role.STAGE if number else Role.REPLICA, memory_bytes=0))
        elif what == "dies" and is_live:
            dies(run, peer)
        elif what == "drains" and is_live:
            drains(run, peer)
        elif what == "measures" and is_live:
            measures(run, peer, flops, bandwidth=flops / 1e4)
        elif what == "all measure":
            for i, each in enumerate(ALL):
                if each.peer in run.state.peers and run.state.peers[each.peer].is_live:
                    measures(run, each, flops if (number + i) % 3 else 10 * flops, bandwidth=1e7)
        elif what == "round" and run.state.complete_replicas(run.state.current_round):
            rounds(run)
        state, epoch, next_round = run.state, len(run.state.plans) + 1, run.state.current_round + 1
        found = regroup(state, run.spec, epoch, next_round, 0)
        assert regroup(shuffled(state, seed), run.spec, epoch, next_round, 0) == found
        if isinstance(found, Plan):
            is_sound(run, found)
    assert replay(State.of(run.spec), run.events) == run.state


def is_sound(run: Run, plan: Plan) -> None:
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
                assert is_synced(state, state.places[member.peer], plan.from_round)
                assert state.places[member.peer].stages == member.stages
    assert sum(map(spec.microbatches_of, plan.replicas)) == spec.inner.microbatches * len(plan.replicas)
    seated_next = {member.peer for member in members}
    for replica in newest.replicas:
        stays = all(m.peer not in absent and state.peers[m.peer].is_staying for m in replica.members)
        robbed = stays and not seated_next.issuperset(m.peer for m in replica.members)
        assert not robbed or "takes the place of" in plan.reason
    assert plan.reason
