"""What follows from reachability: plans, messages, and links that cannot be opened. No IO."""

from __future__ import annotations

from dataclasses import replace

from coordinator.membership.reachability import report_link
from coordinator.placement.rules import closed_links, may_be_neighbours
from coordinator.run.rounds.deadlines import FIRST_SECONDS, closes_at
from coordinator.run.state.apply import apply
from coordinator.run.state.commands import Join, Offer, ReportLink, Retreat, Tick, UpdateAddresses
from coordinator.run.state.events import LinkFailed, PayloadOffered, PlanAdopted
from coordinator.run.state.transaction import Transaction
from coordinator.status.causes import peer_cause, run_cause
from protocol.errors import ErrorCode
from protocol.spec.fixed import LEAST_WINDOW_SECONDS
from protocol.status import CauseCode, RunPhase
from protocol.types import Reachability, Role
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_run import (
    Run,
    attest,
    joined_run,
    leave,
    offer,
    play_round,
    started,
    started_and_attested,
)

A, B, C = keyed(0), keyed(1), keyed(2)
WHY = "nothing answers there"


def dial_only(peer: Keyed, run: Run, role: Role) -> Join:
    """The join of a peer whose addresses did not answer."""
    join = replace(peer.join(run.spec, role), endpoint="", claimed="192.168.1.10:7710", problem="no answer")
    return replace(join, reachability=Reachability.DIAL_ONLY)


def report(run: Run, reporter: Keyed, neighbour: Keyed, epoch: int = 1) -> ReportLink:
    return ReportLink(reporter.peer, epoch, neighbour.peer, "44.10.0.9:7710", WHY)


class TestPlans:
    def test_two_replicas_that_only_dial_do_not_start_and_the_reason_is_said(self) -> None:
        run = joined_run(spec_of(replicas=2))
        for peer in (A, B):
            run.accept(dial_only(peer, run, Role.REPLICA))
        assert run.state.phase is RunPhase.GATHERING
        assert run_cause(run.state).code is CauseCode.HOST_LACKING

    def test_one_more_replica_that_is_reached_is_let_in_and_starts_the_run(self) -> None:
        run = joined_run(spec_of(replicas=2))
        for peer in (A, B):
            run.accept(dial_only(peer, run, Role.REPLICA))
        run.refuse(dial_only(keyed(7), run, Role.REPLICA), ErrorCode.RUN_FULL)
        run.accept(C.join(run.spec, Role.REPLICA))
        (plan,) = run.state.plans
        assert [replica.members[0].peer for replica in plan.replicas] == [A.peer, C.peer]

    def test_an_address_that_answers_later_starts_the_run(self) -> None:
        run = joined_run(spec_of(replicas=2))
        for peer in (A, B):
            run.accept(dial_only(peer, run, Role.REPLICA))
        relayed = UpdateAddresses(B.peer, "", Reachability.RELAYED, "", "")
        assert any(isinstance(event, PlanAdopted) for event in run.accept(relayed))

    def test_a_replica_alone_may_only_dial(self) -> None:
        run = joined_run(spec_of(replicas=1))
        run.accept(dial_only(A, run, Role.REPLICA))
        assert run.state.phase is RunPhase.TRAINING

    def test_a_repeated_join_may_claim_the_same_and_be_reached_this_time(self) -> None:
        run = joined_run(spec_of(replicas=2))
        first = dial_only(A, run, Role.REPLICA)
        run.accept(first)
        assert not run.accept(replace(first, endpoint=first.claimed, reachability=Reachability.OPEN))


