"""When the plan of a run changes, and what a change keeps."""

from __future__ import annotations

import pytest

from coordinator.placement.rules import obstacles
from coordinator.run.state.commands import Attest, Await, Heartbeat, Offer, Report, Retreat
from coordinator.run.state.events import AssignmentReserved, PeerJoined, PeerLost, PeerRetreated
from coordinator.status.causes import peer_cause
from protocol.errors import ErrorCode
from protocol.status import CauseCode
from protocol.types import Dialer, Lifecycle, Role
from tests.builders import Keyed, keyed
from tests.support.coordinator_run import (
    assert_samples_tile,
    attest,
    codes_of,
    leave,
    members_by_replica,
    pass_time,
    play_round,
    started,
)

A, B, C, D, E = (keyed(i) for i in range(5))


class TestReplan:
    def test_a_late_joiner_trains_from_the_round_after_it_has_caught_up(self) -> None:
        run = started(2)
        play_round(run)
        run.accept(C.join(run.spec))
        play_round(run)
        assert sorted(members_by_replica(run)) == [0, 1], "it had not attested any anchor yet"
        attest(run, C)
        play_round(run, followers=(C,))
        assert members_by_replica(run)[2] == [C.peer]
        assert run.state.plans[-1].reason == "replica-2 joins"
        assert run.state.peers[C.peer].lifecycle is Lifecycle.TRAINING
        play_round(run)
        assert len(run.state.decisions[0, 4].entries) == 3

    def test_a_new_pipeline_joins_with_links_that_its_members_can_dial(self) -> None:
        run = started(1)
        run.accept(B.join(run.spec, Role.STAGE))
        run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
        for peer in (B, C):
            attest(run, peer, 0)
        play_round(run)
        (replica,) = run.state.plans[-1].replicas[1:]
        assert [member.peer for member in replica.members] == [B.peer, C.peer]
        assert [link.dialer for link in replica.links] == [Dialer.DOWNSTREAM]

    def test_a_member_whose_neighbour_is_lost_follows_rounds_until_it_is_replaced(self) -> None:
        run = started(1, 1)
        leave(run, C)
        play_round(run)
        assert members_by_replica(run) == {0: [A.peer]}
        assert run.state.plans[-1].reason == "goes on without replica-1, which lost a member"
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING
        assert codes_of(peer_cause(run.state, B.peer))[-1] is CauseCode.MEMBER_GONE
        play_round(run, followers=(B,))
        run.accept(D.join(run.spec, Role.STAGE))
        attest(run, D)
        play_round(run, followers=(B, D))
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer, D.peer]}
        assert run.state.plans[-1].reason == "replica-1 returns"

    def test_a_peer_that_comes_back_within_the_round_does_not_take_part_in_it(self) -> None:
        run = started(2)
        run.now += 60
        run.accept(Heartbeat(A.peer, 1, 0))
        lost, joined, given = run.accept(B.join(run.spec))
        assert (type(lost), type(joined), type(given)) == (PeerLost, PeerJoined, AssignmentReserved)
        refusal = run.refuse(Offer(B.peer, B.payload(run.spec, 0, 1)), ErrorCode.SEAT_LOST)
        assert "no longer takes part in round 1" in refusal.cause
        assert run.accept(Await(B.peer, 0, 1, epoch=1)) == ()
        attest(run, B, 0)
        play_round(run)
        assert len(run.state.decisions[0, 1].entries) == 1
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer]}
        play_round(run)
        assert len(run.state.decisions[0, 2].entries) == 2

    def test_replicas_keep_their_index_and_order_by_it(self) -> None:
        run = started(3)
        leave(run, A)
        play_round(run)
        run.accept(A.join(run.spec))
        attest(run, A)
        play_round(run)
        assert list(members_by_replica(run)) == [0, 1, 2]

    def test_sample_ranges_have_no_gap_or_overlap_when_plans_change(self) -> None:
        run = started(2, 1)
        for i in range(8):
            if i == 1:
                leave(run, A)
            if i == 3:
                run.accept(A.join(run.spec))
                run.accept(keyed(9).join(run.spec))
            play_round(run, followers=(A, keyed(9)) if i in (3, 4) else ())
        assert_samples_tile(run, 8)
        assert len(run.state.plans) > 2


