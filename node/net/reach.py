"""How others reach a node, and how it reaches them: directly. A relay changes both (node.home.relay)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from contextlib import AsyncExitStack

from node.exchange.transport import Transport
from node.net.addresses import ClaimedPorts
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.link_server import LinkServer
from protocol.trust.endpoints import split_endpoint
from protocol.types import PeerId, RelayAddress

AUTO, NONE = "auto", "none"
"""Choices of a relay, besides the ``host:port`` of one of them."""


class DirectReach:
    """A node that is reached at its own ports, and dials everyone itself.

    Args:
        chosen: AUTO takes the nearest relay, NONE none; else ``host:port`` of the only one to take.
        links: accepts the links of others.
        stack: closes all that is opened for a relay.

    Attributes:
        ports: the local ports to which connections of others go, and the addresses that this node claims.
        relays: called for each choice of a relay; all relays of the run.
        is_relayed: others reach this node through a relay.
        is_indirect: this node reaches others through a relay alone.
    """

    def __init__(
        self,
        peer: PeerId,
        chosen: str,
        coordinator: CoordinatorClient,
        ports: ClaimedPorts,
        links: LinkServer,
        stack: AsyncExitStack,
    ) -> None:
        self.peer, self.chosen, self.coordinator = peer, chosen, coordinator
        self.ports, self.links, self.stack = ports, links, stack
        self.relays: Callable[[], Sequence[RelayAddress]] = tuple

    @property
    def is_relayed(self) -> bool:
        return False

    @property
    def is_indirect(self) -> bool:
        return False

    async def take(self) -> None:
        """If no other node reaches this one: take a relay, and tell the coordinator. May be called again."""

    async def keep(self, transport: Transport, directory: Directory) -> None:
        """Tell coordinator and peers each new address of a relay, until cancelled."""

    async def through(self, address: str) -> str:
        """``host:port`` to dial instead of `address`."""
        return address

    async def first_peers(self, dht_peers: Sequence[str]) -> tuple[str, ...]:
        """The multiaddresses at which this node reaches the first `dht_peers` by now."""
        return tuple(dht_peers)

    def dht_place(self) -> tuple[str, int]:
        """Host and port under which others reach this node's DHT peer; port 0 is that on which it listens."""
        claimed = self.ports.addresses.dht
        return split_endpoint(claimed) if claimed else (self.ports.advertise, 0)

    def admit(self, sources: Collection[str]) -> None:
        """Carry connections to the DHT peer from `sources` alone."""

    def want(self, peers: Set[PeerId]) -> None:
        """Keep this node's DHT peer connected to those of `peers` from now on."""

    async def keep_connected(self, transport: Transport, directory: Directory) -> None:
        """Tell the DHT peer where to dial those peers, if it cannot dial them itself, until cancelled."""
