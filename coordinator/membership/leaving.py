"""A peer leaves, drains, retreats, or is banned."""

from __future__ import annotations

from coordinator.membership.validation import check_peer_id, live_peer
from coordinator.state.commands import Ban, Drain, Leave, Retreat, Unban
from coordinator.state.events import PeerBanned, PeerDraining, PeerLeft, PeerRetreated, PeerUnbanned
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec

FINISHED = "finished"
"""The reason that a peer gives when it leaves because its work is done."""


def leave(transaction: Transaction, spec: RunSpec, command: Leave, now: float) -> None:
    """The peer is gone. No effect if it was gone before. Raises UNKNOWN_PEER."""
    known = transaction.state.peers.get(command.peer)
    if known is not None and not known.is_live:
        return  # a repeated call, or the peer was lost meanwhile
    live_peer(transaction.state, command.peer)
    # A peer that claims to be finished too early counts as a failure, like every other loss.
    finished = command.reason == FINISHED and transaction.state.has_attested(command.peer, spec.rounds)
    transaction.add(PeerLeft(now, command.peer, command.reason, finished))


def drain(transaction: Transaction, command: Drain, now: float) -> None:
    """The peer leaves at the end of its round: no later plan assigns it. Raises UNKNOWN_PEER."""
    if live_peer(transaction.state, command.peer).is_staying:
        transaction.add(PeerDraining(now, command.peer, command.reason))


def retreat(transaction: Transaction, command: Retreat, now: float) -> None:
    """The peer gives up its assignment under a plan. No effect after that plan, or without an assignment.

    Raises:
        HetnodeError: UNKNOWN_PEER.
    """
    state = transaction.state
    live_peer(state, command.peer)
    # The plan of the current round, or the newest one, which may be for the next round.
    runs = state.plans and state.plan_for(state.current_round).epoch <= command.epoch <= state.plans[-1].epoch
    is_assigned = command.peer in state.assignments.get(command.epoch, {})
    if runs and is_assigned and command.peer not in state.absent.get(command.epoch, ()):
        transaction.add(PeerRetreated(now, command.peer, command.epoch, command.reason))


def ban(transaction: Transaction, command: Ban, now: float) -> None:
    """Exclude the peer from the run. Raises BAD_REQUEST for a name that is no peer id."""
    check_peer_id(command.peer)
    if command.peer in transaction.state.banned:
        return
    transaction.add(PeerBanned(now, command.peer, command.reason))
    known = transaction.state.peers.get(command.peer)
    if known is not None and known.is_live:
        transaction.add(PeerLeft(now, command.peer, f"banned: {command.reason}", finished=False))


def unban(transaction: Transaction, command: Unban, now: float) -> None:
    if command.peer in transaction.state.excluded:
        transaction.add(PeerUnbanned(now, command.peer))
