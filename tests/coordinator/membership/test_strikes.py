"""Strikes: a peer whose payloads cannot be used, and the rounds of the other peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.base.phrases import short
from coordinator.membership.strikes import STRIKES_TO_QUARANTINE
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Attest, Heartbeat, Offer, Report, Start, Tick, Unban
from coordinator.run.state.events import PayloadRejected, PeerQuarantined, PeerStruck, PlanAdopted
from coordinator.status.messages import event_message
from protocol.errors import ErrorCode
from protocol.spec.fixed import LEAST_SHARE
from protocol.types import Committed, Decision, PayloadDescriptor, Rejection
from tests.builders import Keyed, anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_run import Run

A, B, C, BAD = (keyed(i) for i in range(4))
HONEST = (A, B, C)
WHY = "It holds values that are not finite."
ROUNDS = 6


@pytest.fixture
def run() -> Run:
    """Three honest full replicas and a bad one, of one stage."""
    return started(*HONEST, BAD)


def started(*peers: Keyed) -> Run:
    run = Run(spec_of(stages=1, replicas=len(peers), rounds=ROUNDS))
    run.accept(Start())
    for peer in peers:
        run.accept(peer.join(run.spec))
    return run


def offered(run: Run, *peers: Keyed) -> dict[Keyed, PayloadDescriptor]:
    number = run.state.current_round
    payloads = {peer: peer.payload(run.spec, 0, number) for peer in peers}
    for peer, payload in payloads.items():
        run.accept(Offer(peer.peer, payload))
    return payloads


def decided(run: Run, accusers: tuple[Keyed, ...], honest: tuple[Keyed, ...] = HONEST) -> Decision:
    """A round in which `accusers` reject the payload of the bad peer, and all peers hold the others."""
    number = run.state.current_round
    payloads = offered(run, *honest, BAD)
    for peer in (*honest, BAD):
        rejected = (Rejection(payloads[BAD], WHY),) if peer in accusers else ()
        held = tuple(d for owner, d in payloads.items() if not (rejected and owner is BAD))
        run.accept(Report(peer.peer, 0, number, held, rejected))
    for peer in honest:
        if run.state.peers[peer.peer].is_live:
            run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))
    return run.state.decisions[0, number]


def test_a_payload_rejected_by_the_group_is_dropped_and_costs_its_owner_a_strike(run: Run) -> None:
    decision = decided(run, HONEST)
    assert [entry.descriptor.owner for entry in decision.entries] == sorted(peer.peer for peer in HONEST)
    (strike,) = [event for event in run.events if isinstance(event, PeerStruck)]
    assert (strike.peer, strike.round_number, strike.reason) == (BAD.peer, 1, WHY)
    assert short(BAD.peer) in event_message(strike)
    assert WHY in event_message(strike)
    assert run.state.peers[BAD.peer].is_live, "one strike is no quarantine"
    rejected = [event for event in run.events if isinstance(event, PayloadRejected)]
    assert {event.peer for event in rejected} == {peer.peer for peer in HONEST}
    assert all(event.owner == BAD.peer and WHY in event_message(event) for event in rejected)


def test_two_payloads_that_a_peer_has_signed_for_one_round_cost_it_a_strike_whoever_shows_the_other(
    run: Run,
) -> None:
    payloads = offered(run, *HONEST, BAD)
    other = BAD.payload(run.spec, 0, 1, weight=0.5)
    assert other.sha256 == payloads[BAD].sha256, "only the weight differs"
    run.accept(Report(A.peer, 0, 1, (payloads[A], other), ()))
    (strike,) = [event for event in run.events if isinstance(event, PeerStruck)]
    assert (strike.peer, strike.round_number) == (BAD.peer, 1)


def test_payloads_of_two_plans_or_anchors_are_no_contradiction(run: Run) -> None:
    """A peer that lost its state, or got another plan for the same round, makes another payload."""
    payloads = offered(run, *HONEST, BAD)
    run.accept(Report(A.peer, 0, 1, (payloads[A], BAD.payload(run.spec, 0, 1, anchor="f" * 64)), ()))
    assert not [event for event in run.events if isinstance(event, PeerStruck)]


def test_repeated_strikes_end_in_quarantine_and_the_others_go_on(run: Run) -> None:
    for number in range(1, STRIKES_TO_QUARANTINE + 1):
        assert BAD.peer not in run.state.quarantined
        assert isinstance(decided(run, HONEST), Committed), number
    assert run.state.quarantined == {BAD.peer}
    (event,) = [event for event in run.events if isinstance(event, PeerQuarantined)]
    assert "QUARANTINE" in event_message(event)
    number = run.state.current_round
    assert [replica.host_of(0).peer for replica in run.state.plan_for(number).replicas] == [
        peer.peer for peer in HONEST
    ]
    for command in (Heartbeat(BAD.peer, 1, 0), Offer(BAD.peer, BAD.payload(run.spec, 0, number))):
        assert "rounds 1, 2, 3" in run.refuse(command, ErrorCode.QUARANTINED).cause
    run.refuse(BAD.join(run.spec), ErrorCode.QUARANTINED)
    payloads = offered(run, *HONEST)
    for peer in HONEST:
        run.accept(Report(peer.peer, 0, number, tuple(payloads.values())))
    assert len(run.state.decisions[0, number].entries) == 3
    assert replay(Run(run.spec).state, run.events) == run.state


def test_the_operator_can_lift_a_quarantine(run: Run) -> None:
    for _ in range(STRIKES_TO_QUARANTINE):
        decided(run, HONEST)
    run.accept(Unban(BAD.peer))
    assert not run.state.quarantined
    assert not run.state.strikes
    run.refuse(Heartbeat(BAD.peer, 1, 0), ErrorCode.UNKNOWN_PEER)


@pytest.mark.parametrize("accusers", [(A,), ()], ids=["one", "none"])
def test_the_rejection_of_one_peer_causes_no_strike(run: Run, accusers: tuple[Keyed, ...]) -> None:
    decision = decided(run, accusers)
    assert BAD.peer in [entry.descriptor.owner for entry in decision.entries]
    assert not run.state.strikes


def test_half_of_the_group_is_not_enough_for_a_strike() -> None:
    others = tuple(keyed(i) for i in range(10, 14))
    run = started(*others, BAD)
    decided(run, others[:2], others)
    assert not run.state.strikes
    decided(run, others[:3], others)
    assert run.state.strikes == {BAD.peer: (2,)}


def test_of_two_replicas_the_bad_payload_is_dropped_without_a_strike() -> None:
    """It is the word of one against that of the other."""
    run = started(A, BAD)
    decision = decided(run, (A,), (A,))
    assert [entry.descriptor.owner for entry in decision.entries] == [A.peer]
    assert not run.state.strikes
    assert any(isinstance(event, PayloadRejected) and event.owner == BAD.peer for event in run.events)


def test_a_bad_peer_that_rejects_all_payloads_changes_nothing(run: Run) -> None:
    payloads = offered(run, *HONEST, BAD)
    lies = tuple(Rejection(payloads[peer], "I do not like it") for peer in HONEST)
    run.accept(Report(BAD.peer, 0, 1, (payloads[BAD],), lies))
    for peer in HONEST:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads.values())))
    assert len(run.state.decisions[0, 1].entries) == 4
    assert not run.state.strikes


def test_only_another_peers_offered_payload_can_be_rejected_and_only_once(run: Run) -> None:
    payloads = offered(run, *HONEST, BAD)
    nonsense = (
        Rejection(tampered(payloads[BAD]), WHY),
        Rejection(BAD.payload(run.spec, 0, 2), WHY),
        Rejection(keyed(20).payload(run.spec, 0, 1), WHY),
        Rejection(payloads[A], WHY),
    )
    for rejection in nonsense:
        run.accept(Report(A.peer, 0, 1, (payloads[A],), (rejection,)))
    assert not run.state.round_of(0, 1).rejections
    for _ in range(3):
        run.accept(Report(A.peer, 0, 1, (payloads[A],), (Rejection(payloads[BAD], WHY),)))
    assert run.state.round_of(0, 1).rejections == {BAD.peer: {A.peer: WHY}}
    assert sum(isinstance(event, PayloadRejected) for event in run.events) == 1


class TestStrikesWithoutReports:
    def test_an_offer_that_no_honest_peer_makes_costs_one_strike_a_round(self, run: Run) -> None:
        good = BAD.payload(run.spec, 0, 1)
        for bad in (tampered(good), BAD.payload(run.spec, 0, 1, weight=1.5)):
            run.refuse(Offer(BAD.peer, bad), ErrorCode.BAD_REQUEST)
        assert run.state.strikes == {BAD.peer: (1,)}

    def test_a_weight_beyond_the_one_assigned_is_refused_and_a_smaller_one_taken(self, run: Run) -> None:
        heavy = Offer(BAD.peer, BAD.payload(run.spec, 0, 1, weight=1.0001))
        cause = run.refuse(heavy, ErrorCode.BAD_REQUEST).cause
        assert "it may have 0.1 to 1.0" in cause
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1, weight=0.5)))

    def test_a_weight_below_the_least_share_is_refused_and_the_least_one_taken(self, run: Run) -> None:
        least = LEAST_SHARE
        light = Offer(BAD.peer, BAD.payload(run.spec, 0, 1, weight=0.99 * least))
        run.refuse(light, ErrorCode.BAD_REQUEST)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1, weight=least)))

    def test_two_payloads_for_one_round_are_proof_enough(self, run: Run) -> None:
        """The coordinator is shown one, the peers, which matched without it, the other."""
        payloads = offered(run, *HONEST, BAD)
        other = BAD.payload(run.spec, 0, 1, weight=0.5)
        for peer in HONEST:
            run.accept(Report(peer.peer, 0, 1, (*(payloads[each] for each in HONEST), other)))
        run.now += run.spec.timing.decide
        for peer in (*HONEST, BAD):
            run.accept(Heartbeat(peer.peer, 1, 0))
        run.accept(Tick())
        decision = run.state.decisions[0, 1]
        assert BAD.peer not in [entry.descriptor.owner for entry in decision.entries]
        assert len(decision.entries) == 3
        assert run.state.strikes == {BAD.peer: (1,)}

    @pytest.mark.parametrize("other", [{"epoch": 1}, {"anchor": "f" * 64}], ids=["plan", "anchor"])
    def test_another_payload_of_another_plan_or_anchor_is_no_lie(
        self, run: Run, other: dict[str, Any]
    ) -> None:
        """A peer that lost its state, or got another plan for the round, makes another payload honestly."""
        run.apply(PlanAdopted(run.now, replace(run.state.plans[-1], epoch=2)))
        run.accept(Offer(BAD.peer, BAD.payload(run.spec, 0, 1, epoch=2)))
        second = BAD.payload(run.spec, 0, 1, weight=0.5, **({"epoch": 2} | other))
        run.refuse(Offer(BAD.peer, second), ErrorCode.SEAT_LOST)
        for peer in HONEST:
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 1, epoch=2)))
        for peer in HONEST:
            run.accept(Report(peer.peer, 0, 1, (second,)))
        assert run.state.strikes == {}

    def test_a_payload_of_a_plan_that_does_not_exist_is_refused(self, run: Run) -> None:
        for epoch in (0, 2):
            run.refuse(Offer(BAD.peer, BAD.payload(run.spec, 0, 1, epoch=epoch)), ErrorCode.BAD_REQUEST)

    def test_a_payload_signed_for_another_run_says_nothing_about_its_owner(self, run: Run) -> None:
        """The same spec, peers, round, anchor and plan, under another authority."""
        foreign = BAD.payload(run.spec, 0, 1, weight=0.5, run=f"{run.spec.name}-{'0' * 32}")
        run.refuse(Offer(BAD.peer, foreign), ErrorCode.BAD_REQUEST)
        payloads = offered(run, *HONEST, BAD)
        for shown in (foreign, replace(foreign, run=run.state.run)):
            run.refuse(Report(A.peer, 0, 1, (payloads[A], shown)), ErrorCode.BAD_REQUEST)
        assert run.state.strikes == {}
        assert A.peer not in run.state.round_of(0, 1).reports

    def test_a_replayed_payload_never_counts(self, run: Run) -> None:
        decided(run, ())
        replayed = BAD.payload(run.spec, 0, 1)
        assert run.accept(Offer(BAD.peer, replayed)) == (), "its round is over"
        run.refuse(Report(A.peer, 0, 2, (replayed,)), ErrorCode.BAD_REQUEST)
        assert not run.state.round_of(0, 2).offers