class TestRetreat:
    def test_the_round_does_not_wait_for_a_replica_that_cannot_continue(self) -> None:
        run = started(1, 1)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        events = run.accept(Retreat(B.peer, 1, "neighbour-lost"))
        assert isinstance(events[0], PeerRetreated)
        assert run.state.round_of(0, 1).group is not None
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING
        assert run.state.reservations[B.peer].replica == 1
        assert run.accept(Retreat(B.peer, 1, "again")) == ()

    def test_what_the_others_of_a_broken_replica_have_learned_counts(self) -> None:
        run = started(2, 1)
        run.now += 60.0
        play_round(run)
        a, b, p, q = A, B, C, D
        run.accept(Retreat(p.peer, 1, "neighbour-lost"))
        leave(run, q)
        for stage in (0, 1):
            payloads = [peer.payload(run.spec, stage, 2) for peer in (a, b)]
            if stage == 0:
                payloads.append(p.payload(run.spec, 0, 2, weight=0.5))
            for payload in payloads[::-1]:
                run.accept(Offer(payload.owner, payload))
            group = run.state.round_of(stage, 2).group
            assert group is not None
            cause, steps = obstacles(run.state, 2)[2], run.spec.inner.steps
            assert (cause.count, cause.total) == (0.5 * steps, steps)
            for payload in payloads:
                assert (stage, 2) not in run.state.decisions
                run.accept(Report(payload.owner, stage, 2, group.descriptors))
            assert {entry.descriptor for entry in run.state.decisions[stage, 2].entries} == {*payloads}
        per_round = run.spec.samples_per_round() * run.spec.model.context
        assert run.state.tokens == 3 * per_round + round(2.5 * per_round)
        # The pipeline could not go on, whatever it has contributed.
        assert run.state.retreats[2] == (1, 2)

    def test_what_a_member_had_before_it_was_lost_or_diverged_does_not_count(self) -> None:
        run = started(2, 1)
        play_round(run)
        for peer in (C, D):
            run.accept(Retreat(peer.peer, 1, "neighbour-lost"))
        leave(run, C)
        run.now += 1.0
        run.accept(C.join(run.spec, Role.STAGE))
        attest(run, C, 1)
        run.accept(Attest(D.peer, 1, 1, "stage", "f" * 64))
        for peer, stage in ((C, 0), (D, 1)):
            payload = peer.payload(run.spec, stage, 2, weight=0.4)
            run.refuse(Offer(peer.peer, payload), ErrorCode.SEAT_LOST)

    def test_both_ends_come_back_with_a_later_plan(self) -> None:
        run = started(1, 1)
        for peer in (B, C):
            run.accept(Retreat(peer.peer, 1, "neighbour-lost"))
            attest(run, peer, 0)
        play_round(run)
        assert members_by_replica(run)[1] == [B.peer, C.peer]
        assert run.state.plans[-1].reason == "replica-1 returns"
        assert run.accept(Retreat(C.peer, 1, "late")) == ()
        assert run.accept(Retreat(C.peer, 7, "never was")) == ()

    def test_a_pipeline_alone_starts_its_round_anew_but_not_without_a_pause(self) -> None:
        run = started(0, 1)
        for peer in (A, B):
            attest(run, peer, 0)
        run.accept(Retreat(A.peer, 1, "neighbour-lost"))
        assert len(run.state.plans) == 1
        pass_time(run, run.spec.timing.heartbeat, A, B)
        assert [(plan.epoch, plan.from_round) for plan in run.state.plans] == [(1, 1), (2, 1)]
        play_round(run)

    def test_unknown_peers_cannot_retreat(self) -> None:
        started(1).refuse(Retreat(B.peer, 1, ""), ErrorCode.UNKNOWN_PEER)


@pytest.mark.parametrize("absent", [A, B])
def test_a_lost_member_of_the_group_that_came_back_is_not_waited_for(absent: Keyed) -> None:
    run = started(2)
    there = B if absent is A else A
    payloads = tuple(peer.payload(run.spec, 0, 1) for peer in (A, B))
    for payload in payloads:
        run.accept(Offer(payload.owner, payload))
    leave(run, absent)
    run.accept(absent.join(run.spec))
    run.accept(Report(there.peer, 0, 1, payloads))
    assert len(run.state.decisions[0, 1].entries) == 2
