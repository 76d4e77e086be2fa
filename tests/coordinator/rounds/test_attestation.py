"""Digests of anchors: which one counts, who diverges, and how the run ends."""

from __future__ import annotations

import pytest

from coordinator.rounds.attestation import expected_digest, settled_digest
from coordinator.state.commands import Attest, Leave, Offer, Report
from coordinator.state.events import (
    AnchorDiverged,
    DigestAttested,
    RunFinished,
)
from protocol.errors import ErrorCode
from protocol.status import RunPhase
from protocol.types import Lifecycle, Role
from tests.builders import anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run, joined_run, settle

A, B, C, D = (keyed(i) for i in range(4))


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

    def test_only_decided_rounds_can_be_attested(self, run: Run) -> None:
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
