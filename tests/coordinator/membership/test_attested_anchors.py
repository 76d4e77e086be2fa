"""What the attested anchors of peers decide: divergence, catching up, and which checkpoints are located."""

from __future__ import annotations

from coordinator.run.rounds.attestation import locate
from coordinator.run.state.commands import Attest, Await
from coordinator.run.state.state import KEPT_ROUNDS
from protocol.errors import ErrorCode
from protocol.types import Lifecycle, Part, Role
from tests.builders import anchor_of, keyed
from tests.support.coordinator_run import attest, leave, members_by_replica, play_round, started

A, B, C, D, E = (keyed(i) for i in range(5))


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
            run.accept(Await(A.peer, stage, 1, epoch=1))
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
        records = locate(run.state, 0, Part.STAGE)
        assert [record.round_number for record in records] == [30, 20, 10]
        assert records[0].digest == anchor_of(0, 30)
        assert set(records[0].holders) == {A.peer, B.peer, C.peer}
        assert locate(run.state, 0, Part.EMBEDDING) == ()
        leave(run, A)
        assert set(locate(run.state, 0, Part.STAGE)[0].holders) == {B.peer, C.peer}

    def test_the_anchors_before_round_1_are_located_in_every_round_and_come_last(self) -> None:
        run = started(2)
        attest(run, A, 0)
        attest(run, B, 0)
        [record] = locate(run.state, 1, Part.STAGE)
        assert (record.round_number, record.digest) == (0, anchor_of(1, 0))
        assert set(record.holders) == {A.peer, B.peer}
        for _ in range(35):
            play_round(run)
        assert [each.round_number for each in locate(run.state, 1, Part.STAGE)] == [30, 20, 10, 0]

    def test_one_attestation_counts_only_if_there_is_no_other(self) -> None:
        run = started(1)
        for _ in range(10):
            play_round(run)
        assert [record.holders for record in locate(run.state, 0, Part.STAGE)] == [(A.peer,)]
        run.accept(B.join(run.spec))
        run.accept(Attest(B.peer, 0, 10, "stage", "another"))
        assert locate(run.state, 0, Part.STAGE) == ()

    def test_only_checkpoints_of_live_peers_are_located(self) -> None:
        run = started(1)
        for _ in range(10):
            play_round(run)
        leave(run, A)
        assert locate(run.state, 0, Part.STAGE) == ()
