"""A rollback is one decision for all stages, which makes former anchors the expected ones."""

from __future__ import annotations

import pytest

from coordinator.rollback import problem_of, restorable_rounds
from coordinator.run.rounds.attestation import locate, record_of, settled_digest
from coordinator.run.state.commands import (
    Attest,
    Heartbeat,
    Leave,
    Offer,
    PauseRun,
    Report,
    ResumeRun,
    RollBack,
)
from coordinator.run.state.events import AnchorDiverged, RoundDecided, RunPaused, RunRolledBack
from coordinator.status.messages import event_message
from coordinator.status.run_status import run_status
from protocol.errors import ErrorCode
from protocol.status import ReplicaState
from protocol.types import Aborted, Committed, Part, PausedBy, Rollback, RolledBack
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import Run, attest, play_round, play_rounds, started_and_attested

A, B, C = PEERS = [keyed(i) for i in range(3)]
STAGES = 2


def keep(run: Run, *rounds: int, peers: list[Keyed] = PEERS) -> None:
    for peer in peers:
        run.accept(Heartbeat(peer.peer, 1, 0, kept=rounds))


def attest_embedding(run: Run, number: int) -> None:
    for peer in PEERS:
        run.accept(Attest(peer.peer, 0, number, "embedding", f"{number:064x}"))


@pytest.fixture
def run() -> Run:
    """Round 5 is open, and all peers keep rounds 2 and 3."""
    run = started_and_attested(3, rounds=12, recovery__checkpoint_every=1)
    attest_embedding(run, 0)
    for number in range(1, 5):
        play_round(run)
        attest_embedding(run, number)
    keep(run, 2, 3)
    return run


def test_one_transaction_decides_the_open_round_of_all_stages_and_pauses_the_run(run: Run) -> None:
    events = run.accept(RollBack(2, "the loss has risen"))
    assert [type(event) for event in events] == [RunPaused, RunRolledBack, RoundDecided, RoundDecided]
    assert run.state.current_round == 6
    assert run.state.is_held
    assert (run.state.committed, run.state.aborted) == (4 * STAGES, 0)
    for stage in range(STAGES):
        decision = run.state.decisions[stage, 5]
        assert isinstance(decision, RolledBack)
        assert decision.restore_round == 2
        assert decision.reason == "the run goes back to round 2: the loss has risen"
        assert settled_digest(run.state, stage, 5, Part.STAGE) == anchor_of(stage, 2)
    assert settled_digest(run.state, 0, 5, Part.EMBEDDING) == f"{2:064x}"
    assert event_message(events[1]) == "round 5 is a ROLLBACK to round 2: the loss has risen"
    assert event_message(events[2]).startswith("round 5 of stage 0 is a rollback: ")


def test_stages_that_have_decided_the_open_round_go_back_in_the_next_one(run: Run) -> None:
    payloads = tuple(peer.payload(run.spec, 0, 5) for peer in PEERS)
    for payload, peer in zip(payloads, PEERS, strict=True):
        run.accept(Offer(peer.peer, payload))
    for peer in PEERS:
        run.accept(Report(peer.peer, 0, 5, payloads))
    assert isinstance(run.state.decisions[0, 5], Committed)
    run.accept(RollBack(3, ""))
    assert run.state.restored == {6: 3}
    assert isinstance(run.state.decisions[1, 5], Aborted)
    assert [run.state.decisions[stage, 6].restore_round for stage in range(STAGES)] == [3, 3]
    assert run.state.current_round == 7


def test_a_peer_that_attests_another_anchor_after_a_rollback_has_diverged(run: Run) -> None:
    run.accept(RollBack(2, ""))
    run.accept(Attest(A.peer, 0, 5, "stage", anchor_of(0, 2)))
    assert not run.state.diverged
    for peer in (B, C):  # the majority cannot change it
        events = run.accept(Attest(peer.peer, 0, 5, "stage", anchor_of(0, 4)))
        assert [type(event) for event in events][1:] == [AnchorDiverged]
    run.accept(Attest(B.peer, 0, 5, "stage", anchor_of(0, 2)))
    assert {peer for peer, *_ in run.state.diverged} == {C.peer}


def test_training_goes_on_from_the_restored_anchor(run: Run) -> None:
    run.accept(RollBack(2, ""))
    for peer in PEERS:
        for stage in range(STAGES):
            run.accept(Attest(peer.peer, stage, 5, "stage", anchor_of(stage, 2)))
    run.accept(ResumeRun())
    for stage in range(STAGES):
        payloads = tuple(peer.payload(run.spec, stage, 6, anchor_of(stage, 2)) for peer in PEERS)
        for payload, peer in zip(payloads, PEERS, strict=True):
            run.accept(Offer(peer.peer, payload))
        for peer in PEERS:
            run.accept(Report(peer.peer, stage, 6, payloads))
        assert isinstance(run.state.decisions[stage, 6], Committed)


