"""Attestation: digests of the anchors after a round, divergence, and what the end of the run waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from coordinator.base.persistent_map import PersistentMap
from coordinator.membership.ahead import note_ahead
from coordinator.membership.validation import bad_request, behind, live_peer
from coordinator.run.state.commands import Attest
from coordinator.run.state.events import AnchorDiverged, DigestAttested
from coordinator.run.state.state import KEPT_CHECKPOINTS, KEPT_ROUNDS, State
from coordinator.run.state.transaction import Transaction
from protocol.math.embedding_snapshot import is_snapshot_round
from protocol.types import Member, Part, PeerId, StateRecord

MOST_CHANGES = 8
"""How often a peer may replace its digest of one anchor. An honest peer does so once for each reload."""

_SNAPSHOTS = frozenset({Part.SNAPSHOT, Part.COPY})

AnchorKey: TypeAlias = tuple[int, int, str]
"""Names an anchor: stage, round after which it holds, part."""


def attest(transaction: Transaction, command: Attest) -> None:
    """Record the digest of the sender's anchor after a round, and every peer whose anchor differs.

    Every peer with a reservation attests its stages after each decision, whether it trains or follows. Round
    0 is the anchor before round 1. All of these peers keep the embedding, so each may attest that part of
    stage 0. Where links use snapshots of it, hosts of stage 0 attest the snapshots instead, and other peers
    the copies that they have fetched. A peer whose anchor differs takes part again under a plan that is made
    after it has attested the right digest.

    What a peer held before its reservation moved has no effect: it may follow a round until it hears of that.

    Raises:
        HetnodeError: UNKNOWN_PEER, BAD_REQUEST, or COORDINATOR_BEHIND for a round that is not decided.
    """
    sender, stage, round_number = command.peer, command.stage, command.round_number
    part, digest = command.part, command.digest
    live_peer(transaction.state, sender)
    if not _holds(transaction.state, sender, stage, round_number, part):
        if _may_not_know(transaction.state, sender):
            return
        raise bad_request(f"{sender} attests the {part} of stage {stage}, which it does not hold")
    if round_number > 0 and not transaction.state.is_decided(stage, round_number):
        note_ahead(transaction, command)
        raise behind(sender, round_number, transaction.state.current_round)
    if part in _SNAPSHOTS and not transaction.state.needs_snapshot(round_number):
        return
    if not transaction.state.keeps_digests(round_number):
        return  # not refused: a peer that follows the log does not know how far the others are
    key = (stage, round_number, part)
    is_known = _is_known(transaction.state, sender, key, digest)  # a repeated call adds nothing to the log
    if not is_known or (sender, *key) in transaction.state.diverged:
        _check_changes(transaction.state, sender, key)
    if not is_known:
        transaction.add(DigestAttested(transaction.now, stage, round_number, part, sender, digest))
    expected = required_digest(transaction.state, *key)
    if expected is None:
        return
    if _is_unanimous(transaction.state, key, expected):
        return
    # This digest may settle the question, and so condemn or clear peers that attested before.
    for peer, its_digest in transaction.state.digests[key].items():
        if its_digest != expected:
            note_divergence(transaction, key, peer, its_digest, expected)
        elif (peer, *key) in transaction.state.diverged:
            # The majority has changed to the digest of this peer. Attesting it again ends the divergence.
            transaction.add(DigestAttested(transaction.now, stage, round_number, part, peer, its_digest))


def _check_changes(state: State, sender: PeerId, key: AnchorKey) -> None:
    """Every change is stored, and may condemn a peer: without a bound, one peer could fill the log."""
    if state.digest_changes.get(key, {}).get(sender, 0) >= MOST_CHANGES:
        stage, round_number, _ = key
        raise bad_request(
            f"{sender} has attested {MOST_CHANGES + 1} digests for stage {stage}, round {round_number}"
        )


def _is_unanimous(state: State, key: AnchorKey, expected: str) -> bool:
    """Whether all peers attest the `expected` digest, and none of them has diverged: nearly always."""
    return not state.diverged and state.digests[key].distinct() == {expected}


def _attested(state: State, key: AnchorKey) -> PersistentMap[PeerId, str]:
    """The digests of one anchor by peer, the one attested first at the beginning."""
    return state.digests.get(key, PersistentMap[PeerId, str]())


def _is_known(state: State, peer: PeerId, key: AnchorKey, digest: str) -> bool:
    """Whether `peer` has attested this digest since it joined."""
    if _attested(state, key).get(peer) != digest:
        return False
    stage, round_number, part = key
    # Digests outlive a join, `synced` does not.
    is_synced = part != Part.STAGE or state.synced.get(peer, {}).get(stage, -1) >= round_number
    return is_synced or (peer, *key) in state.diverged


def _votes(state: State, key: AnchorKey) -> PersistentMap[PeerId, str]:
    """The digests of the peers that have a say: none that is unproven."""
    digests = _attested(state, key)
    if state.discounted.isdisjoint(state.open_places):
        return digests
    return digests.keep(lambda peer, _: not state.is_unproven(peer))


def expected_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The digest that most peers attested, on a tie the first of them; None if no peer has attested.

    After a rollback it is that of the restored anchor.
    """
    if (restored := state.restored_digests.get((stage, round_number, part))) is not None:
        return restored
    digests = _votes(state, (stage, round_number, part))
    return Counter(digests.values()).most_common(1)[0][0] if digests else None


