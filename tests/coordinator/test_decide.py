"""What the coordinator decides: every rule of joining, of rounds, of losses and of the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.attestation import expected_digest, settled_digest
from coordinator.rounds.rounds import MAX_HOLDERS
from coordinator.state.apply import replay
from coordinator.state.commands import Attest, Await, Heartbeat, Leave, Offer, Report, Start, Tick
from coordinator.state.events import (
    AnchorDiverged,
    DigestAttested,
    Event,
    GroupClosed,
    PayloadOffered,
    PeerJoined,
    PeerLost,
    PeerMeasured,
    PeerSeen,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from coordinator.state.state import State
from coordinator.status.messages import run_message
from protocol.algorithm.sampling import sample_range
from protocol.errors import ErrorCode
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import PROTOCOL_VERSION, Decision, Estimates, Lifecycle, LinkEstimate, PeerId, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_run import Run

A, B, C, D = (keyed(i) for i in range(4))


def started(spec: RunSpec, *roles: Role) -> Run:
    """A run whose peers A, B, ... have joined in these roles."""
    run = Run(spec)
    run.accept(Start())
    for i, role in enumerate(roles):
        run.accept(keyed(i).join(spec, role))
    return run


@pytest.fixture
def run() -> Run:
    """Two full replicas, A and B, of two stages; three rounds."""
    return started(spec_of(), Role.REPLICA, Role.REPLICA)


@pytest.fixture
def mixed() -> Run:
    """A full replica, A, and a pipeline of B (stage 0) and C (stage 1)."""
    return started(spec_of(2, 1, 1), Role.REPLICA, Role.STAGE, Role.STAGE)


def settle(run: Run, stage: int, round_number: int, hosts: list) -> Decision:
    """All of `hosts` offer, hold everything, report, and attest."""
    payloads = [host.payload(run.spec, stage, round_number) for host in hosts]
    for host, payload in zip(hosts, payloads, strict=True):
        run.accept(Offer(host.peer, payload))
    for host in hosts:
        run.accept(Report(host.peer, stage, round_number, tuple(payloads)))
    for host in hosts:
        run.accept(Attest(host.peer, stage, round_number, "stage", anchor_of(stage, round_number)))
    return run.state.decisions[stage, round_number]


class TestJoin:
    def test_another_protocol_version_is_refused_with_both_versions(self) -> None:
        run = Run(spec_of())
        wrong = replace(A.join(run.spec), protocol_version=7, spec_hash="also wrong", peer=PeerId("?"))
        cause = run.refuse(wrong, ErrorCode.VERSION_MISMATCH).cause
        assert f"version {PROTOCOL_VERSION}" in cause
        assert "7" in cause

    def test_another_spec_is_refused_with_both_full_hashes(self) -> None:
        run, other = Run(spec_of()), spec_of(rounds=9)
        cause = run.refuse(replace(A.join(run.spec), spec_hash=other.hash), ErrorCode.SPEC_MISMATCH).cause
        assert run.spec.hash in cause
        assert other.hash in cause

    def test_a_node_without_spec_is_accepted(self) -> None:
        run = Run(spec_of())
        assert run.accept(replace(A.join(run.spec), spec_hash=""))

    @pytest.mark.parametrize("name", ["", "peer", "1" * 65, A.peer[:-1], "0OIl"])
    def test_a_name_that_is_no_peer_id_is_refused(self, name: str) -> None:
        run = Run(spec_of())
        run.refuse(replace(A.join(run.spec), peer=PeerId(name)), ErrorCode.BAD_REQUEST)

    def test_a_live_peer_cannot_join_twice_but_a_gone_one_can_return_before_the_start(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        run.refuse(A.join(run.spec, Role.STAGE), ErrorCode.ALREADY_ACTIVE)
        run.accept(Heartbeat(A.peer, 0, 0))
        run.refuse(A.join(run.spec), ErrorCode.ALREADY_ACTIVE)
        run.accept(Leave(A.peer, "changed my mind"))
        run.accept(A.join(run.spec))
        assert run.state.peers[A.peer].arrival == 2

    def test_a_surplus_peer_is_told_what_is_missing(self) -> None:
        run = Run(spec_of(2, 1, 1))
        run.accept(A.join(run.spec))
        refusal = run.refuse(B.join(run.spec), ErrorCode.RUN_FULL)
        assert "2 more stage peers (0 of 2 here)" in refusal.cause

    def test_one_more_stage_peer_is_taken_where_two_could_not_be_neighbours(self) -> None:
        run = Run(spec_of(2, 0, 1))
        run.accept(A.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.refuse(C.join(run.spec, Role.STAGE, endpoint=""), ErrorCode.RUN_FULL)
        run.accept(C.join(run.spec, Role.STAGE))
        assert [m.peer for m in run.state.plans[0].replicas[0].members] == [A.peer, C.peer]

    def test_a_peer_heard_of_within_two_heartbeats_is_another_node_of_that_identity(self, run: Run) -> None:
        run.accept(Heartbeat(A.peer, 0, 0))
        run.now += 2 * run.spec.timing.heartbeat
        run.refuse(A.join(run.spec), ErrorCode.ALREADY_ACTIVE)
        run.now += 0.1
        lost, joined, *_ = run.accept(A.join(run.spec))
        assert isinstance(lost, PeerLost)
        assert isinstance(joined, PeerJoined)

    def test_a_join_whose_answer_was_lost_may_be_repeated(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        assert run.accept(A.join(run.spec)) == ()
        run.accept(B.join(run.spec))
        assert run.accept(B.join(run.spec)) == ()

    def test_the_last_peer_needed_starts_the_run_in_the_same_step(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        assert run.state.phase is RunPhase.GATHERING
        joined, adopted = run.accept(B.join(run.spec))
        assert isinstance(joined, PeerJoined)
        assert isinstance(adopted, PlanAdopted)
        assert (adopted.plan.epoch, adopted.plan.from_round, adopted.plan.first_sample) == (1, 1, 0)
        assert run.state.current_round == 1
        assert {p.lifecycle for p in run.state.peers.values()} == {Lifecycle.TRAINING}


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
        beats(run, run.spec.timing.least_window - 1, A, B)
        assert run.state.round_of(0, 1).group is None
        beats(run, 1, A, B)
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert [d.owner for d in group.descriptors] == [A.peer]
        assert run.accept(Offer(B.peer, B.payload(run.spec, 0, 1))) == (), "a late offer is not an error"

    def test_a_lost_peer_is_waited_for_no_longer(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        events = run.accept(Leave(B.peer, "interrupted"))
        assert isinstance(events[-1], GroupClosed)

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e7])
    def test_a_weight_that_would_spoil_the_mean_is_refused(self, run: Run, weight: float) -> None:
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 1, weight=weight)), ErrorCode.BAD_REQUEST)

    def test_what_is_forged_foreign_or_too_large_is_refused(self, run: Run) -> None:
        good = A.payload(run.spec, 0, 1)
        for bad in (
            Offer(A.peer, tampered(good)),
            Offer(A.peer, replace(good, run="another")),
            Offer(A.peer, replace(good, nbytes=2**40)),
            Offer(A.peer, replace(good, nbytes=0)),
            Offer(B.peer, good),
            Offer(A.peer, A.payload(run.spec, 2, 1)),
            Offer(A.peer, A.payload(run.spec, 0, 2)),
            Offer(A.peer, A.payload(run.spec, 0, 0)),
        ):
            run.refuse(bad, ErrorCode.BAD_REQUEST)
        run.refuse(Offer(C.peer, C.payload(run.spec, 0, 1)), ErrorCode.UNKNOWN_PEER)

    def test_only_the_host_of_a_stage_offers_for_it(self, mixed: Run) -> None:
        mixed.refuse(Offer(B.peer, B.payload(mixed.spec, 1, 1)), ErrorCode.BAD_REQUEST)

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
        assert decision.committed
        assert [entry.descriptor.owner for entry in decision.entries] == sorted([A.peer, B.peer])
        assert all(set(entry.holders) == {A.peer, B.peer} for entry in decision.entries)
        assert decision.next_epoch == 1

    def test_a_payload_that_only_its_owner_holds_is_left_out(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a,)))
        run.accept(Report(B.peer, 0, 1, (a, b)))
        decision = run.state.decisions[0, 1]
        assert [entry.descriptor for entry in decision.entries] == [a]
        assert "replica-1" in decision.reason

    def test_nothing_held_by_two_aborts_with_a_sentence(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a,)))
        (_, event) = run.accept(Report(B.peer, 0, 1, (b,)))
        assert isinstance(event, RoundAborted)
        assert event.decision.entries == ()
        assert event.decision.reason == (
            "none of 2 payloads is held by 2 peers and by more than half of the group"
        )

    @pytest.mark.parametrize("holding", [2, 3])
    def test_a_payload_counts_where_more_than_half_of_the_reporters_hold_it(self, holding: int) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
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

    def test_two_that_hold_together_cannot_have_the_others_wait_for_what_nobody_gives(self) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
        payloads = {host: host.payload(run.spec, 0, 1) for host in (A, B, C, D)}
        for host, payload in payloads.items():
            run.accept(Offer(host.peer, payload))
        for side in ((A, B), (C, D)):
            for host in side:
                run.accept(Report(host.peer, 0, 1, tuple(payloads[each] for each in side)))
        assert run.state.decisions[0, 1].entries == ()

    def test_those_who_have_not_reported_do_not_count_against_a_payload(self) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
        payloads = tuple(host.payload(run.spec, 0, 1) for host in (A, B, C, D))
        for host, payload in zip((A, B, C, D), payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        for host in (A, B):
            run.accept(Report(host.peer, 0, 1, payloads))
        beats(run, run.spec.timing.decide, A, B, C, D)
        assert len(run.state.decisions[0, 1].entries) == 4

    def test_one_replica_alone_commits_what_it_alone_holds(self) -> None:
        run = started(spec_of(2, 1), Role.REPLICA)
        assert settle(run, 0, 1, [A]).committed

    def test_the_deadline_decides_without_the_silent(self, run: Run) -> None:
        a, b = A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)
        run.accept(Offer(A.peer, a))
        run.accept(Offer(B.peer, b))
        run.accept(Report(A.peer, 0, 1, (a, b)))
        beats(run, run.spec.timing.decide - 1, A, B)
        assert (0, 1) not in run.state.decisions
        beats(run, 1, A, B)
        assert not run.state.decisions[0, 1].committed, "B is alive, and only A is known to hold anything"

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

    def test_a_report_of_what_is_not_in_the_group_is_refused(self, run: Run) -> None:
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

    def test_a_reported_payload_of_a_diverged_anchor_is_left_out_and_its_owner_named(self, run: Run) -> None:
        run.accept(Attest(A.peer, 0, 0, "stage", anchor_of(0, 0)))
        held = (A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1, anchor="other"))
        run.accept(Report(A.peer, 0, 1, held))
        assert run.state.round_of(0, 1).reports == {A.peer: {A.peer}}
        assert run.state.diverged == {(B.peer, 0, 0, "stage")}

    def test_a_replica_without_payload_is_not_waited_for(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        *_, closed = run.accept(Await(B.peer, 0, 1, withheld=1))
        assert isinstance(closed, GroupClosed)

    def test_a_round_without_any_payload_is_aborted_at_once(self, run: Run) -> None:
        run.accept(Await(A.peer, 0, 1, withheld=1))
        assert run.accept(Await(A.peer, 0, 1, withheld=1)) == ()
        *_, aborted = run.accept(Await(B.peer, 0, 1, withheld=1))
        assert isinstance(aborted, RoundAborted)
        assert aborted.decision.reason == "no replica had a payload to offer"

    def test_who_only_asks_may_offer_yet_and_is_waited_for(self, run: Run) -> None:
        assert run.accept(Await(B.peer, 0, 1)) == ()
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        assert run.accept(Await(B.peer, 0, 1)) == ()
        run.accept(Offer(B.peer, B.payload(run.spec, 0, 1)))
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert {d.owner for d in group.descriptors} == {A.peer, B.peer}

    def test_asking_for_the_decision_of_another_stage_promises_nothing(self, mixed: Run) -> None:
        assert mixed.accept(Await(C.peer, 0, 1, withheld=1)) == ()
        mixed.refuse(Await(C.peer, 2, 1, withheld=1), ErrorCode.BAD_REQUEST)
        mixed.refuse(Await(C.peer, 0, 4, withheld=1), ErrorCode.BAD_REQUEST)
        mixed.refuse(Await(D.peer, 0, 1, withheld=1), ErrorCode.UNKNOWN_PEER)

    def test_a_stage_for_which_nobody_offers_does_not_hold_up_the_others(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        beats(run, run.spec.timing.match_window, A, B)
        decision = run.state.decisions[1, 1]
        assert not decision.committed
        assert "nobody offered" in decision.reason
        assert run.state.current_round == 2

    def test_an_inner_phase_may_take_longer_than_any_window(self, run: Run) -> None:
        beats(run, 10 * run.spec.timing.match_window, A, B)
        assert run.state.decisions == {}

    def test_a_manifest_names_a_bounded_number_of_holders(self) -> None:
        count = MAX_HOLDERS + 4
        spec = spec_of(1, count)
        run = started(spec, *[Role.REPLICA] * count)
        decision = settle(run, 0, 1, [keyed(i) for i in range(count)])
        assert {len(entry.holders) for entry in decision.entries} == {MAX_HOLDERS}
        assert len({holder for entry in decision.entries for holder in entry.holders}) == count


def beats(run: Run, seconds: float, *peers: object) -> None:
    """Time passes while `peers` send heartbeats."""
    end = run.now + seconds
    while run.now < end:
        run.now = min(end, run.now + run.spec.timing.lost_after / 2)
        for peer in peers:
            run.accept(Heartbeat(peer.peer, 1, 1))
        run.accept(Tick())


class TestLosses:
    def test_a_silent_peer_is_lost_and_a_beating_one_is_not(self, run: Run) -> None:
        run.now += run.spec.timing.lost_after / 2
        run.accept(Heartbeat(A.peer, 1, 3))
        run.now += run.spec.timing.lost_after / 2 + 1
        (lost,) = run.accept(Tick())
        assert isinstance(lost, PeerLost)
        assert lost.peer == B.peer
        assert run.accept(Tick()) == ()
        run.refuse(Heartbeat(B.peer, 1, 3), ErrorCode.UNKNOWN_PEER)
        assert run.state.last_seen[A.peer].inner_step == 3

    def test_a_restart_of_the_coordinator_gives_everybody_the_full_time_again(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        run.now += 1000
        run.accept(Start())
        assert run.accept(Tick()) == ()

    def test_the_replica_is_dropped_from_the_next_round_on(self, mixed: Run) -> None:
        mixed.accept(Leave(C.peer, "interrupted"))
        assert len(mixed.state.plans) == 1
        a, b = A.payload(mixed.spec, 0, 1), B.payload(mixed.spec, 0, 1)
        mixed.accept(Offer(B.peer, b))
        mixed.accept(Offer(A.peer, a))
        mixed.accept(Report(B.peer, 0, 1, (a, b)))
        *_, adopted, committed = mixed.accept(Report(A.peer, 0, 1, (a, b)))
        assert isinstance(adopted, PlanAdopted)
        assert isinstance(committed, RoundCommitted)
        plan = adopted.plan
        assert [replica.index for replica in plan.replicas] == [0]
        assert (plan.epoch, plan.from_round) == (2, 2)
        assert "replica-1" in plan.reason
        assert len(committed.decision.entries) == 2, "what the lost pipeline had finished still counts"
        assert settle(mixed, 1, 1, [A]).next_epoch == 2
        mixed.refuse(Offer(B.peer, B.payload(mixed.spec, 0, 2)), ErrorCode.BAD_REQUEST)

    def test_a_loss_after_the_first_decision_of_a_round_waits_for_the_next(self, mixed: Run) -> None:
        settle(mixed, 0, 1, [A, B])
        mixed.accept(Leave(C.peer, "interrupted"))
        assert settle(mixed, 1, 1, [A]).next_epoch == 1
        assert settle(mixed, 0, 2, [A]).next_epoch == 2
        assert mixed.state.plans[1].from_round == 3

    def test_without_a_complete_replica_the_run_waits_and_says_so(self, run: Run) -> None:
        run.accept(Leave(A.peer, "interrupted"))
        run.accept(Leave(B.peer, "interrupted"))
        assert run.state.phase is RunPhase.TRAINING
        assert "no complete replica is left" in run_message(run.state, run.spec)

    def test_sample_ranges_go_on_without_gap_over_a_change_of_plan(self, mixed: Run) -> None:
        mixed.accept(Leave(C.peer, "interrupted"))
        settle(mixed, 0, 1, [A])
        size = mixed.spec.samples_per_round()
        first, second = mixed.state.plans
        trained = [sample_range(first, mixed.spec, 1, 0), sample_range(first, mixed.spec, 1, 1)]
        trained.append(sample_range(second, mixed.spec, 2, 0))
        assert [i for part in trained for i in part] == list(range(3 * size))


class TestAnchors:
    def test_equal_digests_agree(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        assert expected_digest(run.state, 0, 1, "stage") == anchor_of(0, 1)
        assert not run.state.diverged

    def test_of_two_the_first_is_believed_once_both_have_spoken(self, run: Run) -> None:
        run.accept(Attest(A.peer, 0, 0, "stage", "one"))
        assert settled_digest(run.state, 0, 0, "stage") == "one", "nobody contradicts it yet"
        (_, event) = run.accept(Attest(B.peer, 0, 0, "stage", "another"))
        assert isinstance(event, AnchorDiverged)
        assert (event.peer, event.digest, event.expected) == (B.peer, "another", "one")
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING

    @pytest.mark.parametrize("replicas", [3, 4])
    def test_the_first_attester_condemns_nobody_before_a_majority_has_spoken(self, replicas: int) -> None:
        run = started(spec_of(1, replicas), *[Role.REPLICA] * replicas)
        assert len(run.accept(Attest(A.peer, 0, 0, "stage", "wrong"))) == 1
        assert len(run.accept(Attest(B.peer, 0, 0, "stage", "right"))) == 1
        assert settled_digest(run.state, 0, 0, "stage") is None
        assert {peer.lifecycle for peer in run.state.peers.values()} == {Lifecycle.TRAINING}
        _, event = run.accept(Attest(C.peer, 0, 0, "stage", "right"))
        assert isinstance(event, AnchorDiverged)
        assert (event.peer, event.expected) == (A.peer, "right")
        assert settled_digest(run.state, 0, 0, "stage") == "right"
        assert run.state.diverged == {(A.peer, 0, 0, "stage")}
        assert run.state.absent == {1: {A.peer}}
        assert run.state.synced == {A.peer: {}, B.peer: {0: 0}, C.peer: {0: 0}}

    def test_those_who_are_gone_are_not_waited_for_to_settle_a_digest(self) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
        for peer in (C, D):
            run.accept(Leave(peer.peer, "interrupted"))
        run.accept(Attest(A.peer, 0, 0, "stage", "one"))
        _, event = run.accept(Attest(B.peer, 0, 0, "stage", "another"))
        assert isinstance(event, AnchorDiverged)
        assert event.peer == B.peer

    def test_a_late_liar_does_not_overturn_what_was_settled(self) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
        for peer, digest in ((A, "wrong"), (B, "right"), (C, "right"), (D, "wrong")):
            run.accept(Attest(peer.peer, 0, 0, "stage", digest))
        assert run.state.diverged == {(A.peer, 0, 0, "stage"), (D.peer, 0, 0, "stage")}

    def test_the_first_offer_condemns_nobody_while_no_anchor_is_settled(self) -> None:
        run = started(spec_of(1, 4), *[Role.REPLICA] * 4)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1, anchor="other")))
        for peer in (B, C, D):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 1)))
        assert run.state.diverged == {(A.peer, 0, 0, "stage")}
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert len(group.descriptors) == 3

    def test_a_condemned_peer_is_healed_when_the_majority_turns_out_to_be_its(self) -> None:
        run = started(spec_of(1, 3), *[Role.REPLICA] * 3)
        run.accept(Leave(C.peer, "interrupted"))
        run.accept(Attest(A.peer, 0, 0, "stage", "wrong"))
        run.accept(Attest(B.peer, 0, 0, "stage", "right"))
        assert run.state.diverged == {(B.peer, 0, 0, "stage")}
        run.accept(C.join(run.spec))
        _, event, healed = run.accept(Attest(C.peer, 0, 0, "stage", "right"))
        assert isinstance(event, AnchorDiverged)
        assert (event.peer, event.expected) == (A.peer, "right")
        assert isinstance(healed, DigestAttested)
        assert run.state.diverged == {(A.peer, 0, 0, "stage")}
        assert run.state.synced == {A.peer: {}, B.peer: {0: 0}, C.peer: {0: 0}}

    def test_every_member_attests_the_embedding_but_only_hosts_their_stage(self, mixed: Run) -> None:
        mixed.accept(Attest(C.peer, 0, 0, "embedding", "digest"))
        for stage, part in ((0, "stage"), (1, "embedding"), (1, "optimizer"), (-1, "embedding")):
            mixed.refuse(Attest(C.peer, stage, 0, part, "digest"), ErrorCode.BAD_REQUEST)

    def test_only_what_is_decided_can_be_attested(self, run: Run) -> None:
        run.refuse(Attest(A.peer, 0, 1, "stage", "digest"), ErrorCode.BAD_REQUEST)


class TestEnd:
    def test_the_run_ends_when_all_live_members_have_attested_the_last_round(self, mixed: Run) -> None:
        for number in (1, 2):
            settle(mixed, 0, number, [A, B])
            settle(mixed, 1, number, [A, C])
        settle(mixed, 0, 3, [A, B])
        mixed.accept(Leave(B.peer, "finished"))
        assert not mixed.state.peers[B.peer].is_lost
        a, c = A.payload(mixed.spec, 1, 3), C.payload(mixed.spec, 1, 3)
        assert len(mixed.accept(Offer(A.peer, a))) == 1, "a member that is done does not break its replica"
        mixed.accept(Offer(C.peer, c))
        mixed.accept(Report(A.peer, 1, 3, (a, c)))
        mixed.accept(Report(C.peer, 1, 3, (a, c)))
        mixed.accept(Attest(A.peer, 1, 3, "stage", anchor_of(1, 3)))
        assert mixed.state.phase is RunPhase.TRAINING
        *_, event = mixed.accept(Attest(C.peer, 1, 3, "stage", anchor_of(1, 3)))
        assert isinstance(event, RunFinished)
        mixed.accept(Leave(A.peer, "finished"))
        assert not mixed.state.absent
        mixed.refuse(D.join(mixed.spec), ErrorCode.RUN_STARTED)
        mixed.refuse(Offer(C.peer, C.payload(mixed.spec, 1, 4)), ErrorCode.BAD_REQUEST)

    def test_a_member_that_dies_before_its_last_word_does_not_hold_up_the_end(self, run: Run) -> None:
        for number in (1, 2, 3):
            for stage in (0, 1):
                payloads = [host.payload(run.spec, stage, number) for host in (A, B)]
                for host, payload in zip((A, B), payloads, strict=True):
                    run.accept(Offer(host.peer, payload))
                for host in (A, B):
                    run.accept(Report(host.peer, stage, number, tuple(payloads)))
                run.accept(Attest(A.peer, stage, number, "stage", anchor_of(stage, number)))
        assert run.state.phase is RunPhase.TRAINING
        run.accept(Leave(B.peer, "finished"))
        assert run.state.peers[B.peer].is_lost, "it left without attesting"
        assert run.state.phase is RunPhase.FINISHED


class TestSentences:
    def test_every_phase_says_what_it_waits_for(self) -> None:
        spec = spec_of(2, 1, 1)
        run = Run(spec)
        run.accept(A.join(spec, Role.STAGE))
        assert run_message(run.state, spec) == (
            "waiting for 1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"
        )
        run.accept(B.join(spec, Role.STAGE))
        run.accept(C.join(spec, Role.REPLICA))
        assert run_message(run.state, spec) == "training: round 1 of 3"
        run.accept(Offer(C.peer, C.payload(spec, 0, 1)))
        assert run_message(run.state, spec) == "training: round 1 of 3, waiting for replica-1 at stage 0"
        run.accept(Offer(A.peer, A.payload(spec, 0, 1)))
        assert "waiting for the reports of" in run_message(run.state, spec)


def test_heartbeats_leave_no_trace_but_everything_else_replays(mixed: Run) -> None:
    settle(mixed, 0, 1, [A, B])
    beats(mixed, 5, A, B, C)
    mixed.accept(Leave(C.peer, "interrupted"))
    settle(mixed, 1, 1, [A])
    stored = [event for event in mixed.events if not isinstance(event, PeerSeen)]
    assert len(stored) < len(mixed.events)
    assert replay(State(stages=2), stored) == mixed.state


class TestMeasured:
    """What peers tell of themselves, and how the run begins with it."""

    def told(self, run: Run, peer: Keyed, flops: float, *links: LinkEstimate) -> tuple[Event, ...]:
        capacity = replace(run.state.peers[peer.peer].capacity, flops=flops)
        return run.accept(Heartbeat(peer.peer, 1, 0, Estimates(capacity, 0.0, links)))

    def gathered(self, *flops: float) -> Run:
        """Stage peers that have measured their lines; their speeds may follow."""
        run = Run(spec_of(3, 0, 1, swarm__members=2))
        run.accept(Start())
        for i, each in enumerate(flops):
            join = keyed(i).join(run.spec, Role.STAGE)
            run.accept(replace(join, capacity=replace(join.capacity, uplink=1e6, downlink=1e6, flops=each)))
        return run

    def test_the_run_begins_when_those_who_measure_have_told_their_speed(self) -> None:
        run = self.gathered(1e9, 0.0)
        assert run.state.phase is RunPhase.GATHERING
        assert "measured speed of" in run_message(run.state, run.spec)
        self.told(run, B, 1e9)
        run.accept(Tick())
        assert run.state.phase is RunPhase.TRAINING

    def test_the_run_begins_without_a_speed_that_never_comes(self) -> None:
        run = self.gathered(1e9, 0.0)
        run.now += 19.0
        run.accept(Heartbeat(A.peer, 0, 0))
        run.accept(Heartbeat(B.peer, 0, 0))
        run.accept(Tick())
        assert run.state.phase is RunPhase.GATHERING
        run.now += 2.0
        run.accept(Tick())
        assert run.state.phase is RunPhase.TRAINING

    def test_who_is_left_over_when_the_run_begins_has_a_place_on_the_bench(self) -> None:
        run = self.gathered(1e9, 0.0)
        join = C.join(run.spec, Role.STAGE)
        run.refuse(replace(join, capacity=replace(join.capacity, uplink=1e6)), ErrorCode.RUN_FULL)
        run = Run(spec_of(3, 0, 1, swarm__members=3))
        run.accept(Start())
        for i in range(3):
            join = keyed(i).join(run.spec, Role.STAGE)
            run.accept(replace(join, capacity=replace(join.capacity, uplink=1e9, downlink=1e9)))
        for peer, flops in ((A, 1e12), (B, 1e12), (C, 1e6)):
            self.told(run, peer, flops)
        run.accept(Tick())
        assert run.state.plans[-1].replica_of(C.peer) is None
        assert C.peer in run.state.reservations

    def test_who_tells_again_and_again_is_not_stored(self) -> None:
        run = self.gathered(1e9, 1e9)
        for number in range(500):
            run.now += 0.1
            self.told(run, A, 1e9 + number)
        assert sum(isinstance(event, PeerMeasured) for event in run.events) < 10
        run.now += 20.0
        self.told(run, A, 7e9)
        assert run.state.estimates[A.peer].capacity.flops == 7e9

    def test_links_to_strangers_are_not_stored(self) -> None:
        run = self.gathered(1e9, 1e9)
        stranger = LinkEstimate(D.peer, 0.1, 1e6)
        self.told(run, A, 2e9, LinkEstimate(B.peer, 0.1, 1e6), stranger)
        assert [link.peer for link in run.state.estimates[A.peer].links] == [B.peer]