def test_the_checkpoint_after_a_rollback_is_located_and_so_is_the_restored_one(run: Run) -> None:
    run.accept(RollBack(2, ""))
    assert max(each.round_number for each in locate(run.state, 0, Part.STAGE)) < 5
    run.accept(Attest(A.peer, 0, 5, "stage", anchor_of(0, 2)))
    newest = locate(run.state, 0, Part.STAGE)[0]
    assert (newest.round_number, newest.digest, newest.holders) == (5, anchor_of(0, 2), (A.peer,))
    restored = record_of(run.state, 0, Part.STAGE, 2)
    assert restored is not None
    assert restored.digest == anchor_of(0, 2)


@pytest.mark.parametrize(
    ("restore_round", "cause"),
    [
        (5, "round 5 is not decided"),
        (1, "no live peer keeps stage 0"),
        (4, "no live peer keeps stage 0"),
    ],
)
def test_a_round_that_nobody_keeps_or_that_is_not_decided_is_refused(
    run: Run, restore_round: int, cause: str
) -> None:
    refusal = run.refuse(RollBack(restore_round, ""), ErrorCode.NO_ROLLBACK)
    assert cause in refusal.cause
    assert refusal.remedy == "Choose another round: 3, 2, 0."


def test_peers_that_are_gone_keep_nothing(run: Run) -> None:
    for peer in PEERS:
        run.accept(Leave(peer.peer, "a storm"))
    found = {each.round_number: each.problem for each in restorable_rounds(run.state)}
    assert found[2] == "no live peer keeps stage 0"
    assert found[0] == ""


def test_a_rollback_may_be_undone_by_another_one(run: Run) -> None:
    run.accept(RollBack(2, ""))
    attest(run, A, 4)
    run.accept(RollBack(3, ""))
    run.accept(RollBack(0, ""))
    assert run.state.restored == {5: 2, 6: 3, 7: 0}
    assert settled_digest(run.state, 1, 7, Part.STAGE) == anchor_of(1, 0)


def test_a_pause_that_is_there_stays_as_it_is(run: Run) -> None:
    run.accept(PauseRun(PausedBy.ALARM, "a spike"))
    run.accept(RollBack(2, ""))
    assert run.state.pause is not None
    assert run.state.pause.reason == "a spike"


def test_the_last_round_may_be_a_rollback_and_a_finished_run_has_none() -> None:
    run = started_and_attested(3, rounds=2, recovery__checkpoint_every=1)
    attest_embedding(run, 0)
    play_rounds(run)
    run.accept(RollBack(0, ""))
    for peer in PEERS:
        for stage in range(STAGES):
            run.accept(Attest(peer.peer, stage, 2, "stage", anchor_of(stage, 0)))
    assert run.state.finished_at
    run.refuse(RollBack(0, ""), ErrorCode.BAD_REQUEST)


def test_the_last_round_cannot_be_a_rollback_once_a_stage_has_decided_it() -> None:
    run = started_and_attested(3, rounds=2, recovery__checkpoint_every=1)
    attest_embedding(run, 0)
    play_rounds(run)
    payloads = tuple(peer.payload(run.spec, 0, 2) for peer in PEERS)
    for payload, peer in zip(payloads, PEERS, strict=True):
        run.accept(Offer(peer.peer, payload))
    for peer in PEERS:
        run.accept(Report(peer.peer, 0, 2, payloads))
    refusal = run.refuse(RollBack(0, ""), ErrorCode.NO_ROLLBACK)
    assert refusal.cause == "The last round of 2 is half decided."
    assert run.state.pause is None


def test_rounds_without_checkpoints_are_listed_only_if_they_were_rollbacks() -> None:
    run = started_and_attested(3, rounds=12, recovery__checkpoint_every=2)
    attest_embedding(run, 0)
    for number in range(1, 5):
        play_round(run)
        attest_embedding(run, number)
    keep(run, 2)
    run.accept(RollBack(2, ""))
    for peer in PEERS:
        for stage in range(STAGES):
            run.accept(Attest(peer.peer, stage, 5, "stage", anchor_of(stage, 2)))
    assert [each.round_number for each in restorable_rounds(run.state)] == [5, 4, 2, 0]


def test_the_status_says_so(run: Run) -> None:
    run.accept(RollBack(2, "the loss has risen"))
    status = run_status(run.state, (), run.now, run.now)
    assert {each.state for each in status.replicas} == {ReplicaState.PAUSED}
    assert status.rollbacks == (Rollback(5, 2),)


def hold(run: Run, number: int, *peers: Keyed, digest: str = "") -> None:
    """Peers tell anchors after a round that is not decided here."""
    for peer in peers:
        for stage in range(STAGES):
            told = Attest(peer.peer, stage, number, "stage", digest or anchor_of(stage, number))
            run.refuse(told, ErrorCode.COORDINATOR_BEHIND)
        embedding = Attest(peer.peer, 0, number, "embedding", digest or f"{number:064x}")
        run.refuse(embedding, ErrorCode.COORDINATOR_BEHIND)


