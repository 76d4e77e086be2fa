"""Connections that this node opens through its relay, because its network lets out none of its own.

Each address of others has a local port: what connects there is carried to that address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from typing import NoReturn

from node.exchange.transport import Transport
from node.net.directory import Directory
from node.net.peer_address import address_of
from protocol.errors import HetnodeError
from protocol.server.splice import SpliceEnd, carry
from protocol.trust.host_port import host_port, multiaddress, tcp_place
from protocol.types import PeerId

log = logging.getLogger(__name__)

_TRY_SECONDS = 3.0
_DIAL_SECONDS = 15.0
_LOOK_SECONDS = 15.0
_MOST_PORTS = 512
_LOOPBACK = "127.0.0.1"

Dial = Callable[[str], Awaitable[SpliceEnd]]
"""Opens a connection to ``host:port`` through the relay. Raises HetnodeError, OSError or TimeoutError."""


class Tunnels:
    """Local ports for the addresses of others.

    Attributes:
        relay: called for each address; ``host:port`` of the relay, which needs no tunnel.
        is_needed: this machine reaches other addresses in no other way.
    """

    def __init__(self, dial: Dial, relay: Callable[[], str]) -> None:
        self._dial, self._relay = dial, relay
        self.is_needed = False
        self._ports: OrderedDict[str, tuple[int, asyncio.AbstractServer]] = OrderedDict()
        self._carrying: set[asyncio.Task[None]] = set()
        self._wanted: Set[PeerId] = frozenset()
        self._changed = asyncio.Event()

    async def look(self, dht_peers: Sequence[str]) -> None:
        """Find out whether tunnels are needed: nothing answers at any multiaddress of the first DHT peers."""
        places = [host_port(*place) for place in map(tcp_place, dht_peers) if place]
        answers = await asyncio.gather(*map(_answers, places))
        self.is_needed = bool(places) and not any(answers)
        if self.is_needed:
            log.info("nothing answers at %s: all that this node opens goes through the relay", places[0])
        self._changed.set()

    async def through(self, address: str) -> str:
        """``host:port`` to dial instead of `address`."""
        if not self.is_needed or not address or address == self._relay():
            return address
        return host_port(_LOOPBACK, await self._port(address))

    async def first_peers(self, dht_peers: Sequence[str]) -> tuple[str, ...]:
        """The multiaddresses to dial instead of `dht_peers`."""
        if not self.is_needed:
            return tuple(dht_peers)
        places = {each.rpartition("/p2p/")[2]: tcp_place(each) for each in dht_peers}
        found = [(peer, host_port(*place)) for peer, place in places.items() if place]
        return tuple([f"{await self._multiaddress(at)}/p2p/{peer}" for peer, at in found])

    def want(self, peers: Set[PeerId]) -> None:
        """Keep this node's DHT peer connected to those of `peers` from now on."""
        self._wanted = peers
        self._changed.set()

    async def keep(self, transport: Transport, directory: Directory) -> NoReturn:
        """Tell the DHT peer where to dial others while tunnels are needed, until cancelled."""
        while True:
            self._changed.clear()
            if self.is_needed:
                found = await directory.dht_addresses()
                wanted = sorted(self._wanted & found.keys())
                places: dict[str, str] = {peer: await self._multiaddress(found[peer]) for peer in wanted}
                with suppress(HetnodeError):  # the transport is being started again
                    await transport.contact(places)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()

    def close(self) -> None:
        """Close all ports and connections."""
        for _, server in self._ports.values():
            server.close()
        for task in tuple(self._carrying):
            task.cancel()

    async def _multiaddress(self, address: str) -> str:
        return multiaddress(_LOOPBACK, await self._port(address))

    async def _port(self, address: str) -> int:
        """The local port for `address`."""
        if address not in self._ports:
            await self._open(address)
        self._ports.move_to_end(address)
        return self._ports[address][0]

    async def _open(self, address: str) -> None:
        def accept() -> SpliceEnd:
            inner = SpliceEnd()
            task = asyncio.create_task(self._carry(inner, address))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
            return inner

        server = await asyncio.get_running_loop().create_server(accept, _LOOPBACK, 0)
        self._ports[address] = server.sockets[0].getsockname()[1], server
        if len(self._ports) > _MOST_PORTS:
            _, (_, oldest) = self._ports.popitem(last=False)
            oldest.close()

    async def _carry(self, inner: SpliceEnd, address: str) -> None:
        outer = None
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                outer = await self._dial(address)
            await carry(outer, inner)
        except (HetnodeError, OSError, TimeoutError) as error:
            log.debug("no connection to %s through the relay: %s", address, error)
        finally:
            inner.abort()
            if outer is not None:
                outer.abort()


async def _answers(place: str) -> bool:
    try:
        async with asyncio.timeout(_TRY_SECONDS):
            _, writer = await asyncio.open_connection(*await address_of(place, "the coordinator"))
    except (HetnodeError, OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
