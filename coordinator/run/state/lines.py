"""The lines of peers: for the schedule of a group, and for the choice of those that others fetch from.

A pure function of the state, so the same events give the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import log2

from coordinator.run.state.state import State
from protocol.math.turns import due_stages
from protocol.types import MemberLine, PayloadDescriptor, PeerId, Reachability

_MOST = 1e15
"""Bytes per second. A peer may claim any rate."""


def rounded_rate(rate: float) -> int:
    """The nearest of the rates 1, 1.4, 2, 2.8, 4 and so on; 0 for a rate that is not measured.

    Measurements differ a little from peer to peer and from time to time; equal lines should count as equal.
    """
    return round(2 ** (round(2 * log2(min(max(rate, 1.0), _MOST))) / 2)) if rate > 0 else 0


def with_most_uplink(uplinks: Mapping[PeerId, float]) -> tuple[PeerId, ...]:
    """The peers with the fastest uplinks that together have half of all, at least two; in ascending order.

    Peers whose rates round to the same one are all among them, or none. Without any measurement all are.
    """
    rates = {peer: rounded_rate(uplink) for peer, uplink in uplinks.items()}
    half, found, reached = sum(rates.values()) / 2, list[PeerId](), 0
    for rate, alike in groupby(sorted(rates, key=lambda peer: -rates[peer]), key=lambda peer: rates[peer]):
        peers = list(alike)
        found += peers
        reached += rate * len(peers)
        if reached >= half > 0 and len(found) > 1:
            break
    return tuple(sorted(found))


def uplink_of(state: State, peer: PeerId) -> float:
    """Bytes per second that `peer` can send; 0 if that is not known."""
    reported = state.estimates.get(peer)
    if reported is not None:
        return reported.capacity.uplink
    return state.peers[peer].capacity.uplink if peer in state.peers else 0.0


def lines_of(state: State, descriptors: Sequence[PayloadDescriptor]) -> tuple[MemberLine, ...]:
    """The line of the owner of each payload.

    A peer exchanges the payloads of all its stages that are due at the same time, so each gets its part.
    """
    lines = []
    for descriptor in descriptors:
        peer = state.peers[descriptor.owner]
        reported = state.estimates.get(peer.peer)
        capacity = reported.capacity if reported else peer.capacity
        assignment = state.assignment(peer.peer, descriptor.round_number)
        hosted = assignment.member.stages if assignment else (descriptor.stage,)
        stages = len(due_stages(state.spec, descriptor.round_number, hosted))
        lines.append(
            MemberLine(
                rounded_rate(capacity.uplink / stages),
                rounded_rate(capacity.downlink / stages),
                peer.reachability is Reachability.OPEN,
            )
        )
    return tuple(lines)
