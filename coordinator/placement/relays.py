"""What relays can carry: each sends the bytes of all peers behind it through one uplink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from coordinator.placement.cost_model import Survey
from coordinator.state.state import Peer, State
from protocol.types import Reachability


def relay_uplinks(state: State) -> Mapping[str, float]:
    """Bytes per second that each relay can send, by its endpoint; only where that is known."""
    uplinks = dict(state.own_uplinks)
    for relay in state.relays:
        reported = state.estimates.get(relay.peer)
        capacity = reported.capacity if reported else state.peers[relay.peer].capacity
        if capacity.uplink:
            uplinks[relay.endpoint] = capacity.uplink
    return uplinks


def survey_of(state: State) -> Survey:
    """What the peers of a run have measured, and what their relays can carry."""
    peers = state.peers
    survey = Survey.of(state.estimates, {peer.peer: peer.capacity for peer in peers.values()})
    return with_relays(survey, peers.values(), relay_uplinks(state))


def with_relays(survey: Survey, peers: Iterable[Peer], uplinks: Mapping[str, float]) -> Survey:
    """`survey` with the share of each of the relayed `peers` in the uplink of its relay."""
    live = [peer for peer in peers if peer.is_live]
    relayed = {peer.peer: peer.endpoint for peer in live if peer.reachability is Reachability.RELAYED}
    if not relayed:
        return survey
    behind = Counter(relayed.values())
    shares = {peer: uplinks.get(endpoint, inf) / behind[endpoint] for peer, endpoint in relayed.items()}
    dial_only = frozenset(each.peer for each in live if each.reachability is Reachability.DIAL_ONLY)
    return replace(survey, relay_shares=shares, dial_only=dial_only)
