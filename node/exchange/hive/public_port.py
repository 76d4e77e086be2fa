"""The public port of a peer: a gateway before p2pd, libp2p's daemon, which listens on loopback alone.

p2pd knows no certificates and cannot refuse connections: it answers libp2p's own calls to everyone, and holds
large calls in memory before anyone can refuse them. So only the sources of members reach it, and only members
get further than p2pd's handshake, which proves who they are.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.admitted_sources import AdmittedSources
from protocol.server.descriptors import raise_descriptor_limit
from protocol.server.gateway import ConnectionLimits, Gateway, listen_on
from protocol.server.interfaces import interface_addresses
from protocol.server.limits import FairShare
from protocol.server.refusal_log import RefusalLog
from protocol.server.splice import SpliceEnd, carry
from protocol.trust.host_port import host_port, multiaddress, tcp_place

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SPARE_DESCRIPTORS, _OPEN_AT_LEAST = 256, 32
"""Open files of the DHT process that are no connections of the port."""
# A peer has one connection to another one, or a few while both dial; many peers may share an address.
_BURST, _PER_SECOND, _WAITING = 256, 50.0, 256
_OPEN_EACH, _OPEN_IN_ALL = 512, 2048
_UNKNOWN_EACH, _UNKNOWN_IN_ALL = 64, 256
"""Connections whose peer is not known to be a member yet. p2pd holds some kilobytes for each."""
_HANDSHAKE_BYTES = 320
"""What each end may send before the peer is known. libp2p's Noise handshake takes 250 bytes of the dialler.

With more, p2pd would learn the addresses of a stranger, and dial it.
"""
_LOOK_SECONDS = 0.05
_HANDSHAKE_SECONDS = 10.0
"""Also for the coordinator to tell of a new member, which may dial at once."""


ListPeers = Callable[[], Awaitable[Iterable[PeerInfo]]]
"""p2pd's connections whose handshake is over."""


