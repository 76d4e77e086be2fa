"""Snapshots of the embedding at the coordinator: which digest counts, and who has the bytes."""

from __future__ import annotations

import pytest

from coordinator.rollback import problem_of
from coordinator.run.rounds.attestation import MOST_CHANGES, locate, required_digest
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Attest, Heartbeat, Leave, RollBack
from coordinator.run.state.events import PeerSeen
from coordinator.run.state.state import State
from coordinator.store.event_codec import decode, encode
from protocol.errors import ErrorCode
from protocol.math.embedding_snapshot import active_snapshot
from protocol.types import Part, StateRecord
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import Run, play_round, play_rounds, play_stage, started_and_attested

A, B, C, FIRST, LAST = (keyed(i) for i in range(5))
"""Three full replicas, and the members of a pipeline."""
EVERY = 3


@pytest.fixture
def run() -> Run:
    """Round 4 is open, and round 3 has a snapshot."""
    run = started_and_attested(3, 1, link__embedding_every=EVERY, recovery__checkpoint_every=2)
    play_rounds(run, EVERY)
    return run


def snapshot(run: Run, digest: str, *peers: Keyed, round_number: int = EVERY) -> None:
    for peer in peers:
        run.accept(Attest(peer.peer, 0, round_number, Part.SNAPSHOT, digest))


def copy(run: Run, digest: str, *peers: Keyed, round_number: int = EVERY) -> None:
    for peer in peers:
        run.accept(Attest(peer.peer, 0, round_number, Part.COPY, digest))


def located(run: Run) -> list[StateRecord]:
    return list(locate(run.state, 0, Part.SNAPSHOT))


def test_hosts_of_stage_0_settle_a_snapshot_and_are_its_donors(run: Run) -> None:
    snapshot(run, "right", A)
    assert [each.digest for each in located(run)] == ["right"], "it is the only host that has spoken"
    snapshot(run, "right", B, FIRST)
    assert located(run) == [
        StateRecord(
            run.state.run, 0, Part.SNAPSHOT, EVERY, "right", tuple(sorted((A.peer, B.peer, FIRST.peer)))
        )
    ]


def test_a_member_that_has_fetched_the_snapshot_becomes_a_donor(run: Run) -> None:
    snapshot(run, "right", A, B)
    copy(run, "right", LAST)
    assert set(located(run)[0].holders) == {A.peer, B.peer, LAST.peer}


def test_no_snapshot_is_located_while_hosts_differ_without_a_majority(run: Run) -> None:
    snapshot(run, "wrong", A)
    snapshot(run, "right", B)
    assert located(run) == []
    snapshot(run, "right", C)
    assert [(each.digest, each.holders) for each in located(run)] == [
        ("right", tuple(sorted((B.peer, C.peer))))
    ]


def test_a_host_with_another_snapshot_is_no_donor_and_trains_on(run: Run) -> None:
    """No anchor depends on a snapshot, so that it may have broken bytes alone."""
    snapshot(run, "right", A, B)
    snapshot(run, "wrong", C)
    assert set(located(run)[0].holders) == {A.peer, B.peer}
    assert not run.state.diverged
    play_round(run)


def test_copies_have_no_vote(run: Run) -> None:
    snapshot(run, "right", A)
    copy(run, "wrong", LAST)
    assert [(each.digest, each.holders) for each in located(run)] == [("right", (A.peer,))]
    copy(run, "right", LAST)
    assert set(located(run)[0].holders) == {A.peer, LAST.peer}


def test_a_donor_that_is_lost_is_not_named(run: Run) -> None:
    snapshot(run, "right", A, B)
    run.accept(Leave(A.peer, "interrupted"))
    assert [each.holders for each in located(run)] == [(B.peer,)]


