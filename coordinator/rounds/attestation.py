"""Attestation: the digests of the anchors after a round, which peers diverge, and what the end waits for."""

from __future__ import annotations

from collections import Counter

from coordinator.membership.validation import bad_request, live_peer
from coordinator.state.commands import Attest
from coordinator.state.events import AnchorDiverged, DigestAttested
from coordinator.state.state import State
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec
from protocol.types import Part, PeerId, StateRecord


def attest(transaction: Transaction, command: Attest, now: float) -> None:
    """Record the digest of the sender's anchor after a round, and every peer whose anchor differs.

    Every peer with a reservation attests its stages after each decision, whether it trains or follows. Round
    0 is the anchor before the first round. Each of them may attest part EMBEDDING of stage 0, since all keep
    the table. A peer whose anchor differs takes no part until a plan that is made after it has attested the
    right digest.

    Raises:
        HetnodeError: UNKNOWN_PEER or BAD_REQUEST.
    """
    sender, stage, round_number = command.peer, command.stage, command.round_number
    part, digest = command.part, command.digest
    live_peer(transaction.state, sender)
    if not _holds(transaction.state, sender, stage, round_number, part):
        raise bad_request(f"{sender} attests the {part} of stage {stage}, which it does not hold")
    if round_number > 0 and (stage, round_number) not in transaction.state.decisions:
        raise bad_request(f"{sender} attests stage {stage} after round {round_number}, which is not decided")
    if not transaction.state.keeps_digests(round_number):
        return  # a peer that catches up does not know yet how far the others are
    key = (stage, round_number, part)
    if not _is_known(transaction.state, sender, stage, round_number, part, digest):
        transaction.add(DigestAttested(now, stage, round_number, part, sender, digest))
    expected = settled_digest(transaction.state, stage, round_number, part)
    if expected is None:
        return
    for peer, its_digest in transaction.state.digests[key].items():
        if its_digest != expected:
            note_divergence(transaction, now, stage, round_number, part, peer, its_digest, expected)
        elif (peer, *key) in transaction.state.diverged:
            # Its digest turns out to be right: it no longer counts as diverged.
            transaction.add(DigestAttested(now, stage, round_number, part, peer, its_digest))


def _is_known(state: State, peer: PeerId, stage: int, round_number: int, part: str, digest: str) -> bool:
    """Whether `peer` has attested this digest since it joined."""
    if state.digests.get((stage, round_number, part), {}).get(peer) != digest:
        return False
    is_synced = part != Part.STAGE or state.synced.get(peer, {}).get(stage, -1) >= round_number
    return is_synced or (peer, stage, round_number, part) in state.diverged


def expected_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The digest that most peers attested; on a tie the one attested first. None before any."""
    digests = state.digests.get((stage, round_number, part))
    return Counter(digests.values()).most_common(1)[0][0] if digests else None


def settled_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The expected digest, once it is certain: the first attester alone must not condemn an honest peer.

    On a tie: None until all members that take part have attested.
    """
    digests = state.digests.get((stage, round_number, part))
    if not digests:
        return None
    # On a tie, a peer that diverged before has no vote: a late liar must not overturn a settled digest.
    sound = [d for peer, d in digests.items() if (peer, stage, round_number, part) not in state.diverged]
    for votes in (list(digests.values()), sound):
        (first, most), *others = Counter(votes).most_common(2) or [("", 0)]
        if most and (not others or most > others[0][1]):
            return first
    all_have_attested = digests.keys() >= _expected_attesters(state, stage, round_number, part)
    return expected_digest(state, stage, round_number, part) if all_have_attested else None


def _expected_attesters(state: State, stage: int, round_number: int, part: str) -> set[PeerId]:
    """The live members that took part in `round_number` and hold `part` of `stage`."""
    return {
        member.peer
        for replica in state.plan_for(round_number).replicas
        for member in replica.members
        if (part == Part.EMBEDDING or stage in member.stages)
        and state.peers[member.peer].is_live
        and state.takes_part(member.peer, round_number)
    }


def note_divergence(
    transaction: Transaction,
    now: float,
    stage: int,
    round_number: int,
    part: str,
    peer: PeerId,
    digest: str,
    expected: str,
) -> None:
    if (peer, stage, round_number, part) not in transaction.state.diverged:
        transaction.add(AnchorDiverged(now, stage, round_number, part, peer, digest, expected))


def locate(state: State, spec: RunSpec, stage: int, part: Part) -> tuple[StateRecord, ...]:
    """The checkpoints of `stage` that peers can download, newest first.

    A round counts if every node writes a checkpoint after it, and if two peers attested the digest (or the
    only peer that attested any). Holders are the live peers among them.
    """
    every = spec.recovery.checkpoint_every
    found = []
    for key, digests in state.digests.items():
        round_number = key[1]
        expected = expected_digest(state, *key)
        if (
            key != (stage, round_number, part)
            or round_number == 0
            or round_number % every
            or expected is None
        ):
            continue
        agreeing = [peer for peer, digest in digests.items() if digest == expected]
        holders = tuple(sorted(peer for peer in agreeing if state.peers[peer].is_live))
        if holders and len(agreeing) >= min(2, len(digests)):
            found.append(StateRecord(spec.run_id, stage, part, round_number, expected, holders))
    return tuple(sorted(found, key=lambda record: -record.round_number))


def unconfirmed(state: State, spec: RunSpec) -> list[PeerId]:
    """The members of the last round that have not attested their last anchor yet."""
    return [
        member.peer
        for replica in state.plans[-1].replicas
        for member in replica.members
        if state.peers[member.peer].is_live
        and state.takes_part(member.peer, spec.rounds)
        and not state.has_attested(member.peer, spec.rounds)
    ]


def unattested(state: State, spec: RunSpec) -> list[int]:
    """The stages whose last anchor no peer has attested with the right digest."""
    attested = {
        stage
        for rounds in state.synced.values()
        for stage, round_number in rounds.items()
        if round_number >= spec.rounds
    }
    return [stage for stage in range(spec.swarm.stages) if stage not in attested]


def _holds(state: State, peer: PeerId, stage: int, round_number: int, part: str) -> bool:
    """Whether `peer` has `part` of `stage`, by its reservation or its assignment in that round."""
    assignment, place = state.assignment(peer, round_number), state.reservations.get(peer)
    hosted = [
        holder.stages for holder in (assignment.member if assignment else None, place) if holder is not None
    ]
    if part == Part.EMBEDDING:
        return stage == 0 and bool(hosted)
    return part == Part.STAGE and any(stage in stages for stages in hosted)
