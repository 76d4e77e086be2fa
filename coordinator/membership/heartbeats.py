"""Heartbeats: a peer shows that it is live, and reports its progress and its measurements."""

from __future__ import annotations

from dataclasses import replace

from coordinator.membership.validation import live_peer
from coordinator.state.commands import Heartbeat
from coordinator.state.events import PeerLost, PeerMeasured, PeerSeen
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec
from protocol.types import Estimates, PeerId

_LEAST_PAUSE, _LONGEST_PAUSE = 2.0, 20.0
"""Seconds between two recorded reports of a peer: longer after each report. Nodes wait at least as long."""


def heartbeat(transaction: Transaction, command: Heartbeat, now: float) -> None:
    """Note that the peer is live, and store its new measurements. Raises UNKNOWN_PEER."""
    live_peer(transaction.state, command.peer)
    transaction.add(PeerSeen(now, command.peer, command.round_number, command.inner_step))
    if command.estimates is not None:
        _record_estimates(transaction, command.peer, command.estimates, now)


def _record_estimates(transaction: Transaction, peer: PeerId, estimates: Estimates, now: float) -> None:
    """Store the estimates, unless the peer reports too often: the event log must stay small."""
    reports, last = transaction.state.report_times.get(peer, (0, now))
    # Links to unknown peers would let one peer fill the log with invented names.
    links = tuple(link for link in estimates.links if link.peer in transaction.state.peers)
    known = replace(estimates, links=links)
    too_soon = now < last + min(_LEAST_PAUSE * reports, _LONGEST_PAUSE)
    if not too_soon and known != transaction.state.estimates.get(peer):
        transaction.add(PeerMeasured(now, peer, known))


def remove_silent_peers(transaction: Transaction, spec: RunSpec, now: float) -> bool:
    """Declare peers lost that were silent for `lost_after` seconds. Returns whether there were any."""
    before = len(transaction.events)
    for peer in transaction.state.peers.values():
        # Silence counts only while the coordinator listens: not before its last start.
        last_seen = max(transaction.state.last_seen[peer.peer].at, transaction.state.started_at)
        if peer.is_live and now - last_seen > spec.timing.lost_after:
            transaction.add(PeerLost(now, peer.peer, now - last_seen))
    return len(transaction.events) > before