def test_peers_attest_what_they_can_have(run: Run) -> None:
    for peer, part, round_number in (
        (LAST, Part.SNAPSHOT, EVERY),
        (A, Part.COPY, EVERY),
        (A, Part.EMBEDDING, EVERY),
        (LAST, Part.EMBEDDING, EVERY),
        (A, Part.SNAPSHOT, EVERY - 1),
        (A, Part.SNAPSHOT, 0),
    ):
        run.refuse(Attest(peer.peer, 0, round_number, part, "digest"), ErrorCode.BAD_REQUEST)
    run.refuse(Attest(A.peer, 1, EVERY, Part.SNAPSHOT, "digest"), ErrorCode.BAD_REQUEST)
    undecided = Attest(A.peer, 0, 2 * EVERY, Part.SNAPSHOT, "digest")
    run.refuse(undecided, ErrorCode.COORDINATOR_BEHIND)


def test_what_one_peer_adds_to_the_log_is_bounded(run: Run) -> None:
    for number in range(100):
        run.send(Attest(A.peer, 0, EVERY, Part.SNAPSHOT, f"digest {number}"))
        run.send(Attest(LAST.peer, 0, EVERY, Part.COPY, f"digest {number}"))
    for part in (Part.SNAPSHOT, Part.COPY):
        assert sum(run.state.digest_changes[0, EVERY, part].values()) <= MOST_CHANGES


def test_a_snapshot_is_known_as_long_as_links_use_it_and_no_longer() -> None:
    every = 15  # longer than other digests are kept
    run = started_and_attested(3, 1, link__embedding_every=every)
    play_rounds(run, every)
    snapshot(run, "one", A, B, round_number=every)
    while active_snapshot(run.state.current_round, every) <= every:
        assert [each.round_number for each in located(run)] == [every]
        play_round(run)
    assert located(run) == []
    assert (0, every, Part.SNAPSHOT) not in run.state.digests
    before = run.state
    snapshot(run, "one", C, round_number=every)
    assert run.state.digests == before.digests


def test_a_snapshot_that_is_attested_before_the_other_stages_are_decided_counts() -> None:
    run = started_and_attested(3, 1, link__embedding_every=1)
    play_stage(run, 0)
    snapshot(run, "one", A, B, round_number=1)
    play_stage(run, 1)
    assert [each.round_number for each in located(run)] == [1]


def test_a_rollback_needs_no_digest_of_the_embedding_and_makes_a_snapshot_round(run: Run) -> None:
    play_round(run)
    for peer in (A, B, C, FIRST, LAST):
        run.accept(Heartbeat(peer.peer, 1, 0, kept=(2,)))
    assert problem_of(run.state, 2) == ""
    snapshot(run, "discarded", A, B)
    run.accept(RollBack(2, ""))
    assert run.state.restored == {5: 2}
    assert located(run) == [], "the rollback discards the TE of the snapshot of round 3"
    snapshot(run, "restored", A, B, round_number=5)
    copy(run, "restored", LAST, round_number=5)
    assert [(each.round_number, each.digest) for each in located(run)] == [(5, "restored")]
    assert active_snapshot(6, EVERY, run.state.restored) == 5


def test_a_coordinator_that_starts_again_knows_the_snapshots(run: Run) -> None:
    snapshot(run, "right", A, B)
    copy(run, "right", LAST)
    stored = [encode(event) for event in run.events if not isinstance(event, PeerSeen)]
    again = replay(State(run.spec, run.spec.name), (decode(*each) for each in stored))
    assert again == run.state
    assert locate(again, 0, Part.SNAPSHOT) == locate(run.state, 0, Part.SNAPSHOT)


def test_runs_without_snapshots_refuse_them() -> None:
    run = started_and_attested(3, 1)
    play_round(run)
    for peer, part in ((A, Part.SNAPSHOT), (LAST, Part.COPY)):
        run.refuse(Attest(peer.peer, 0, 1, part, anchor_of(0, 1)), ErrorCode.BAD_REQUEST)


def test_a_peer_is_not_told_to_replace_its_anchors_for_a_snapshot(run: Run) -> None:
    snapshot(run, "right", A, B)
    copy(run, "right", LAST)
    for part in (Part.SNAPSHOT, Part.COPY):
        assert required_digest(run.state, 0, EVERY, part) is None
    assert required_digest(run.state, 0, EVERY, Part.STAGE) == anchor_of(0, EVERY)