class PublicPort:
    """Accepts connections to p2pd from the admitted sources. Belongs to one event loop.

    Args:
        listener: from :func:`listen`.
        p2pd_port: the loopback port of p2pd.
        members: ids of the peers whose connections are carried further than the handshake; None carries all.
    """

    def __init__(
        self,
        listener: socket.socket,
        p2pd_port: int,
        sources: Collection[str],
        members: Collection[str] | None = None,
    ) -> None:
        self._p2pd_port = p2pd_port
        self._admitted = AdmittedSources(sources)
        self._members = None if members is None else set(members)
        self._changed = asyncio.Event()  # of the members; each change has its own
        self._unknown = FairShare(_UNKNOWN_EACH, _UNKNOWN_IN_ALL)
        self._carried: dict[SpliceEnd, str] = {}  # the peer of each connection
        self._refusals = RefusalLog(log)
        # A connection takes two of them. Where there are too few for the usual number, some may fail.
        most = max(_OPEN_AT_LEAST, (raise_descriptor_limit() - _SPARE_DESCRIPTORS) // 2)
        limits = ConnectionLimits(_BURST, _PER_SECOND, _WAITING, _OPEN_EACH, min(_OPEN_IN_ALL, most))
        self._gateway = Gateway(listener, limits, self._admitted.admits, self._refusals)

    def open(self, list_peers: ListPeers) -> None:
        """Accept connections.

        Args:
            list_peers: asks p2pd whose connections it has.
        """
        self._connected = ConnectedPeers(list_peers)
        self._gateway.start_routing(self._carry)

    def change(self, added: Collection[str], removed: Collection[str]) -> None:
        """Change the admitted sources. Connections of those that are not admitted any more are closed."""
        self._admitted.change(added, removed)
        if removed:
            self._gateway.close_refused()

    def change_members(self, added: Collection[str], removed: Collection[str]) -> None:
        """Change the members; before the first change all peers are. Connections of others are closed."""
        self._members = (self._members or set()).difference(removed).union(added)
        for client, peer in tuple(self._carried.items()):
            if peer not in self._members:
                client.abort()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carry(self, client: SpliceEnd) -> None:
        """Carry one connection to its end, beyond its handshake only if its peer is a member."""
        if not self._unknown.take(client.source):
            return
        server = SpliceEnd()
        try:
            try:
                async with asyncio.timeout(_HANDSHAKE_SECONDS):
                    peer = await self._begin(client, server)
                    while not self._admits(peer):
                        await self._changed.wait()
            finally:
                self._unknown.release(client.source)
            self._carried[client] = peer
            await carry(client, server)
        finally:
            server.abort()
            self._carried.pop(client, None)

    def _admits(self, peer: str) -> bool:
        return self._members is None or peer in self._members

    async def _begin(self, client: SpliceEnd, server: SpliceEnd) -> str:
        """Carry the handshake of one connection. Returns the id of the peer that it proves."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: server, LOOPBACK, self._p2pd_port)
        port = transport.get_extra_info("sockname")[1]
        known = asyncio.create_task(self._connected.peer_at(port))
        copies = [asyncio.create_task(_copy(client, server, _HANDSHAKE_BYTES))]
        copies += [asyncio.create_task(_copy(server, client, _HANDSHAKE_BYTES))]
        try:
            await asyncio.wait((known, *copies), return_when=asyncio.FIRST_COMPLETED)
            if not known.done():
                raise ConnectionResetError("closed before its peer was known")
            return known.result()
        finally:
            for each in (known, *copies):
                each.cancel()
            await asyncio.wait((known, *copies))


class ConnectedPeers:
    """Waits for the end of handshakes with p2pd. Belongs to one event loop."""

    def __init__(self, list_peers: ListPeers) -> None:
        self._list_peers = list_peers
        self._waiting: dict[int, asyncio.Future[str]] = {}  # by the port of the other end
        self._looking: asyncio.Task[None] | None = None

    async def peer_at(self, port: int) -> str:
        """Wait until p2pd knows the peer that has connected from a loopback port. Returns its id."""
        self._waiting[port] = found = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            peer: str = await found
            return peer
        finally:
            del self._waiting[port]

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(_LOOK_SECONDS)  # p2pd tells of no change
            try:
                listed = tuple(await self._list_peers())
            except Exception as error:  # hivemind raises anything here; without p2pd this process ends soon
                log.debug("p2pd lists no peers: %r", error)
                continue
            for each in listed:
                found = self._waiting.get(_port_of(each))
                if found is not None and not found.done():
                    found.set_result(each.peer_id.to_base58())


def _port_of(peer: PeerInfo) -> int:
    """The TCP port of the other end of a connection; 0 if it has none."""
    place = tcp_place(str(peer.addrs[0])) if peer.addrs else None
    return place[1] if place else 0


async def _copy(source: SpliceEnd, sink: SpliceEnd, most: int) -> None:
    """Copy `most` bytes and no more, until cancelled or until `source` is closed."""
    with suppress(ConnectionResetError):
        while most:
            await source.more()
            data = bytes(source.first[:most])
            del source.first[: len(data)]
            most -= len(data)
            sink.write(data)
        await asyncio.wait({source.lost})


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a port of this machine; port 0 takes a free one.

    Raises HetnodeError: PORT_IN_USE; BAD_ADDRESS.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"{host_port(host, port)} is in use by another process.",
                "Choose another port for the DHT, or 0 for a free one.",
            ) from None
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"This machine cannot listen on '{host}': {error}.",
            "Give an address of one of this machine's interfaces, or :: for all of them.",
        ) from None


def reserve_loopback_port() -> socket.socket:
    """A socket that keeps a free loopback port for p2pd until it is closed."""
    reservation = socket.socket()
    # libp2p sets this option too. So it can bind the port, and no other process can get it before.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((LOOPBACK, 0))
    return reservation


def announced_addresses(
    listener: socket.socket, advertise: str | None, advertise_port: int = 0
) -> tuple[str, ...]:
    """The multiaddresses under which others reach `listener`.

    Args:
        advertise: a host name or an address. An address of this machine is announced with its public ones of
            the other version of IP, which no peer has tried. None takes the address on which `listener`
            listens, or those of all interfaces; loopback addresses only if there are no others.
        advertise_port: 0 takes the port on which `listener` listens.
    """
    host, port, *_ = listener.getsockname()
    if advertise is not None:
        hosts = [advertise, *_of_other_version(advertise, listener)]
    elif not ipaddress.ip_address(host).is_unspecified:
        hosts = [host]
    else:
        families = (4, 6) if listener.family == socket.AF_INET6 else (4,)
        own = [each for each in interface_addresses() if each.version in families]
        hosts = [str(each.ip) for each in own if not each.is_loopback] or [LOOPBACK]
    return tuple(multiaddress(each, advertise_port or port) for each in hosts)


def _of_other_version(advertise: str, listener: socket.socket) -> list[str]:
    """The public addresses at which `listener` listens besides `advertise`, if that is this machine's own."""
    own = [each.ip for each in interface_addresses()]
    given = next((each for each in own if str(each) == advertise), None)
    if given is None or listener.getsockname()[0] != "::":
        return []
    return [str(each) for each in own if each.version != given.version and each.is_global]
