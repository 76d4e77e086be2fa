"""Digests of anchors: which one counts, who diverges, and how the run ends."""

from __future__ import annotations

import pytest

from coordinator.run.rounds.answers import MOST_REPORTS
from coordinator.run.rounds.attestation import MOST_CHANGES, expected_digest, settled_digest
from coordinator.run.state.commands import Attest, Await, Drain, Heartbeat, Leave, Offer, Report, Retreat
from coordinator.run.state.events import (
    AnchorDiverged,
    DigestAttested,
    PeerSeen,
    RunFinished,
)
from protocol.errors import ErrorCode
from protocol.status import RunPhase
from protocol.types import Lifecycle, Rejection, Role
from tests.builders import anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_run import (
    Run,
    joined_run,
    leave,
    play_round,
    play_rounds,
    settle,
    started,
    started_and_attested,
)

A, B, C, D = (keyed(i) for i in range(4))


class TestBounds:
    """What one peer can add to the log for one anchor is bounded, whatever it sends."""

    def test_digests_that_turn_the_majority_are_stored_a_few_times(self) -> None:
        run = joined_run(spec_of(1, 5), *[Role.REPLICA] * 5)
        for peer, digest in ((A, "one"), (B, "one"), (C, "another"), (D, "another")):
            run.accept(Attest(peer.peer, 0, 0, "stage", digest))
        before, liar = len(run.events), keyed(4)
        for i in range(300):
            run.send(Attest(liar.peer, 0, 0, "stage", "one" if i % 2 else "another"))
        assert len(run.events) - before <= 5 * (MOST_CHANGES + 1)

    def test_reports_that_grow_by_one_payload_are_stored_a_few_times(self) -> None:
        run = joined_run(spec_of(1, 12), *[Role.REPLICA] * 12)
        hosts = [keyed(i) for i in range(12)]
        payloads = [host.payload(run.spec, 0, 1) for host in hosts]
        for host, payload in zip(hosts, payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        before = len(run.events)
        for count in range(1, 13):
            for _ in range(10):
                run.accept(Report(A.peer, 0, 1, tuple(payloads[:count])))
        assert len(run.events) - before == MOST_REPORTS

    def test_other_calls_that_are_repeated_add_nothing(self, run: Run) -> None:
        good = B.payload(run.spec, 0, 1)
        calls = [
            Offer(B.peer, B.payload(run.spec, 0, 1, weight=9.0)),
            Offer(B.peer, tampered(good)),
            Offer(B.peer, good),
            Offer(B.peer, B.payload(run.spec, 0, 1, anchor="other")),
            Await(B.peer, 0, 1, epoch=1),
            Await(B.peer, 1, 1, epoch=1),
            Report(B.peer, 0, 1, (good,), (Rejection(A.payload(run.spec, 0, 1), "no"),)),
            Heartbeat(B.peer, 1, 1),
            Drain(B.peer, "tired"),
            Retreat(B.peer, 1, "tired"),
        ]
        for call in calls:
            run.send(call)
        before = len(run.events)
        for _ in range(50):
            for call in calls:
                run.send(call)
        assert [e for e in run.events[before:] if not isinstance(e, PeerSeen)] == []


class TestAnchors:
    def test_equal_digests_agree(self, run: Run) -> None:
        settle(run, 0, 1, [A, B])
        assert expected_digest(run.state, 0, 1, "stage") == anchor_of(0, 1)
        assert not run.state.diverged

    def test_of_two_the_first_is_believed_once_both_have_spoken(self, run: Run) -> None:
        run.accept(Attest(A.peer, 0, 0, "stage", "one"))
        assert settled_digest(run.state, 0, 0, "stage") == "one", "no other digest yet"
        (_, event) = run.accept(Attest(B.peer, 0, 0, "stage", "another"))
        assert isinstance(event, AnchorDiverged)
        assert (event.peer, event.digest, event.expected) == (B.peer, "another", "one")
        assert run.state.peers[B.peer].lifecycle is Lifecycle.SYNCING

    @pytest.mark.parametrize("replicas", [3, 4])
    def test_no_peer_diverges_before_a_majority_has_attested(self, replicas: int) -> None:
        run = joined_run(spec_of(1, replicas), *[Role.REPLICA] * replicas)
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

    def test_a_digest_settles_without_peers_that_are_gone(self) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        for peer in (C, D):
            run.accept(Leave(peer.peer, "interrupted"))
        run.accept(Attest(A.peer, 0, 0, "stage", "one"))
        _, event = run.accept(Attest(B.peer, 0, 0, "stage", "another"))
        assert isinstance(event, AnchorDiverged)
        assert event.peer == B.peer

    def test_a_late_liar_does_not_overturn_a_settled_digest(self) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        for peer, digest in ((A, "wrong"), (B, "right"), (C, "right"), (D, "wrong")):
            run.accept(Attest(peer.peer, 0, 0, "stage", digest))
        assert run.state.diverged == {(A.peer, 0, 0, "stage"), (D.peer, 0, 0, "stage")}

    def test_no_peer_diverges_by_the_first_offer_before_an_anchor_is_settled(self) -> None:
        run = joined_run(spec_of(1, 4), *[Role.REPLICA] * 4)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1, anchor="other")))
        for peer in (B, C, D):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 1)))
        assert run.state.diverged == {(A.peer, 0, 0, "stage")}
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert len(group.descriptors) == 3

    def test_a_condemned_peer_is_healed_when_the_majority_turns_out_to_be_its(self) -> None:
        run = joined_run(spec_of(1, 3), *[Role.REPLICA] * 3)
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

    def test_a_peer_changes_a_digest_only_a_few_times(self, run: Run) -> None:
        run.accept(Attest(B.peer, 0, 0, "stage", "right"))
        for number in range(4000):
            run.send(Attest(A.peer, 0, 0, "stage", f"digest {number}"))
        attested = [event for event in run.events if isinstance(event, DigestAttested)]
        assert len([event for event in attested if event.peer == A.peer]) == 1 + MOST_CHANGES
        assert len([event for event in attested if event.peer == B.peer]) <= 1 + MOST_CHANGES
        run.refuse(Attest(A.peer, 0, 0, "stage", "right"), ErrorCode.BAD_REQUEST)
        run.accept(Attest(A.peer, 1, 0, "stage", "right"))

    def test_offers_from_another_anchor_are_changes_too(self) -> None:
        run = started_and_attested(replicas=4)
        play_rounds(run, 2)
        number = run.state.current_round
        before = len(run.events)
        for _ in range(50):
            run.send(Offer(A.peer, A.payload(run.spec, 0, number, anchor="f" * 64)))
            run.send(Attest(A.peer, 0, number - 1, "stage", anchor_of(0, number - 1)))
        assert len(run.events) - before == 1 + 2 * MOST_CHANGES
        run.refuse(Attest(A.peer, 0, number - 1, "stage", anchor_of(0, number - 1)), ErrorCode.BAD_REQUEST)

    def test_a_divergence_of_a_peer_that_is_gone_is_forgotten_with_its_round(self) -> None:
        run = started_and_attested(replicas=4, rounds=80)
        play_rounds(run, 2)
        number = run.state.current_round
        run.send(Offer(A.peer, A.payload(run.spec, 0, number, anchor="f" * 64)))
        leave(run, A)
        assert run.state.diverged
        while run.state.keeps_digests(number - 1):
            play_round(run)
        assert not run.state.diverged

    def test_the_changes_of_old_digests_are_forgotten(self) -> None:
        run = started(rounds=80)
        play_round(run)
        # A rollback may always need the digests after round 0.
        for digest in ("one", anchor_of(0, 1)):
            run.accept(Attest(A.peer, 0, 1, "stage", digest))
        assert run.state.digest_changes == {(0, 1, "stage"): {A.peer: 2}}
        while run.state.keeps_digests(1):
            play_round(run)
        assert not run.state.digest_changes

    def test_only_decided_rounds_can_be_attested(self, run: Run) -> None:
        run.refuse(Attest(A.peer, 0, 1, "stage", "digest"), ErrorCode.COORDINATOR_BEHIND)


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

    def test_a_member_lost_before_its_last_digest_does_not_delay_the_end(self, run: Run) -> None:
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
