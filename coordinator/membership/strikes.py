"""Strikes: a peer gets one for a payload that its group rejects, or for an offer that breaks the rules.

The coordinator never sees payloads, so it relies on reports: a strike needs reports of two members of the
group, and of more than half of the members that have reported. A peer gets at most one strike in a round.
STRIKES_TO_QUARANTINE recent strikes put it in quarantine: it counts as gone, and no round waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.state.events import PayloadRejected, PeerQuarantined, PeerStruck
from coordinator.state.state import Round
from coordinator.state.transaction import Transaction
from protocol.types import PeerId, Rejection

STRIKES_TO_QUARANTINE = 3
STRIKE_ROUNDS = 50
"""Rounds after which a strike no longer counts."""

_LEAST_ACCUSERS = 2  # one liar must not have an honest peer quarantined


def note_rejections(
    transaction: Transaction,
    sender: PeerId,
    stage: int,
    round_number: int,
    rejected: Sequence[Rejection],
    now: float,
) -> None:
    """Record each rejection of an offered payload by `sender` once. Other rejections are ignored."""
    round_state = transaction.state.round_of(stage, round_number)
    for rejection in rejected:
        # A rejection of other bytes, or of the sender's own payload, says nothing about an offer.
        owner = rejection.descriptor.owner
        is_on_offer = round_state.offers.get(owner) == rejection.descriptor
        if is_on_offer and owner != sender and sender not in round_state.rejections.get(owner, {}):
            transaction.add(PayloadRejected(now, stage, round_number, sender, owner, rejection.reason))


def judge(transaction: Transaction, round_number: int, round_state: Round, now: float) -> None:
    """Give a strike to the owner of every payload that enough members of the group reject."""
    group = [descriptor.owner for descriptor in round_state.group.descriptors] if round_state.group else []
    for owner, reasons in sorted(round_state.rejections.items()):
        # A member that has not reported may not have the payload yet.
        witnesses = [peer for peer in group if peer != owner and peer in round_state.reports]
        accusers = [peer for peer in witnesses if peer in reasons]
        if len(accusers) >= _LEAST_ACCUSERS and 2 * len(accusers) > len(witnesses):
            strike(transaction, owner, round_number, reasons[accusers[0]], now)


def strike(transaction: Transaction, peer: PeerId, round_number: int, reason: str, now: float) -> None:
    """Give `peer` a strike for `round_number` unless it has one. Quarantine it if it has too many."""
    if round_number in transaction.state.strikes.get(peer, ()):
        return  # the stages of one bad round are one fault
    transaction.add(PeerStruck(now, peer, round_number, reason))
    recent = [each for each in transaction.state.strikes[peer] if each > round_number - STRIKE_ROUNDS]
    if len(recent) >= STRIKES_TO_QUARANTINE and transaction.state.peers[peer].is_live:
        transaction.add(PeerQuarantined(now, peer, len(recent)))
