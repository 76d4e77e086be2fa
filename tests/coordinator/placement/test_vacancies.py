"""Peers that join late, fail, come back or diverge: their reservations, and the plans that follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.vacancies import Vacancies, reserve_assignments
from coordinator.rounds.attestation import locate
from coordinator.state.apply import apply, replay
from coordinator.state.commands import Attest, Await, Ban, Heartbeat, Leave, Offer, Report, Retreat, Start
from coordinator.state.events import (
    AssignmentReserved,
    PayloadWithheld,
    PeerJoined,
    PeerLost,
    PeerRetreated,
    PlanAdopted,
    RoundAborted,
)
from coordinator.state.state import KEPT_ROUNDS, State
from coordinator.state.text import short
from coordinator.state.transaction import Transaction
from coordinator.status.messages import peer_message, run_message, stall_message
from protocol.algorithm.sampling import sample_range
from protocol.errors import ErrorCode
from protocol.status import RunPhase
from protocol.types import Dialer, Lifecycle, Part, Plan, ReservedAssignment, Role, StageRange
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import (
    Run,
    attest,
    leave,
    members_by_replica,
    pass_time,
    play_round,
    started,
)

A, B, C, D, E = (keyed(i) for i in range(5))


class TestReservations:
    def test_the_first_plan_reserves_the_assignments_of_its_members(self) -> None:
        run = started(1, 1)
        assert run.state.reservations == {
            A.peer: ReservedAssignment(A.peer, 0, 0, StageRange(0, 2)),
            B.peer: ReservedAssignment(B.peer, 1, 0, StageRange(0, 1)),
            C.peer: ReservedAssignment(C.peer, 1, 1, StageRange(1, 2)),
        }

    def test_a_full_replica_that_comes_late_follows_under_a_new_index(self) -> None:
        run = started(1, 1)
        _, given = run.accept(D.join(run.spec))
        assert given == AssignmentReserved(run.now, ReservedAssignment(D.peer, 2, 0, StageRange(0, 2)))
        assert run.state.peers[D.peer].lifecycle is Lifecycle.SYNCING

    def test_stage_peers_that_come_late_form_a_pipeline_of_one_stage_each(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE))
        run.accept(C.join(run.spec, Role.STAGE))
        run.accept(D.join(run.spec, Role.STAGE))
        reservations = [run.state.reservations[peer.peer] for peer in (B, C, D)]
        assert [(each.replica, each.position) for each in reservations] == [(1, 0), (1, 1), (2, 0)]

    def test_a_peer_that_comes_back_gets_its_reservation_back(self) -> None:
        run = started(1, 2)
        leave(run, C, D)
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer] == ReservedAssignment(D.peer, 2, 0, StageRange(0, 1))

    def test_a_new_peer_takes_the_first_assignment_of_a_lost_peer(self) -> None:
        run = started(1, 2)
        leave(run, C, D)
        newcomer = keyed(9)
        run.accept(newcomer.join(run.spec, Role.STAGE))
        assert run.state.reservations[newcomer.peer] == ReservedAssignment(
            newcomer.peer, 1, 1, StageRange(1, 2)
        )
        assert C.peer not in run.state.reservations
        run.accept(C.join(run.spec, Role.STAGE))
        assert run.state.reservations[C.peer] == ReservedAssignment(C.peer, 2, 0, StageRange(0, 1))

    def test_an_assignment_is_only_for_its_role(self) -> None:
        run = started(1, 1)
        leave(run, A)
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer].replica == 2
        run.accept(E.join(run.spec, Role.REPLICA))
        assert run.state.reservations[E.peer] == ReservedAssignment(E.peer, 0, 0, StageRange(0, 2))

    def test_neighbours_without_endpoints_leave_one_of_them_a_spare_until_an_assignment_is_free(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        assert len(run.accept(C.join(run.spec, Role.STAGE, endpoint=""))) == 1
        assert C.peer not in run.state.reservations
        assert "spare" in peer_message(run.state, run.spec, C.peer)
        run.refuse(Attest(C.peer, 0, 0, "stage", "digest"), ErrorCode.BAD_REQUEST)
        *_, given = run.accept(Leave(B.peer, "interrupted"))
        assert isinstance(given, AssignmentReserved)
        assert run.state.reservations == {
            A.peer: ReservedAssignment(A.peer, 0, 0, StageRange(0, 2)),
            C.peer: ReservedAssignment(C.peer, 1, 0, StageRange(0, 1)),
        }

    def test_a_spare_starts_the_next_pipeline_when_the_one_before_it_is_full(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(D.join(run.spec, Role.STAGE))
        assert (run.state.reservations[D.peer].replica, run.state.reservations[C.peer].replica) == (1, 2)

    def test_a_peer_that_comes_back_in_another_role_frees_its_reservation(self) -> None:
        run = started(1, 1)
        leave(run, C)
        run.accept(C.join(run.spec, Role.REPLICA))
        assert run.state.reservations[C.peer].replica == 2
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer] == ReservedAssignment(D.peer, 1, 1, StageRange(1, 2))

    @pytest.mark.parametrize("at_first", [0, 2**30])
    def test_a_peer_that_comes_back_with_less_memory_gets_its_reservation_back(self, at_first: int) -> None:
        run = Run(spec_of(2, 0, 1, 40))
        run.accept(Start())
        for peer in (A, B):
            run.accept(peer.join(run.spec, Role.STAGE, memory_bytes=at_first))
        before = run.state.reservations[A.peer]
        leave(run, A)
        run.accept(A.join(run.spec, Role.STAGE, memory_bytes=1000))
        assert run.state.reservations[A.peer] == before
        attest(run, A, 0)
        attest(run, B, 0)
        pass_time(run, run.spec.timing.heartbeat, A, B)
        play_round(run)

    def test_a_reservation_is_not_kept_for_a_peer_that_its_neighbour_cannot_reach(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(C.join(run.spec, Role.STAGE))
        leave(run, C)
        run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
        assert C.peer not in run.state.reservations

    def test_a_peer_with_too_little_memory_for_the_vacancies_starts_a_pipeline(self) -> None:
        """The last stage takes less memory than the first, which has more in flight."""
        spec = spec_of(2, 0, 1, 40)
        weak = int(memory_needed(spec, StageRange(1, 2), 1, "cpu") / (1 - spec.grouping.reserve)) + 1
        assert weak < memory_needed(spec, StageRange(0, 1), 2, "cpu")
        run = started(0, 1)
        for peer in (C, D, E):
            run.accept(peer.join(run.spec, Role.STAGE, memory_bytes=weak))
        reservations = [run.state.reservations.get(peer.peer) for peer in (C, D, E)]
        last = StageRange(1, 2)
        assert reservations == [
            ReservedAssignment(C.peer, 1, 1, last),
            ReservedAssignment(D.peer, 2, 1, last),
            None,
        ]
        play_round(run)
        run.accept(keyed(6).join(run.spec, Role.STAGE))
        assert run.state.reservations[keyed(6).peer].replica == 1

    def test_spares_get_the_same_assignments_together_as_one_by_one(self) -> None:
        run = started(1, 1)
        spares = [keyed(i) for i in range(10, 22)]
        for peer in spares:
            number = peer.number
            endpoint, role = "h:1" if number % 3 else "", Role.STAGE if number % 5 else Role.REPLICA
            run.accept(peer.join(run.spec, role, endpoint, memory_bytes=10**6 * (1 + number % 4)))
        leave(run, C)
        kept = {peer.peer: run.state.reservations[peer.peer] for peer in (A, B)}
        transaction = Transaction(
            replace(run.state, reservations=kept, layouts={i: run.state.layouts[i] for i in (0, 1)})
        )
        one_by_one = transaction.state
        reserve_assignments(transaction, run.spec, run.now)
        for peer in spares:
            reservation = Vacancies(one_by_one, run.spec).reservation_for(one_by_one.peers[peer.peer])
            if reservation is not None:
                one_by_one = apply(one_by_one, AssignmentReserved(run.now, reservation))
        assert transaction.state == one_by_one
        assert len({event.reservation.replica for event in transaction.events}) > 2

    def test_the_reservation_of_a_banned_peer_is_free(self) -> None:
        run = started(1, 1)
        run.accept(Ban(C.peer, "a test"))
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer].replica == 1

    def test_no_peer_joins_a_run_that_has_finished(self) -> None:
        run = started(1, rounds=1)
        play_round(run)
        assert run.state.phase is RunPhase.FINISHED
        run.refuse(B.join(run.spec), ErrorCode.RUN_STARTED)


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
        assert "which is gone" in peer_message(run.state, run.spec, B.peer)
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
        assert run.accept(Await(B.peer, 0, 1, withheld=1)) == ()
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
        stops = [0]
        for number in range(1, 9):
            plan = run.state.plan_for(number)
            for replica in plan.replicas:
                part = sample_range(plan, run.spec, number, replica.index)
                assert part.start == stops[-1]
                stops.append(part.stop)
        assert len(run.state.plans) > 2

    def test_without_change_there_is_no_new_plan(self) -> None:
        run = started(2)
        for _ in range(3):
            play_round(run)
        assert len(run.state.plans) == 1


class TestStall:
    def test_a_run_without_a_complete_replica_waits_and_names_the_missing_peers(self) -> None:
        run = started(1, 1)
        play_round(run)
        leave(run, A, C)
        pass_time(run, 3600, B)
        assert run.state.current_round == 2
        assert not any(isinstance(event, RoundAborted) for event in run.events)
        text = run_message(run.state, run.spec)
        assert text.startswith(f"waiting in round 2 of {run.spec.rounds}: no complete replica is left")
        assert f"replica-0 waits for {short(A.peer)} (stages 0-1), which is gone" in text
        assert f"replica-1 waits for {short(C.peer)} (stage 1), which is gone" in text
        assert stall_message(run.state, run.spec) == text

    def test_it_continues_in_the_same_round_when_a_replica_is_complete_again(self) -> None:
        run = started(1, 1)
        play_round(run)
        before = run.state.plans[-1]
        leave(run, A, C)
        pass_time(run, 60, B)
        run.accept(C.join(run.spec, Role.STAGE))
        text = run_message(run.state, run.spec)
        assert f"replica-1 waits for {short(C.peer)} (stage 1), which must catch up" in text
        *_, adopted = run.accept(Attest(C.peer, 1, 1, "stage", anchor_of(1, 1)))
        assert isinstance(adopted, PlanAdopted)
        plan = adopted.plan
        assert (plan.epoch, plan.from_round) == (before.epoch + 1, 2)
        assert plan.first_sample == 2 * run.spec.samples_per_round()
        assert "round 2 starts anew" in plan.reason
        play_round(run)
        assert run.state.decisions[0, 2].committed

    @pytest.mark.parametrize("withheld", [0, 1])
    def test_remaining_members_that_wait_do_not_end_the_round(self, withheld: int) -> None:
        run = started(0, 1)
        play_round(run)
        leave(run, B)
        for _ in range(2):
            run.accept(Await(A.peer, 0, 2, withheld))
            pass_time(run, 300, A)
        assert run.state.current_round == 2

    def test_a_peer_that_withholds_under_the_former_plan_does_not_know_its_assignment_yet(self) -> None:
        run = started(1)
        leave(run, A)
        run.accept(A.join(run.spec))
        attest(run, A, 0)
        pass_time(run, run.spec.timing.heartbeat, A)
        assert [(plan.epoch, plan.from_round) for plan in run.state.plans] == [(1, 1), (2, 1)]
        for epoch in (0, 1, 3):
            assert run.accept(Await(A.peer, 0, 1, withheld=epoch)) == ()
        withheld, *_ = run.accept(Await(A.peer, 0, 1, withheld=2))
        assert isinstance(withheld, PayloadWithheld)

    def test_the_run_goes_on_after_all_peers_were_lost_and_returned(self) -> None:
        run = started(2, 1)
        for _ in range(3):
            play_round(run)
        leave(run, A, B, C, D)
        run.accept(Start())
        pass_time(run, 100)
        for peer, role in zip((A, B, C, D), (*[Role.REPLICA] * 2, *[Role.STAGE] * 2), strict=True):
            run.accept(peer.join(run.spec, role))
            attest(run, peer)
        play_round(run)
        play_round(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer], 2: [C.peer, D.peer]}
        assert all(decision.committed for decision in run.state.decisions.values())

    def test_a_round_with_an_offer_ends_before_the_plan_changes(self) -> None:
        run = started(1)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        leave(run, A)
        run.accept(A.join(run.spec))
        attest(run, A, 0)
        assert len(run.state.plans) == 1
        pass_time(run, run.spec.timing.decide + run.spec.timing.match_window, A)
        assert run.state.current_round == 2
        assert members_by_replica(run) == {0: [A.peer]}
        play_round(run)

    def test_peers_that_attested_too_little_do_not_end_the_stall(self) -> None:
        run = started(1)
        for _ in range(3):
            play_round(run)
        leave(run, A)
        run.accept(A.join(run.spec))
        for number in (0, 1):
            attest(run, A, number)
        assert len(run.state.plans) == 1
        attest(run, A, 2)
        assert len(run.state.plans) == 2


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


class TestDivergence:
    def test_a_diverged_peer_drops_out_at_once_and_comes_back_by_attesting_the_right_anchor(self) -> None:
        run = started(3)
        play_round(run)
        run.accept(Attest(C.peer, 0, 1, "stage", "another"))
        assert run.state.peers[C.peer].lifecycle is Lifecycle.SYNCING
        assert run.state.diverged == {(C.peer, 0, 1, "stage")}
        play_round(run)
        assert len(run.state.decisions[0, 2].entries) == 2
        assert run.state.plans[-1].reason == "goes on without replica-2, which must catch up"
        attest(run, C)
        assert not run.state.diverged
        play_round(run, followers=(C,))
        assert list(members_by_replica(run)) == [0, 1, 2]

    def test_the_embedding_counts_for_members_that_do_not_host_its_stage(self) -> None:
        run = started(2, 1)
        for peer in (A, B, D):
            attest(run, peer, 0)
            run.accept(Attest(peer.peer, 0, 0, "embedding", "right"))
        run.accept(Attest(D.peer, 0, 0, "embedding", "wrong"))
        attest(run, D, 0)
        play_round(run)
        assert list(members_by_replica(run)) == [0, 1]
        run.accept(Attest(D.peer, 0, 0, "embedding", "right"))
        run.accept(Attest(C.peer, 0, 1, "stage", anchor_of(0, 1)))
        attest(run, D, 1)
        play_round(run)
        assert list(members_by_replica(run)) == [0, 1, 2]

    def test_a_diverged_peer_that_repeats_itself_is_recorded_once(self) -> None:
        run = started(3)
        play_round(run)
        assert run.accept(Attest(C.peer, 0, 1, "stage", "another"))
        assert run.accept(Attest(C.peer, 0, 1, "stage", "another")) == ()


class TestAttesting:
    def test_followers_attest_what_they_will_host_and_the_embedding(self) -> None:
        run = started(1, 1)
        play_round(run)
        leave(run, C)
        run.accept(D.join(run.spec, Role.STAGE))
        run.accept(Attest(D.peer, 1, 0, "stage", anchor_of(1, 0)))
        run.accept(Attest(D.peer, 0, 1, "embedding", "table"))
        run.refuse(Attest(D.peer, 0, 1, "stage", anchor_of(0, 1)), ErrorCode.BAD_REQUEST)

    def test_aborted_rounds_are_attested_like_others(self) -> None:
        run = started(1)
        for stage in (0, 1):
            run.accept(Await(A.peer, stage, 1, withheld=1))
            run.accept(Attest(A.peer, stage, 1, "stage", anchor_of(stage, 0)))
        assert run.state.synced[A.peer] == {0: 1, 1: 1}

    def test_a_late_attestation_of_an_old_round_changes_nothing(self) -> None:
        run = started(1)
        for _ in range(KEPT_ROUNDS + 2):
            play_round(run)
        assert run.accept(Attest(A.peer, 0, 1, "stage", "another")) == ()


class TestLocate:
    def test_checkpoints_that_two_attested_are_found_newest_first_with_their_live_holders(self) -> None:
        run = started(2, 1)
        for _ in range(35):
            play_round(run)
        records = locate(run.state, run.spec, 0, Part.STAGE)
        assert [record.round_number for record in records] == [30, 20, 10]
        assert records[0].digest == anchor_of(0, 30)
        assert set(records[0].holders) == {A.peer, B.peer, C.peer}
        assert locate(run.state, run.spec, 0, Part.EMBEDDING) == ()
        leave(run, A)
        assert set(locate(run.state, run.spec, 0, Part.STAGE)[0].holders) == {B.peer, C.peer}

    def test_one_attestation_counts_only_if_there_is_no_other(self) -> None:
        run = started(1)
        for _ in range(10):
            play_round(run)
        assert [record.holders for record in locate(run.state, run.spec, 0, Part.STAGE)] == [(A.peer,)]
        run.accept(B.join(run.spec))
        run.accept(Attest(B.peer, 0, 10, "stage", "another"))
        assert locate(run.state, run.spec, 0, Part.STAGE) == ()

    def test_only_checkpoints_of_live_peers_are_located(self) -> None:
        run = started(1)
        for _ in range(10):
            play_round(run)
        leave(run, A)
        assert locate(run.state, run.spec, 0, Part.STAGE) == ()


class TestEnd:
    def test_a_run_that_lost_all_peers_after_the_last_decision_waits_for_a_holder(self) -> None:
        run = started(1, rounds=1)
        for stage in (0, 1):
            payload = A.payload(run.spec, stage, 1)
            run.accept(Offer(A.peer, payload))
            run.accept(Report(A.peer, stage, 1, (payload,)))
        leave(run, A)
        assert run.state.phase is RunPhase.TRAINING
        assert "waiting for the last digests of any peer at stage 0" in run_message(run.state, run.spec)
        run.accept(A.join(run.spec))
        attest(run, A, 1)
        assert run.state.phase is RunPhase.FINISHED
        run.accept(Leave(A.peer, "finished"))
        assert run.state.peers[A.peer].finished

    def test_followers_are_not_waited_for_but_count_as_finished_when_they_are_done(self) -> None:
        run = started(2, rounds=2)
        play_round(run)
        run.accept(C.join(run.spec))
        play_round(run)
        assert run.state.phase is RunPhase.FINISHED
        attest(run, C, 2)
        run.accept(Leave(C.peer, "finished"))
        assert run.state.peers[C.peer].finished


def test_all_events_replay_to_the_same_state() -> None:
    run = started(2, 1)
    play_round(run)
    leave(run, A, C)
    play_round(run)
    run.accept(A.join(run.spec))
    run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
    attest(run, A)
    run.accept(Attest(B.peer, 0, 2, "stage", "another"))
    run.accept(Retreat(D.peer, 2, "a test"))
    pass_time(run, run.spec.timing.heartbeat, A, B, C, D)
    play_round(run)
    assert replay(State.of(run.spec), run.events) == run.state


def test_plans_have_rising_epochs_and_never_falling_rounds() -> None:
    run = started(1)
    for _ in range(3):
        leave(run, A)
        run.accept(A.join(run.spec))
        attest(run, A)
        pass_time(run, run.spec.timing.heartbeat, A)
    plans: tuple[Plan, ...] = run.state.plans
    assert [plan.epoch for plan in plans] == [1, 2, 3, 4]
    assert all(a.from_round <= b.from_round for a, b in pairwise(plans))


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
