"""The public address of a node that no other node can dial: that of a relay, told to the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence, Set
from contextlib import AsyncExitStack
from functools import partial

from node.exchange.transport import Transport
from node.home.relay.keeper import Exposure, RelayKeeper
from node.home.relay.tunnels import Tunnels
from node.net.addresses import ClaimedPorts
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.link_server import LinkServer
from node.net.membership import TEMPORARY, until_answered
from node.net.reach import AUTO, NONE, DirectReach
from protocol.errors import HetnodeError
from protocol.relay.exposed import RelayedService
from protocol.server.admitted_sources import AdmittedSources
from protocol.server.interfaces import own_sources
from protocol.trust.reachability import Addresses
from protocol.types import PeerId, RelayAddress

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_RETRY_SECONDS = 2.0


class RelayedNode(DirectReach):
    """Makes a node reachable through a relay of its run, and tells the coordinator where.

    Attributes:
        is_needed: no other node reached this one directly, at its start or after a change of its address.
        exposure: where others reach this node; None while they do not.
        tunnels: what this node opens through its relay.
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
        super().__init__(peer, chosen, coordinator, ports, links, stack)
        self.exposure: Exposure | None = None
        self.is_needed = False
        self._taking = asyncio.Lock()
        self._links: tuple[str, int] | None = None
        servers = {RelayedService.LINK: lambda: self._links, RelayedService.DHT: self._dht_peer}
        self._keeper = RelayKeeper(peer, lambda: coordinator.credentials.tls, servers, self._candidates)
        self.tunnels = Tunnels(
            self._keeper.dial, lambda: self.exposure.relay.endpoint if self.exposure else ""
        )

    async def through(self, address: str) -> str:
        return await self.tunnels.through(address)

    @property
    def is_relayed(self) -> bool:
        return self.exposure is not None

    @property
    def is_indirect(self) -> bool:
        return self.tunnels.is_needed

    async def take(self) -> None:
        """If no other node reaches this one: take the nearest relay, and accept what comes from there.

        A node that only dials listens on this machine alone. May be called again.
        """
        if self.chosen == NONE or self.is_needed or not self.ports.unreached.is_set():
            return
        async with self._taking:
            await self._open()
            exposure = await self._keeper.connect()
            if exposure is not None:
                await self._tell(exposure)
                self.exposure = exposure  # told: `keep` tells what comes after it
            elif self._candidates():
                log.warning("no relay of this run answers yet: this node only dials until one does")

    async def keep(self, transport: Transport, directory: Directory) -> None:
        """Tell coordinator and peers each new address, until cancelled. Returns if no relay is wanted.

        Takes a relay as soon as no other node reaches this one directly.
        """
        if self.chosen == NONE:
            return
        if not self.is_needed:
            await self.ports.unreached.wait()
        async with self._taking:
            await self._open()

        async def tell(exposure: Exposure) -> None:
            former, self.exposure = self.exposure, exposure
            try:
                await self._tell(exposure)
            except HetnodeError as error:  # a session that has ended: the next join tells it
                log.warning("the coordinator does not take the address of the relay: %s", error)
            if former != exposure:
                await transport.restart()
                await directory.move(exposure.endpoint, exposure.dht)

        await self._keeper.keep(self.exposure, tell)

    async def first_peers(self, dht_peers: Sequence[str]) -> tuple[str, ...]:
        """The multiaddresses at which this node reaches the first `dht_peers` by now.

        If nothing answers at theirs, it dials through its relay from now on.
        """
        if self.exposure is not None:
            await self.tunnels.look(dht_peers)
        return await self.tunnels.first_peers(dht_peers)

    def admit(self, sources: Collection[str]) -> None:
        """Carry connections to the DHT peer from `sources` alone.

        They come to its port from this machine, which that port always admits.
        """
        self._keeper.admit(AdmittedSources({*sources, *own_sources()}))

    def want(self, peers: Set[PeerId]) -> None:
        self.tunnels.want(peers)

    async def keep_connected(self, transport: Transport, directory: Directory) -> None:
        await self.tunnels.keep(transport, directory)

    async def _open(self) -> None:
        """Listen for what comes from a relay. May be called again."""
        if self.is_needed:
            return
        self.is_needed = True
        self._warn_of_unknown_choice()
        self.stack.callback(self._keeper.close)
        self.stack.callback(self.tunnels.close)
        if not self.ports.dht_port:
            self.ports = ClaimedPorts(_LOOPBACK, _LOOPBACK, 0)
            await self.ports.hold(self.coordinator.credentials)
            self.stack.callback(self.ports.release)
        if self.links.port:
            self._links = (_local(self.ports.host), self.links.port)
        else:
            self._links = (_LOOPBACK, await self.links.start(_LOOPBACK, 0))
            self.stack.push_async_callback(self.links.close)

    async def _tell(self, exposure: Exposure) -> None:
        """Raises HetnodeError if the coordinator refuses it, other than for the number of calls."""
        told = self.ports.addresses = Addresses(exposure.endpoint, exposure.dht, relayed=True)
        call = partial(self.coordinator.update_addresses, told)
        self.ports.note_reached(await until_answered(call, _RETRY_SECONDS, temporary=TEMPORARY))

    def _warn_of_unknown_choice(self) -> None:
        known = [each.endpoint for each in self.relays()]
        if self.chosen != AUTO and self.chosen not in known:
            has = f"has {', '.join(known)}" if known else "has none"
            log.warning("%s is no relay of this run, which %s: this node only dials", self.chosen, has)

    def _dht_peer(self) -> tuple[str, int] | None:
        return (_local(self.ports.host), self.ports.dht_port) if self.ports.dht_port else None

    def _candidates(self) -> Sequence[RelayAddress]:
        if self.chosen == NONE:
            return ()
        return [each for each in self.relays() if self.chosen in (AUTO, each.endpoint)]


def _local(host: str) -> str:
    """Where this machine reaches a server of its own that listens on `host`."""
    return _LOOPBACK if host in ("", "0.0.0.0", "::") else host
