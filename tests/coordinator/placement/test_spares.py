"""Spares: which peer takes the place of a lost member, and which stages it gets."""

from __future__ import annotations

from typing import Any

from coordinator.base.phrases import short
from coordinator.placement.cost_model import memory_needed
from coordinator.run.state.events import PlanAdopted
from coordinator.status.causes import peer_cause
from protocol.status import CauseCode
from protocol.types import (
    Committed,
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
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    codes_of,
    join,
    latest_reason,
    leave,
    members_by_replica,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F = ALL[:6]


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
        assert isinstance(run.state.decisions[1, 2], Committed)

    def test_a_pipeline_of_spares_trains_only_if_enough_spares_remain(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=1)
        join(run, D, E)
        play_rounds(run, 2)
        assert sorted(members_by_replica(run)) == [0, 1]
        assert codes_of(peer_cause(run.state, D.peer))[-1] is CauseCode.SPARES_KEPT
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
        assert codes_of(peer_cause(run.state, E.peer))[-1] is CauseCode.SPARE
        run.accept(F.join(run.spec, Role.STAGE, memory_bytes=0))
        assert slot_of(run, F)[1] == 1 - fitting, "a peer with unknown memory fits everywhere"
