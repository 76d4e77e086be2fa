"""A peer shows that it is live and what it measures, leaves, drains, retreats, is lost, or is banned."""

from __future__ import annotations

from dataclasses import replace

from coordinator.membership.invites import open_invites_of
from coordinator.membership.open_places import keep_place
from coordinator.membership.validation import check_peer_id, live_peer
from coordinator.placement.repair import may_wait
from coordinator.run.state import events
from coordinator.run.state.commands import Ban, Drain, Heartbeat, Leave, Retreat, Tick, Unban
from coordinator.run.state.transaction import Transaction
from protocol.types import Estimates, PeerId

_LEAST_PAUSE, _LONGEST_PAUSE = 2.0, 20.0
"""Seconds between two recorded reports of a peer: longer after each report. Nodes wait at least as long."""
FINISHED = "finished"
"""The reason that a peer gives when it leaves because its work is done."""


def heartbeat(transaction: Transaction, command: Heartbeat) -> None:
    """Note that the peer is live, and store its new measurements. Raises UNKNOWN_PEER."""
    live_peer(transaction.state, command.peer)
    seen = command.peer, command.round_number, command.inner_step, command.waits, command.kept
    ahead = transaction.state.last_seen[command.peer].ahead
    transaction.add(events.PeerSeen(transaction.now, *seen, ahead))
    if command.estimates is not None:
        _record_estimates(transaction, command.peer, command.estimates)


def _record_estimates(transaction: Transaction, peer: PeerId, estimates: Estimates) -> None:
    """Store the estimates, unless the peer reports too often: the event log must stay small."""
    reports, last = transaction.state.report_times.get(peer, (0, transaction.now))
    # Links to unknown peers would let one peer fill the log with invented names.
    links = tuple(link for link in estimates.links if link.peer in transaction.state.peers)
    known = replace(estimates, links=links)
    too_soon = transaction.now < last + min(_LEAST_PAUSE * reports, _LONGEST_PAUSE)
    if not too_soon and known != transaction.state.estimates.get(peer):
        transaction.add(events.PeerMeasured(transaction.now, peer, known))


def remove_silent_peers(transaction: Transaction, tick: Tick) -> bool:
    """Declare peers lost that were silent for `lost_after` seconds. Returns whether there were any.

    A peer whose heartbeat waits behind the calls of others, or as long as the tick does, is not silent.
    """
    state, now = transaction.state, transaction.now
    heard, until = tick.heard, min(now, tick.issued)
    # Silence counts only while the coordinator listens: not before its last start.
    silences = (
        (peer, until - max(state.last_seen[peer].at, state.started_at, heard.get(peer, 0.0)))
        for peer, known in state.peers.items()
        if known.is_live
    )
    lost = [(peer, silence) for peer, silence in silences if silence > state.spec.timing.lost_after]
    for peer, silence in lost:
        transaction.add(events.PeerLost(now, peer, silence))
        keep_place(transaction, peer)
    return bool(lost)


def leave(transaction: Transaction, command: Leave) -> None:
    """The peer is gone. No effect if it was gone before. Raises UNKNOWN_PEER."""
    known = transaction.state.peers.get(command.peer)
    if known is not None and not known.is_live:
        return  # a repeated call, or the peer was lost meanwhile
    live_peer(transaction.state, command.peer)
    # A peer that claims to be finished too early counts as a failure, like every other loss.
    has_attested = transaction.state.has_attested(command.peer, transaction.state.spec.rounds)
    finished = command.reason == FINISHED and has_attested
    transaction.add(events.PeerLeft(transaction.now, command.peer, command.reason, finished))
    keep_place(transaction, command.peer)


def drain(transaction: Transaction, command: Drain) -> None:
    """The peer leaves at the end of its round: no later plan assigns it. Raises UNKNOWN_PEER."""
    if live_peer(transaction.state, command.peer).is_staying:
        transaction.add(events.PeerDraining(transaction.now, command.peer, command.reason))


def retreat(transaction: Transaction, command: Retreat) -> None:
    """The peer gives up its assignment under a plan. No effect after that plan, or without an assignment.

    A peer that has done steps, and can go on, loses nothing while a repair is possible; if none is, nothing
    changes, and the peer retreats again when it has offered what it has. Raises UNKNOWN_PEER.
    """
    state, peer = transaction.state, command.peer
    live_peer(state, peer)
    epoch = state.standing_epoch(peer, command.epoch) if state.plans else 0
    # The plan of the current round, or the newest one, which may be for the next round.
    runs = state.plans and state.plan_for(state.current_round).epoch <= epoch <= state.plans[-1].epoch
    assignment = state.assignments.get(epoch, {}).get(peer)
    if not runs or assignment is None or peer in state.absent.get(epoch, ()):
        return
    # Who loses nothing may enter the next round, too, whatever it has done in this one.
    steps = command.steps if command.round_number == state.current_round or not command.steps else None
    if command.steps and (steps is None or not may_wait(state, assignment.replica, steps)):
        return
    transaction.add(events.PeerRetreated(transaction.now, peer, epoch, command.reason, steps))


def ban(transaction: Transaction, command: Ban) -> None:
    """Exclude the peer from the run. Raises BAD_REQUEST for a name that is no peer id."""
    check_peer_id(command.peer)
    if command.revoke_invites:
        # The owner of a banned identity can make a new one in no time, and may still know its invite.
        for invitation in open_invites_of(transaction.state, command.peer, transaction.now):
            transaction.add(events.InviteRevoked(transaction.now, invitation.invite))
    if command.peer in transaction.state.banned:
        return
    transaction.add(events.PeerBanned(transaction.now, command.peer, command.reason))
    known = transaction.state.peers.get(command.peer)
    if known is not None and known.is_live:
        transaction.add(
            events.PeerLeft(transaction.now, command.peer, f"banned: {command.reason}", finished=False)
        )


def unban(transaction: Transaction, command: Unban) -> None:
    if command.peer in transaction.state.excluded:
        transaction.add(events.PeerUnbanned(transaction.now, command.peer))
