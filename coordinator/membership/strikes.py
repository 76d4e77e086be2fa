"""What a peer answers for: payloads that its group refuses, and what it signed that it must not sign.

One peer's word is not enough, or it could have an honest one removed: a strike needs the word of two members
of the group, and of more than half of those that have reported. What the coordinator itself has seen under
the peer's signature needs no other word. A peer gets one strike a round at most, and repeated strikes put it
in quarantine: it counts as gone, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.state.events import PayloadRejected, PeerQuarantined, PeerStruck
from coordinator.state.state import Round
from coordinator.state.transaction import Transaction
from protocol.types import PeerId, Rejection

STRIKES_TO_QUARANTINE = 3
STRIKE_ROUNDS = 50
"""Strikes of earlier rounds are forgotten."""

_LEAST_ACCUSERS = 2


def note_rejections(
    transaction: Transaction,
    sender: PeerId,
    stage: int,
    round_number: int,
    rejected: Sequence[Rejection],
    now: float,
) -> None:
    """Record what `sender` refused of the payloads on offer, each once; anything else is ignored."""
    round_state = transaction.state.round_of(stage, round_number)
    for rejection in rejected:
        owner = rejection.descriptor.owner
        is_on_offer = round_state.offers.get(owner) == rejection.descriptor
        if is_on_offer and owner != sender and sender not in round_state.rejections.get(owner, {}):
            transaction.add(PayloadRejected(now, stage, round_number, sender, owner, rejection.reason))


def judge(transaction: Transaction, round_number: int, round_state: Round, now: float) -> None:
    """Give a strike to every owner of whose payload enough of the group say that it cannot be used."""
    group = [descriptor.owner for descriptor in round_state.group.descriptors] if round_state.group else []
    for owner, reasons in sorted(round_state.rejections.items()):
        witnesses = [peer for peer in group if peer != owner and peer in round_state.reports]
        accusers = [peer for peer in witnesses if peer in reasons]
        if len(accusers) >= _LEAST_ACCUSERS and 2 * len(accusers) > len(witnesses):
            strike(transaction, owner, round_number, reasons[accusers[0]], now)


def strike(transaction: Transaction, peer: PeerId, round_number: int, reason: str, now: float) -> None:
    """Give `peer` its strike of round `round_number`, if it has none, and quarantine it if these are too many."""
    if round_number in transaction.state.strikes.get(peer, ()):
        return
    transaction.add(PeerStruck(now, peer, round_number, reason))
    recent = [each for each in transaction.state.strikes[peer] if each > round_number - STRIKE_ROUNDS]
    if len(recent) >= STRIKES_TO_QUARANTINE and transaction.state.peers[peer].is_live:
        transaction.add(PeerQuarantined(now, peer, len(recent)))