def settled_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The digest of the majority; on a tie None until all members that take part have attested.

    Then the digest attested first stands. With two replicas of which one has a broken memory, it is
    impossible to tell which one; the run continues with equal anchors. After a rollback it is that of the
    restored anchor, whatever peers attest.
    """
    if (restored := state.restored_digests.get((stage, round_number, part))) is not None:
        return restored
    digests = _votes(state, (stage, round_number, part))
    if not digests:
        return None
    if len(found := digests.distinct()) == 1:
        return next(iter(found))
    # On a tie, peers that diverged before have no vote: a late liar must not overturn a settled digest.
    sound = [d for peer, d in digests.items() if (peer, stage, round_number, part) not in state.diverged]
    for votes in (list(digests.values()), sound):
        (first, most), *others = Counter(votes).most_common(2) or [("", 0)]
        if most and (not others or most > others[0][1]):
            return first
    members = _live_members(state, round_number)
    holders = {member.peer for member in members if part == Part.EMBEDDING or stage in member.stages}
    holders = {peer for peer in holders if not state.is_unproven(peer)}
    return expected_digest(state, stage, round_number, part) if digests.keys() >= holders else None


def required_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """As :func:`settled_digest`, of what peers must have to take part; None of snapshots.

    Nothing that replicas agree on follows from a snapshot, so one that differs condemns nobody.
    """
    return None if part in _SNAPSHOTS else settled_digest(state, stage, round_number, part)


def _live_members(state: State, round_number: int) -> Iterator[Member]:
    return (
        member
        for replica in state.plan_for(round_number).replicas
        for member in replica.members
        if state.peers[member.peer].is_live and state.takes_part(member.peer, round_number)
    )


def note_divergence(
    transaction: Transaction, key: AnchorKey, peer: PeerId, found: str, expected: str
) -> None:
    """Record once that the anchor `key` of `peer` has the digest `found`, not the `expected` one."""
    if (peer, *key) not in transaction.state.diverged:
        transaction.add(AnchorDiverged(transaction.now, *key, peer, found, expected))


def locate(state: State, stage: int, part: Part) -> tuple[StateRecord, ...]:
    """The checkpoints of `stage` that peers can download, newest first.

    A round counts if every node writes a checkpoint after it, and if two peers attested the digest (or the
    only peer that attested any). Round 0 counts, too: nodes make its anchors when a peer asks. Holders are
    the live peers that attested the digest. Anchors that are kept for a rollback alone are left out: no
    honest peer is so far behind that they help it.
    """
    if part is Part.SNAPSHOT:
        return _located_snapshots(state)
    every, oldest = state.spec.recovery.checkpoint_every, state.current_round - KEPT_ROUNDS
    found = []
    for its_stage, round_number, its_part in state.digests:
        is_due = round_number % every == 0
        is_written = is_due or round_number in state.restored
        newest_old = min(oldest, state.rounds_decided + 1 - KEPT_CHECKPOINTS * every)
        is_recent = round_number == 0 or round_number >= newest_old
        if (its_stage, its_part) != (stage, part) or not (is_written and is_recent):
            continue
        record = record_of(state, stage, part, round_number)
        if record is not None and record.holders:
            found.append(record)
    return tuple(sorted(found, key=lambda record: -record.round_number))


def _located_snapshots(state: State) -> tuple[StateRecord, ...]:
    """The snapshots of the embedding that links need now or later, and that peers can download."""
    rounds = sorted((each for _, each, part in state.digests if part == Part.SNAPSHOT), reverse=True)
    found = (record_of(state, 0, Part.SNAPSHOT, each) for each in rounds if state.needs_snapshot(each))
    return tuple(record for record in found if record is not None and record.holders)


def record_of(state: State, stage: int, part: Part, round_number: int) -> StateRecord | None:
    """The anchor after `round_number`, with the live peers that have attested it; None if its digest is
    not known for sure, because only one of several peers has attested it.
    """
    digests = _attested(state, (stage, round_number, part))
    expected = expected_digest(state, stage, round_number, part)
    if expected is None:
        return None
    agreeing = [peer for peer, digest in digests.items() if digest == expected]
    is_restored = (stage, round_number, part) in state.restored_digests
    # The receiver verifies every byte against this digest, so one faulty peer must not choose it.
    if not is_restored and len(agreeing) < min(2, len(digests)):
        return None
    if part is Part.SNAPSHOT:  # copies serve as donors, and have no vote
        copies = _attested(state, (stage, round_number, Part.COPY))
        agreeing += [peer for peer, digest in copies.items() if digest == expected]
    holders = tuple(sorted(peer for peer in agreeing if state.peers[peer].is_live))
    return StateRecord(state.run, stage, part, round_number, expected, holders)


def unconfirmed(state: State) -> Iterator[PeerId]:
    """The live members of the last plan that have not attested their last anchor yet."""
    last = state.spec.rounds
    # Each attestation at the end of a run asks for the first of up to thousands of members.
    peers = (member.peer for each in state.plan_for(last).replicas for member in each.members)
    return (peer for peer in peers if state.peers[peer].is_live and not state.has_attested(peer, last))


def unattested(state: State) -> list[int]:
    """The stages whose last anchor no peer has attested with the right digest."""
    return [
        stage
        for stage in range(state.stages)
        if not any(rounds.get(stage, -1) >= state.spec.rounds for rounds in state.synced.values())
    ]


def _may_not_know(state: State, peer: PeerId) -> bool:
    """Whether `peer` had another reservation since it joined: the news of its move may be on its way."""
    return peer in state.promised and (peer not in state.reservations or peer in state.moved_at)


def _holds(state: State, peer: PeerId, stage: int, round_number: int, part: str) -> bool:
    """Whether `peer` can have `part` of `stage`, by its reservation or its assignment in that round."""
    assignment, reservation = state.assignment(peer, round_number), state.reservations.get(peer)
    hosted = {*(assignment.member.stages if assignment else ()), *(reservation.stages if reservation else ())}
    if part == Part.STAGE or stage != 0 or not hosted:
        return part == Part.STAGE and stage in hosted
    if not (every := state.spec.link.embedding_every):
        return part == Part.EMBEDDING
    is_due = is_snapshot_round(round_number, every, state.restored)
    return is_due and part == (Part.SNAPSHOT if 0 in hosted else Part.COPY)