class TestFailedLinks:
    def test_a_failed_link_costs_its_own_pipeline_only(self) -> None:
        run = started(replicas=1, pipelines=1)
        full, upper, lower = A, B, C
        (event,) = run.accept(report(run, upper, lower))
        assert isinstance(event, LinkFailed)
        # The full replica weighs one half, and its round is decided at once, without the pipeline.
        for stage in (0, 1):
            offer(run, full, full.payload(run.spec, stage, 1))
            assert run.state.round_of(stage, 1).group is not None

    def test_the_first_round_of_a_plan_does_not_close_before_it_can_be_known(self) -> None:
        run = started(replicas=1, pipelines=1)
        for stage in (0, 1):
            offer(run, A, A.payload(run.spec, stage, 1))
        # As soon as half of the weight has answered, the round closes after the least window of 5 s.
        assert closes_at(run.state) == run.now + FIRST_SECONDS > run.now + LEAST_WINDOW_SECONDS
        run.now += FIRST_SECONDS - 1
        run.accept(Tick())
        assert run.state.round_of(0, 1).group is None
        run.accept(report(run, B, C))
        assert all(run.state.round_of(stage, 1).group is not None for stage in (0, 1))
        assert not run.state.decisions  # the group gathers its payloads

    def test_both_ends_and_the_status_name_it(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.accept(report(run, B, C))
        for peer in (B, C):
            cause = peer_cause(run.state, peer.peer)
            assert cause is not None
            assert (cause.code, cause.peers) == (CauseCode.LINK_CLOSED, (B.peer, C.peer))
            assert (cause.address, cause.detail) == ("44.10.0.9:7710", "nothing answers there")
        assert peer_cause(run.state, A.peer) is None

    def test_a_pipeline_alone_stalls_and_says_why_instead_of_aborting(self) -> None:
        run = started_and_attested(replicas=0, pipelines=1)
        run.accept(report(run, A, B))
        (lacks,) = run_cause(run.state).causes
        assert [(each.code, each.address) for each in lacks.causes] == [
            (CauseCode.LINK_CLOSED, "44.10.0.9:7710")
        ]
        assert not run.state.decisions

    def test_a_retreat_after_it_is_nobodys_failure(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.accept(report(run, B, C))
        for peer in (B, C):
            run.accept(Retreat(peer.peer, 1, "no link"))
        assert not run.state.failures
        assert run.state.retreats[1][0] == 1

    def test_it_is_recorded_once_under_each_plan(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.accept(report(run, B, C))
        assert not run.accept(report(run, B, C))
        assert not run.accept(report(run, B, C, epoch=7))

    def test_it_is_over_when_the_replica_offers(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.accept(report(run, B, C))
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        assert not run.state.failed_links

    def test_an_end_with_other_addresses_is_tried_again_by_the_next_plan(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.accept(report(run, B, C))
        ends = run.state.peers[B.peer], run.state.peers[C.peer]
        assert not may_be_neighbours(run.state, *ends)
        run.accept(UpdateAddresses(C.peer, "44.10.0.9:7711", Reachability.OPEN, "44.10.0.9:7711", ""))
        assert may_be_neighbours(run.state, *ends)
        assert not list(closed_links(run.state, C.peer))
        # The present plan has the former address, so its link stays closed.
        assert [replica.index for replica in run.state.complete_replicas(1)] == [0]

    def test_it_may_be_reported_before_the_first_round_of_its_plan(self) -> None:
        run = started(replicas=1, pipelines=1)
        plan = replace(run.state.plans[-1], epoch=2, from_round=2)
        transaction = Transaction(apply(run.state, PlanAdopted(run.now, plan)), run.now)
        report_link(transaction, report(run, B, C, epoch=2))
        assert len(transaction.state.complete_replicas(1)) == 2
        assert len(transaction.state.complete_replicas(2)) == 1
        # A payload of the round before says nothing of the links of the next plan.
        transaction.add(PayloadOffered(run.now, B.payload(run.spec, 0, 1)))
        assert len(transaction.state.complete_replicas(2)) == 1

    def test_reports_under_two_plans_in_turn_are_recorded_once_each(self) -> None:
        run = started(replicas=1, pipelines=1)
        plan = replace(run.state.plans[-1], epoch=2, from_round=2)
        transaction = Transaction(apply(run.state, PlanAdopted(run.now, plan)), run.now)
        for epoch in (1, 2) * 20:
            report_link(transaction, report(run, B, C, epoch))
        assert [event.epoch for event in transaction.events if isinstance(event, LinkFailed)] == [1, 2]

    def test_an_address_that_a_neighbour_had_before_it_came_back_says_nothing_of_its_next_link(self) -> None:
        run = started(replicas=1, pipelines=1)
        leave(run, C)
        run.accept(C.join(run.spec, Role.STAGE))
        assert not run.accept(report(run, B, C))
        assert may_be_neighbours(run.state, run.state.peers[B.peer], run.state.peers[C.peer])

    def test_only_a_neighbour_can_be_reported(self) -> None:
        run = started(replicas=1, pipelines=1)
        run.refuse(report(run, B, A), ErrorCode.BAD_REQUEST)
        run.refuse(report(run, A, B), ErrorCode.BAD_REQUEST)
        run.refuse(report(run, keyed(30), B), ErrorCode.UNKNOWN_PEER)


class TestMoves:
    @staticmethod
    def moves(run: Run, peer: Keyed) -> None:
        run.accept(UpdateAddresses(peer.peer, "44.10.0.9:7711", Reachability.OPEN, "44.10.0.9:7711", ""))

    def test_the_next_plan_names_the_new_address_and_lets_nobody_rest(self) -> None:
        run = started(replicas=1, pipelines=1)
        self.moves(run, C)
        play_round(run)
        members = run.state.plans[-1].replicas[1].members
        assert [member.endpoint for member in members] == [run.state.peers[B.peer].endpoint, "44.10.0.9:7711"]

    def test_a_neighbour_that_has_lost_its_link_has_not_failed(self) -> None:
        """Whether it gives up before the coordinator knows of the new address, or later."""
        for moves_first in (True, False):
            run = started(replicas=1, pipelines=1)
            acts = [
                lambda run=run: self.moves(run, C),
                lambda run=run: run.accept(Retreat(B.peer, 1, "lost")),
            ]
            for act in acts if moves_first else acts[::-1]:
                act()
            run.accept(Retreat(C.peer, 1, "lost"))
            assert B.peer not in run.state.failures

    def test_failures_of_earlier_rounds_count(self) -> None:
        run = started(replicas=1, pipelines=1, rounds=9)
        run.accept(Retreat(B.peer, 1, "lost"))
        assert run.state.failures[B.peer] == (1, 1)
        attest(run, B)
        play_round(run, followers=(B, C))
        self.moves(run, C)
        assert run.state.failures[B.peer] == (1, 1)
