"""The public ports of a node in a home whose router forwards them: claimed, kept, and given back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import NoReturn

from node.exchange.transport import Transport
from node.home.router.interface import RouterError
from node.home.router.port_mapping import PortMapping, map_ports
from node.net.addresses import ClaimedPorts
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.membership import until_answered
from protocol.errors import HetnodeError
from protocol.trust.reachability import Addresses

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class ForwardedPorts:
    """Lets a home's router forward the ports that this node claims, before it claims them.

    Args:
        ports: may be open; then they claim addresses of this machine.
        is_wanted: False asks no router.
        look_seconds: how often the router is asked for its public address.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        ports: ClaimedPorts,
        is_wanted: bool,
        look_seconds: float = 30.0,
    ) -> None:
        self._look_seconds = look_seconds
        self._coordinator, self._ports, self._is_wanted = coordinator, ports, is_wanted
        self._own = Addresses()
        self._mapping: PortMapping | None = None

    async def open(self, local: str, stack: AsyncExitStack) -> None:
        """Claim the public ports of the router instead, if there is one and it forwards them.

        `local` is this machine's address towards the coordinator. `stack` ends it.
        """
        stack.push_async_callback(self.release)
        await self.move(local)

    async def reclaim(self, local: str) -> None:
        """Claim the ports at another address `local` of this machine, or of its router."""
        self._ports.claim(local)
        await self.move(local)

    async def move(self, local: str) -> None:
        """As :meth:`open`, after this machine has got another address `local`, which the ports claim."""
        if not self._is_wanted:
            return
        self._own = self._ports.addresses
        mapped = await map_ports(self._own, local, self._coordinator.address)
        self._mapping = mapped.mapping
        if mapped.problem:
            log.warning("%s, but %s", mapped.found, mapped.problem)
        elif mapped.found:
            log.info("%s", mapped.found)
        if mapped.mapping is not None:
            self._ports.addresses = mapped.mapping.public(self._own)

    async def keep(self, transport: Transport, directory: Directory) -> NoReturn:
        """Renew what the router forwards, until cancelled, and tell coordinator and peers a new address.

        A node that takes a relay instead gives the ports back.
        """
        clock, is_told = asyncio.get_running_loop().time, False
        while True:
            if self._ports.addresses.relayed:
                await self.release()
            await asyncio.sleep(self._look_seconds)
            mapping = self._mapping
            if mapping is None:
                continue
            try:
                if await mapping.refresh(clock()):
                    await self._tell(mapping, transport, directory)
            except RouterError as error:
                log.log(
                    logging.DEBUG if is_told else logging.WARNING,
                    "the router does not renew what it forwards: %s",
                    error,
                )
                is_told = True
            else:
                is_told = False

    async def _tell(self, mapping: PortMapping, transport: Transport, directory: Directory) -> None:
        addresses = self._ports.addresses = mapping.public(self._own)
        log.warning("the router has another public address by now: %s", mapping.address)
        try:
            reached = await until_answered(
                lambda: self._coordinator.update_addresses(addresses), _RETRY_SECONDS
            )
        except HetnodeError as error:  # a session that has ended: the next join tells it
            log.warning("the coordinator does not take that address: %s", error)
            return
        self._ports.note_reached(reached)
        await transport.restart()
        await directory.move(self._ports.endpoint, self._ports.dht)

    async def release(self) -> None:
        """Let the router forward nothing any more. May be called again."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            await mapping.release()
