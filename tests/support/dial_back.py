"""A coordinator that believes the addresses of its peers, for tests whose peers listen nowhere."""

from __future__ import annotations

from protocol.trust.reachability import Addresses, Reached
from protocol.types import PeerId, Reachability


async def believe(peer: PeerId, caller: str, addresses: Addresses) -> Reached:
    """Takes the place of coordinator.api.dial_back.TlsDialBack."""
    kind = Reachability.RELAYED if addresses.relayed else Reachability.OPEN
    has_any = addresses.endpoint or addresses.dht
    return Reached(kind if has_any else Reachability.DIAL_ONLY, bool(addresses.endpoint), bool(addresses.dht))
