"""The rules of a round: offers, the exchange group, reports, the decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.run.rounds.deadlines import FIRST_SECONDS
from coordinator.run.rounds.rounds import MAX_HOLDERS
from coordinator.run.state.commands import Attest, Await, Leave, Offer, Report
from coordinator.run.state.events import (
    GroupClosed,
    HoldingsReported,
    PayloadOffered,
    RoundDecided,
)
from protocol.errors import ErrorCode
from protocol.spec.fixed import LEAST_WINDOW_SECONDS
from protocol.types import Aborted, Committed, Decision, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_run import Run, beat_for, joined_run, offer, settle, started

A, B, C, D = (keyed(i) for i in range(4))


class TestOffers:
    def test_the_group_closes_with_the_last_offer_in_canonical_order(self, run: Run) -> None:
        assert len(run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))) == 1
        events = run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        assert [type(event) for event in events] == [PayloadOffered, GroupClosed]
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert [d.owner for d in group.descriptors] == sorted([A.peer, B.peer])

    def test_the_same_offer_again_changes_nothing(self, run: Run) -> None:
        offer = Offer(A.peer, A.payload(run.spec, 0, 1))
        run.accept(offer)
        assert run.accept(offer) == ()

    def test_another_payload_of_the_same_peer_is_refused(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 1, weight=2.0)), ErrorCode.BAD_REQUEST)

    def test_the_window_closes_the_group_without_the_slow(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        beat_for(run, FIRST_SECONDS - 1, A, B)
        assert run.state.round_of(0, 1).group is None
        beat_for(run, 1, A, B)
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert [d.owner for d in group.descriptors] == [A.peer]
        assert run.accept(Offer(B.peer, B.payload(run.spec, 0, 1))) == (), "a late offer is not an error"

    def test_a_lost_peer_is_waited_for_no_longer(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        events = run.accept(Leave(B.peer, "interrupted"))
        assert isinstance(events[-1], GroupClosed)

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e7])
    def test_an_invalid_weight_is_refused(self, run: Run, weight: float) -> None:
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 1, weight=weight)), ErrorCode.BAD_REQUEST)

    def test_a_forged_foreign_or_too_large_payload_is_refused(self, run: Run) -> None:
        good = A.payload(run.spec, 0, 1)
        for bad in (
            Offer(A.peer, tampered(good)),
            Offer(A.peer, replace(good, run="another")),
            Offer(A.peer, replace(good, nbytes=2**40)),
            Offer(A.peer, replace(good, nbytes=0)),
            Offer(B.peer, good),
            Offer(A.peer, A.payload(run.spec, 2, 1)),
            Offer(A.peer, A.payload(run.spec, 0, 0)),
        ):
            run.refuse(bad, ErrorCode.BAD_REQUEST)
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 2)), ErrorCode.COORDINATOR_BEHIND)
        run.refuse(Offer(C.peer, C.payload(run.spec, 0, 1)), ErrorCode.UNKNOWN_PEER)

    def test_the_next_round_opens_when_every_stage_is_decided(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 2)), ErrorCode.BAD_REQUEST)
        settle(run, 1, 1, [A, B])
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 2)))

    def test_an_offer_from_another_anchor_than_the_settled_is_refused_and_recorded_once(
        self, run: Run
    ) -> None:
        run.accept(Attest(A.peer, 0, 0, "stage", anchor_of(0, 0)))
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        bad = Offer(B.peer, B.payload(run.spec, 0, 1, anchor="other"))
        assert anchor_of(0, 0) in run.refuse(bad, ErrorCode.ANCHOR_DIVERGED).cause
        assert run.state.diverged == {(B.peer, 0, 0, "stage")}
        assert run.send(bad).events == ()
        assert run.state.round_of(0, 1).offers.keys() == {A.peer}

    def test_an_offer_from_another_anchor_than_was_attested_is_refused(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        settle(run, 1, 1, [A, B])
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 2, anchor="other")), ErrorCode.ANCHOR_DIVERGED)
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 2)))

    def test_a_group_never_mixes_anchors_even_if_attestations_come_after_offers(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1, anchor="other")))
        run.accept(Attest(B.peer, 0, 0, "stage", anchor_of(0, 0)))
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert [descriptor.owner for descriptor in group.descriptors] == [B.peer]
        assert run.state.diverged == {(A.peer, 0, 0, "stage")}


class TestDecisions:
    def test_payloads_that_two_peers_hold_are_committed_in_canonical_order(self, run: Run) -> None:
        decision = settle(run, 0, 1, [A, B])
        assert isinstance(decision, Committed)
        assert [entry.descriptor.owner for entry in decision.entries] == sorted([A.peer, B.peer])
        assert all(set(entry.holders) == {A.peer, B.peer} for entry in decision.entries)
        assert decision.next_epoch == 1

    def test_a_round_without_a_payload_held_by_two_is_aborted_with_a_reason(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a,)))
        (_, event) = run.accept(Report(B.peer, 0, 1, (b,)))
        assert isinstance(event, RoundDecided)
        assert isinstance(event.decision, Aborted)
        assert event.decision.reason == (
            "none of 2 payloads is held by 2 peers and by more than half of the group"
        )

    @pytest.mark.parametrize("holding", [2, 3])
    def test_a_payload_counts_where_more_than_half_of_the_reporters_hold_it(self, holding: int) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        hosts = [A, B, C, D]
        payloads = [host.payload(run.spec, 0, 1) for host in hosts]
        for host, payload in zip(hosts, payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        for host in hosts:
            held = payloads if host in hosts[:holding] else payloads[1:]
            run.accept(Report(host.peer, 0, 1, tuple(held)))
        decision = run.state.decisions[0, 1]
        expected = payloads if holding == 3 else payloads[1:]
        assert {entry.descriptor.owner for entry in decision.entries} == {each.owner for each in expected}
        assert ("replica-0, which too few" in decision.reason) == (holding == 2)

    def test_two_colluding_peers_cannot_commit_a_payload_that_others_lack(self) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        payloads = {host: host.payload(run.spec, 0, 1) for host in (A, B, C, D)}
        for host, payload in payloads.items():
            run.accept(Offer(host.peer, payload))
        for side in ((A, B), (C, D)):
            for host in side:
                run.accept(Report(host.peer, 0, 1, tuple(payloads[each] for each in side)))
        assert isinstance(run.state.decisions[0, 1], Aborted)

    def test_peers_without_a_report_do_not_count_against_a_payload(self) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        payloads = tuple(host.payload(run.spec, 0, 1) for host in (A, B, C, D))
        for host, payload in zip((A, B, C, D), payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        for host in (A, B):
            run.accept(Report(host.peer, 0, 1, payloads))
        beat_for(run, run.spec.timing.decide, A, B, C, D)
        assert len(run.state.decisions[0, 1].entries) == 4

    def test_one_replica_alone_commits_what_it_alone_holds(self) -> None:
        run = joined_run(spec_of(2, 1), Role.REPLICA)
        assert isinstance(settle(run, 0, 1, [A]), Committed)

    def test_the_deadline_decides_without_the_silent(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a, b)))
        beat_for(run, run.spec.timing.decide - 1, A, B)
        assert (0, 1) not in run.state.decisions
        beat_for(run, 1, A, B)
        assert isinstance(run.state.decisions[0, 1], Aborted), "B lives, and only A is known to hold anything"

    def test_the_survivor_commits_what_it_holds_when_the_other_is_lost(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a, b)))
        run.accept(Leave(B.peer, "interrupted"))
        decision = run.state.decisions[0, 1]
        assert [entry.holders for entry in decision.entries] == [(A.peer,), (A.peer,)]

    def test_a_late_or_repeated_report_never_changes_a_decision(self, run: Run) -> None:
        decision = settle(run, 0, 1, [A, B])
        assert run.accept(Report(A.peer, 0, 1, ())) == ()
        assert run.state.decisions[0, 1] is decision

    def test_a_report_of_a_payload_outside_the_group_is_refused(self, run: Run) -> None:
        a = A.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        run.refuse(Report(A.peer, 0, 1, (tampered(a),)), ErrorCode.BAD_REQUEST)
        run.refuse(Report(A.peer, 0, 1, (a, a)), ErrorCode.BAD_REQUEST)

    def test_reports_count_as_offers_when_the_peers_matched_without_the_coordinator(self, run: Run) -> None:
        held = (A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1))
        run.refuse(Report(A.peer, 0, 1, (tampered(held[0]),)), ErrorCode.BAD_REQUEST)
        run.refuse(Report(A.peer, 0, 1, (C.payload(run.spec, 0, 1),)), ErrorCode.BAD_REQUEST)
        run.accept(Report(A.peer, 0, 1, held))
        run.accept(Report(B.peer, 0, 1, held))
        assert len(run.state.decisions[0, 1].entries) == 2

    def test_a_report_on_a_group_names_only_what_the_peer_lacks(self) -> None:
        run = started(4, stages=1)
        peers = [keyed(i) for i in range(4)]
        payloads = [peer.payload(run.spec, 0, 1) for peer in peers]
        for peer, payload in zip(peers, payloads, strict=True):
            offer(run, peer, payload)
        everything = frozenset(peer.peer for peer in peers)
        all_of_them, but_one, one = (
            run.accept(Report(peer.peer, 0, 1, tuple(held)))[0]
            for peer, held in zip(peers, (payloads, payloads[1:], payloads[2:3]), strict=False)
        )
        assert all_of_them == HoldingsReported(run.now, 0, 1, A.peer, (), 4, ())
        assert but_one == HoldingsReported(run.now, 0, 1, B.peer, (), 4, (A.peer,))
        assert one == HoldingsReported(run.now, 0, 1, C.peer, (C.peer,))
        assert [each.count for each in (all_of_them, but_one, one)] == [4, 3, 1]
        reports = run.state.round_of(0, 1).reports
        assert reports == {A.peer: everything, B.peer: everything - {A.peer}, C.peer: {C.peer}}

    def test_a_reported_payload_of_a_diverged_anchor_is_left_out_and_its_owner_named(self, run: Run) -> None:
        run.accept(Attest(A.peer, 0, 0, "stage", anchor_of(0, 0)))
        held = (A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1, anchor="other"))
        run.accept(Report(A.peer, 0, 1, held))
        assert run.state.round_of(0, 1).reports == {A.peer: {A.peer}}
        assert run.state.diverged == {(B.peer, 0, 0, "stage")}

    def test_a_replica_without_payload_is_not_waited_for(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        *_, closed = run.accept(Await(B.peer, 0, 1, epoch=1))
        assert isinstance(closed, GroupClosed)

    def test_a_round_without_any_payload_is_aborted_at_once(self, run: Run) -> None:
        run.accept(Await(A.peer, 0, 1, epoch=1))
        assert run.accept(Await(A.peer, 0, 1, epoch=1)) == ()
        *_, aborted = run.accept(Await(B.peer, 0, 1, epoch=1))
        assert isinstance(aborted, RoundDecided)
        assert isinstance(aborted.decision, Aborted)
        assert aborted.decision.reason == "no replica had a payload to offer"

    def test_a_round_waits_for_a_peer_that_only_asks_for_the_decision(self, run: Run) -> None:
        assert run.accept(Await(B.peer, 0, 1)) == ()
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        assert run.accept(Await(B.peer, 0, 1)) == ()
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert {d.owner for d in group.descriptors} == {A.peer, B.peer}

    def test_asking_for_the_decision_of_another_stage_withholds_nothing(self, mixed: Run) -> None:
        assert mixed.accept(Await(C.peer, 0, 1, epoch=1)) == ()
        mixed.refuse(Await(C.peer, 2, 1, epoch=1), ErrorCode.BAD_REQUEST)
        mixed.refuse(Await(C.peer, 0, 4, epoch=1), ErrorCode.BAD_REQUEST)
        mixed.refuse(Await(D.peer, 0, 1, epoch=1), ErrorCode.UNKNOWN_PEER)

    def test_a_stage_without_offers_does_not_delay_the_others(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        beat_for(run, run.spec.timing.match_window, A, B)
        decision = run.state.decisions[1, 1]
        assert isinstance(decision, Aborted)
        assert "no peer offered" in decision.reason
        assert run.state.current_round == 2

    def test_an_inner_phase_may_take_longer_than_any_window(self, run: Run) -> None:
        beat_for(run, 10 * run.spec.timing.match_window, A, B)
        assert run.state.decisions == {}

    def test_a_manifest_names_a_bounded_number_of_holders(self) -> None:
        count = MAX_HOLDERS + 4
        spec = spec_of(1, count)
        run = joined_run(spec, *[Role.REPLICA] * count)
        decision = settle(run, 0, 1, [keyed(i) for i in range(count)])
        assert {len(entry.holders) for entry in decision.entries} == {MAX_HOLDERS}
        assert len({holder for entry in decision.entries for holder in entry.holders}) == count


class TestWeight:
    """More than half of the assigned weight of the live replicas must contribute."""

    def five(self) -> tuple[Run, list[Keyed]]:
        run = joined_run(spec_of(1, 5, rounds=20), *[Role.REPLICA] * 5)
        return run, [keyed(i) for i in range(5)]

    def closed_with(self, run: Run, *hosts: Keyed, weight: float = 1.0) -> Decision | None:
        """These hosts offer and hold each other's payloads, and the window passes."""
        number = run.state.current_round
        payloads = tuple(host.payload(run.spec, 0, number, weight=weight) for host in hosts)
        for host, payload in zip(hosts, payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        live = [peer for peer in map(keyed, range(5)) if run.state.peers[peer.peer].is_live]
        beat_for(run, 2 * LEAST_WINDOW_SECONDS, *live)
        for host in hosts if run.state.round_of(0, number).group else ():
            run.accept(Report(host.peer, 0, number, payloads))
        return run.state.decisions.get((0, number))

    def test_two_of_five_neither_close_nor_decide_a_round(self) -> None:
        run, peers = self.five()
        assert self.closed_with(run, *peers[3:]) is None
        assert run.state.round_of(0, 1).group is None
        decision = settle(run, 0, 1, peers)
        assert len(decision.entries) == 5

    def test_three_of_five_decide_a_round(self) -> None:
        run, peers = self.five()
        decision = self.closed_with(run, *peers[:3])
        assert decision is not None
        assert {entry.descriptor.owner for entry in decision.entries} == {each.peer for each in peers[:3]}

    def test_half_closes_a_round_and_does_not_commit_it(self) -> None:
        run, peers = self.five()
        run.accept(Leave(peers[4].peer, "interrupted"))
        decision = self.closed_with(run, *peers[:2])
        assert decision is not None
        assert isinstance(decision, Aborted)
        assert decision.reason == "replicas that weigh 2 of 4 contribute, and more than half must"

    def test_small_shares_count_with_the_whole_weight_of_their_replicas(self) -> None:
        run, peers = self.five()
        decision = self.closed_with(run, *peers[:3], weight=0.2)
        assert decision is not None
        assert isinstance(decision, Committed)

    def test_replicas_that_are_gone_or_withhold_do_not_count(self) -> None:
        run, peers = self.five()
        run.accept(Leave(peers[4].peer, "interrupted"))
        run.accept(Await(peers[3].peer, 0, 1, epoch=1))
        decision = self.closed_with(run, *peers[:2])
        assert decision is not None
        assert isinstance(decision, Committed), "two of three"

    def test_a_payload_that_is_not_held_does_not_count(self) -> None:
        run, peers = self.five()
        payloads = tuple(host.payload(run.spec, 0, 1) for host in peers)
        for host, payload in zip(peers, payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        for host, payload in zip(peers, payloads, strict=True):
            run.accept(Report(host.peer, 0, 1, tuple({*payloads[3:], payload})))
        decision = run.state.decisions[0, 1]
        assert decision.reason == "replicas that weigh 2 of 5 contribute, and more than half must"
