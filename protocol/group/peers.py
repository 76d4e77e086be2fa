"""What is known of peers beside plans and rounds: their addresses, and where they call from."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import Capacity, PeerId, Role, StageRange


@dataclass(frozen=True)
class MemberSource:
    """A source from which calls of `peer` have come: an IPv4 address or an IPv6 /64, as text."""

    peer: PeerId
    source: str


@dataclass(frozen=True)
class PeerRecord:
    """What a peer publishes about itself in the DHT, signed with its identity.

    `endpoint` is where it accepts links, `dht` where its DHT peer is reached: ``host:port``, or "".
    """

    peer: PeerId
    protocol_version: int
    role: Role
    capacity: Capacity
    endpoint: str
    stages: StageRange | None
    dht: str = ""
