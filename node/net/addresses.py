"""The addresses that this node claims: ports that answer before it joins, and what the coordinator found."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import AsyncExitStack, suppress

from node.net.link_server import LinkServer
from node.security.credentials import RunCredentials
from protocol.roles import POLICIES
from protocol.server.gateway import listen_on
from protocol.trust.host_port import host_port
from protocol.trust.reachability import NOT_REACHED, Addresses, Reached
from protocol.types import Reachability, Role

log = logging.getLogger(__name__)


class ClaimedPorts:
    """The public ports of this node. It only dials, and claims none, until they are open.

    `is_fixed` says that the owner has chosen the advertised host.

    Attributes:
        advertise: the host under which others reach this machine.
        host: of this machine's interface.
        dht_port: of the DHT peer; 0 takes a free one.
        addresses: what this node claims.
        reached: what the coordinator has found there.
        unreached: set while others open no connection to this node.
    """

    def __init__(self, advertise: str, host: str, dht_port: int, is_fixed: bool = False) -> None:
        self._is_fixed = is_fixed
        self.advertise, self.dht_port, self.addresses = advertise, dht_port, Addresses()
        self.host = host
        self.unreached = asyncio.Event()
        self.reached = NOT_REACHED
        self._link_port = 0
        self._holder: asyncio.Server | None = None

    async def open(
        self,
        links: LinkServer,
        role: Role | None,
        link_port: int,
        credentials: RunCredentials,
        stack: AsyncExitStack,
    ) -> None:
        """Accept links, if `role` may have neighbours, and hold the DHT peer's port. `stack` closes both.

        Raises HetnodeError PORT_IN_USE for the port of links.
        """
        await self.hold(credentials)
        stack.callback(self.release)
        if role is None or POLICIES[role].joins_pipelines:
            self._link_port = await links.start(self.host, link_port)
            stack.push_async_callback(links.close)
        self.claim(self.advertise)

    async def hold(self, credentials: RunCredentials) -> None:
        """Show this node's certificate at the port of the DHT peer, which the coordinator dials earlier.

        A port that is in use is not held: the DHT peer will say so.
        """
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(credentials.certificate_file, credentials.key_file)
        with suppress(OSError):
            listener = listen_on(self.host, self.dht_port)
            self._holder = await asyncio.start_server(
                lambda _, writer: writer.close(), sock=listener, ssl=shown
            )
            self.dht_port = int(listener.getsockname()[1])

    def claim(self, advertise: str) -> None:
        """Claim the ports that are open, under this host if the owner has chosen none."""
        if not self._is_fixed:
            self.advertise = advertise
        ports = self._link_port, self.dht_port
        endpoint, dht = (host_port(self.advertise, port) if port else "" for port in ports)
        self.addresses = Addresses(endpoint, dht)

    @property
    def endpoint(self) -> str:
        """Where others open links to this node; "" if they cannot."""
        return self.addresses.endpoint if self.reached.endpoint else ""

    @property
    def dht(self) -> str:
        """Where others reach this node's DHT peer; "" if they cannot."""
        return self.addresses.dht if self.reached.dht else ""

    @property
    def reached(self) -> Reached:
        return self._reached

    @reached.setter
    def reached(self, found: Reached) -> None:
        self._reached = found
        if found.reachability is Reachability.DIAL_ONLY:
            self.unreached.set()
        else:
            self.unreached.clear()

    def note_reached(self, reached: Reached) -> None:
        """Tell the volunteer whether others reach this node, and what to do if not."""
        self.reached = reached
        if reached.reason:
            log.warning("%s.", reached.reason)
        elif reached.reachability is Reachability.DIAL_ONLY:
            log.info("this node only dials: no other peer opens connections to it")
        else:
            uses = ((self.addresses.endpoint, "links"), (self.addresses.dht, "payloads"))
            where = " and ".join(f"{address} ({use})" for address, use in uses if address)
            through = ", through a relay" if reached.reachability is Reachability.RELAYED else ""
            log.info("others reach this node at %s%s", where, through)

    def release(self) -> None:
        """Give the port of the DHT peer up. May be called again."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