def test_an_older_copy_goes_on_from_the_newest_round_that_most_peers_hold(run: Run) -> None:
    hold(run, 8, A)
    hold(run, 7, A, B, C)
    assert not run.state.digests.keys() & {(0, 7, "stage"), (0, 8, "stage")}
    found = {each.round_number: each.problem for each in restorable_rounds(run.state)}
    assert (found[7], found[8]) == ("", "only 1 of 3 peers hold the same stage 0")
    assert list(found)[:2] == [8, 7]
    events = run.accept(RollBack(7, ""))
    assert [type(event) for event in events] == [RunRolledBack, RoundDecided, RoundDecided]
    # Nobody has seen a decision of round 9.
    assert (run.state.restored, run.state.current_round, run.state.pause) == ({9: 7}, 10, None)
    for stage in range(STAGES):
        assert settled_digest(run.state, stage, 9, Part.STAGE) == anchor_of(stage, 7)
    assert "rounds 5 to 8 are unknown here" in event_message(events[1])
    for peer in PEERS:
        for stage in range(STAGES):
            run.accept(Attest(peer.peer, stage, 9, "stage", anchor_of(stage, 7)))
    for stage in range(STAGES):
        payloads = tuple(peer.payload(run.spec, stage, 10, anchor_of(stage, 7)) for peer in PEERS)
        for payload, peer in zip(payloads, PEERS, strict=True):
            run.accept(Offer(peer.peer, payload))
        for peer in PEERS:
            run.accept(Report(peer.peer, stage, 10, payloads))
        assert isinstance(run.state.decisions[stage, 10], Committed)


@pytest.mark.parametrize("round_number", [5, 6, 11])
def test_what_half_of_the_peers_tell_is_not_adopted(run: Run, round_number: int) -> None:
    hold(run, round_number, A)
    hold(run, round_number, B, digest="another")
    refusal = run.refuse(RollBack(round_number, ""), ErrorCode.NO_ROLLBACK)
    assert "only 1 of 3 peers hold the same" in refusal.cause
    assert run.state.current_round == 5


def test_of_the_last_round_the_nodes_have_the_model(run: Run) -> None:
    hold(run, 400, *PEERS)
    hold(run, 12, *PEERS)
    assert "round of 12 is decided" in run.refuse(RollBack(12, ""), ErrorCode.NO_ROLLBACK).cause


def test_peers_that_are_gone_or_that_change_their_mind_have_no_vote(run: Run) -> None:
    hold(run, 7, A, B)
    hold(run, 11, B)
    assert "only 1 of 3" in run.refuse(RollBack(7, ""), ErrorCode.NO_ROLLBACK).cause
    hold(run, 7, B)
    run.accept(Leave(A.peer, "a storm"))
    assert "only 1 of 2" in run.refuse(RollBack(7, ""), ErrorCode.NO_ROLLBACK).cause
    hold(run, 7, C)
    run.accept(RollBack(7, ""))
    assert run.state.restored == {8: 7}


def test_a_liar_spends_few_rounds_of_a_run(run: Run) -> None:
    hold(run, 6, A, B)
    hold(run, 12, C)
    run.accept(RollBack(6, ""))
    assert run.state.restored == {12: 6}
    assert run.state.current_round == 13


def tell(run: Run, stage: int, part: str, *rounds: int) -> None:
    """Rounds that are not decided here, as members tell them of a part: the newest first."""
    for peer in PEERS:
        for number in rounds:
            outcome = run.send(Attest(peer.peer, stage, number, part, f"{stage}{part}{number}"))
            assert outcome.refusal is not None
            assert outcome.refusal.code is ErrorCode.COORDINATOR_BEHIND


def test_stages_that_stopped_one_round_apart_are_adopted_from_what_is_on_disk(run: Run) -> None:
    """The coordinator died between the decisions of two stages: no round is the newest one of both."""
    keep(run, 4, 6)
    for stage, part, newest in ((0, "stage", 8), (0, "embedding", 8), (1, "stage", 9)):
        tell(run, stage, part, newest, 6, newest - 1)
    assert {each: problem_of(run.state, each) for each in (5, 6, 7, 8, 9)} == {
        5: "round 5 is not decided",
        6: "",
        7: "no live peer keeps stage 0",
        8: "no live peer keeps stage 1",
        9: "only 0 of 3 peers hold the same stage 0",
    }
    run.accept(RollBack(6, ""))
    assert run.state.restored == {10: 6}
    for stage, part in ((0, Part.STAGE), (1, Part.STAGE), (0, Part.EMBEDDING)):
        found = record_of(run.state, stage, part, 6)
        assert found is not None
        assert set(found.holders) == {peer.peer for peer in PEERS}
