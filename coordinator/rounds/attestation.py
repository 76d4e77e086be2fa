"""Whether the anchors agree: the digests that peers attest after a round, and who is done after the last."""

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
    """Note the digest of `sender`'s anchor after `round_number`, and name every peer whose anchor differs.

    Whoever has a place attests its stages after every decision, whether it trains or follows. Round 0 stands
    for the anchor before the first round. Part EMBEDDING is attested for stage 0 by any of them, since all
    keep the table. A peer whose anchor differs takes no part until a later plan, made after it attested the
    anchor of the others.

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
        return  # a peer that is catching up cannot know yet how far the others are
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
            # It was right all along, or is so again.
            transaction.add(DigestAttested(now, stage, round_number, part, peer, its_digest))


def _is_known(state: State, peer: PeerId, stage: int, round_number: int, part: str, digest: str) -> bool:
    """Whether `peer` has said this since it joined."""
    if state.digests.get((stage, round_number, part), {}).get(peer) != digest:
        return False
    is_synced = part != Part.STAGE or state.synced.get(peer, {}).get(stage, -1) >= round_number
    return is_synced or (peer, stage, round_number, part) in state.diverged


def expected_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The digest that most peers attested; of equally many the one attested first. None before any."""
    digests = state.digests.get((stage, round_number, part))
    return Counter(digests.values()).most_common(1)[0][0] if digests else None


def settled_digest(state: State, stage: int, round_number: int, part: str) -> str | None:
    """The expected digest, once it is certain: an honest peer must not be condemned by whoever spoke first.

    None where another one has as many attesters, until everybody who takes part has attested.
    """
    digests = state.digests.get((stage, round_number, part))
    if not digests:
        return None
    # Of equally many, whoever was found wrong before has no vote: a late liar overturns nothing.
    sound = [d for peer, d in digests.items() if (peer, stage, round_number, part) not in state.diverged]
    for votes in (list(digests.values()), sound):
        (first, most), *others = Counter(votes).most_common(2) or [("", 0)]
        if most and (not others or most > others[0][1]):
            return first
    everybody_has_spoken = digests.keys() >= _who_attest(state, stage, round_number, part)
    return expected_digest(state, stage, round_number, part) if everybody_has_spoken else None


def _who_attest(state: State, stage: int, round_number: int, part: str) -> set[PeerId]:
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
    """The checkpoints of `stage` that can be had, newest first.

    Those of rounds after which every node writes one, whose digest at least two peers attested, or the only
    peer that attested any; with the live ones among these.
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
    """The members that take part in the last round and have not attested their last anchor yet."""
    return [
        member.peer
        for replica in state.plans[-1].replicas
        for member in replica.members
        if state.peers[member.peer].is_live
        and state.takes_part(member.peer, spec.rounds)
        and not state.has_attested(member.peer, spec.rounds)
    ]


def unattested(state: State, spec: RunSpec) -> list[int]:
    """The stages whose anchor after the last round nobody has attested rightly."""
    attested = {
        stage
        for rounds in state.synced.values()
        for stage, round_number in rounds.items()
        if round_number >= spec.rounds
    }
    return [stage for stage in range(spec.swarm.stages) if stage not in attested]


def _holds(state: State, peer: PeerId, stage: int, round_number: int, part: str) -> bool:
    """By its place, or by a seat that it had."""
    assignment, place = state.assignment(peer, round_number), state.reservations.get(peer)
    hosted = [
        holder.stages for holder in (assignment.member if assignment else None, place) if holder is not None
    ]
    if part == Part.EMBEDDING:
        return stage == 0 and bool(hosted)
    return part == Part.STAGE and any(stage in stages for stages in hosted)
