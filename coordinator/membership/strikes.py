"""Strikes: a peer gets one for a payload that its group rejects, or for an offer that breaks the rules.

The coordinator relies on reports: a strike needs reports of two members of the group, and of more than half
of the members that have reported. The verdict of the arbiter about a contested payload is proof by itself. A
peer gets at most one strike in a round.
STRIKES_TO_QUARANTINE recent strikes put it in quarantine: it counts as gone, and no round waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.run.state.events import PayloadRejected, PeerQuarantined, PeerStruck
from coordinator.run.state.records import Round
from coordinator.run.state.transaction import Transaction
from protocol.types import Finding, PayloadDescriptor, PeerId, Rejection, Verdict

STRIKES_TO_QUARANTINE = 3
STRIKE_ROUNDS = 50
"""Rounds after which a strike no longer counts."""

LEAST_ACCUSERS = 2
"""One liar must not have an honest peer quarantined."""


def contradict(one: PayloadDescriptor, other: PayloadDescriptor) -> bool:
    """Whether no honest owner signs both different descriptors of one (stage, round).

    A peer that lost its state, or got another plan for the same round, makes another payload of it.
    """
    return (one.anchor_digest, one.epoch) == (other.anchor_digest, other.epoch)


def note_rejections(
    transaction: Transaction, sender: PeerId, stage: int, round_number: int, rejected: Sequence[Rejection]
) -> None:
    """Record each rejection of an offered payload by `sender` once. Other rejections are ignored."""
    round_state = transaction.state.round_of(stage, round_number)
    for rejection in rejected:
        # A rejection of other bytes, or of the sender's own payload, says nothing about an offer.
        owner = rejection.descriptor.owner
        is_on_offer = round_state.offers.get(owner) == rejection.descriptor
        if is_on_offer and owner != sender and sender not in round_state.rejections.get(owner, {}):
            transaction.add(
                PayloadRejected(transaction.now, stage, round_number, sender, owner, rejection.reason)
            )


def judge(transaction: Transaction, round_number: int, round_state: Round) -> None:
    """Give a strike to the owner of every payload that enough members of the group reject.

    A payload that the arbiter found valid costs its owner nothing.
    """
    verdicts = round_state.contest.verdicts if round_state.contest else {}
    for owner, reasons in sorted(round_state.rejections.items()):
        verdict = verdicts.get(owner)
        if verdict is not None and verdict.finding is Finding.HELD:
            continue
        accusers, witnesses = accusers_of(round_state, owner)
        if len(accusers) >= LEAST_ACCUSERS and 2 * len(accusers) > len(witnesses):
            strike(transaction, owner, round_number, reasons[accusers[0]])


def judge_verdict(
    transaction: Transaction,
    round_number: int,
    owner: PeerId,
    verdict: Verdict,
    claimants: Collection[PeerId],
) -> None:
    """Give strikes for what the arbiter found out about the payload of `owner`.

    Only what a peer itself signed, or answered to the arbiter, is proof. A peer that does not answer may have
    a broken line, and a peer that lacks or rejects a payload may have got none or other bytes from its owner.

    Args:
        claimants: the peers that have reported holding the payload, which implies that they found it valid.
    """
    if verdict.finding is Finding.INVALID:
        strike(transaction, owner, round_number, f"its payload is not valid: {verdict.reason}")
        for peer in sorted(set(claimants) - {owner}):
            strike(transaction, peer, round_number, f"it reported the invalid payload of {owner} as held")
    for peer in sorted(set(verdict.refuted) & set(claimants)):
        strike(
            transaction, peer, round_number, f"it reported the payload of {owner} as held and did not send it"
        )


def accusers_of(round_state: Round, owner: PeerId) -> tuple[list[PeerId], list[PeerId]]:
    """The members of the group that reject the payload of `owner`, and the members that could."""
    group = [descriptor.owner for descriptor in round_state.group.descriptors] if round_state.group else []
    reasons = round_state.rejections.get(owner, {})
    # A member that has not reported may not have the payload yet.
    witnesses = [peer for peer in group if peer != owner and peer in round_state.reports]
    return [peer for peer in witnesses if peer in reasons], witnesses


def strike(transaction: Transaction, peer: PeerId, round_number: int, reason: str) -> None:
    """Give `peer` a strike for `round_number` unless it has one. Quarantine it if it has too many."""
    if round_number in transaction.state.strikes.get(peer, ()):
        return  # the stages of one bad round are one fault
    transaction.add(PeerStruck(transaction.now, peer, round_number, reason))
    recent = [each for each in transaction.state.strikes[peer] if each > round_number - STRIKE_ROUNDS]
    if len(recent) >= STRIKES_TO_QUARANTINE and transaction.state.peers[peer].is_live:
        transaction.add(PeerQuarantined(transaction.now, peer, len(recent)))
