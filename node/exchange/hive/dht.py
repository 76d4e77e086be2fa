"""The DHT process, which also owns the public port and, behind it, p2pd, libp2p's daemon."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from node.exchange.hive.authorizer import CertificateAuthorizer
from node.exchange.hive.contacts import Contacts
from node.exchange.hive.lifetime import end_with_parent
from node.exchange.hive.public_port import LOOPBACK, PublicPort, reserve_loopback_port
from protocol.trust.host_port import multiaddress
from protocol.types import PeerId

log = logging.getLogger(__name__)

_NAMES_PER_CALL = 32
"""Peers or sources: several processes write to the control pipe; only writes up to PIPE_BUF are atomic."""

_GREET_SECONDS = 20.0
"""Mean seconds between two greetings of the initial peers. After a restart they know no other peer."""
_CALL_SECONDS = 5.0


class Whom(Enum):
    """The kinds of peers, or of sources, that the DHT process knows by name."""

    PEERS = "they may ask this one; a peer that only dials stays connected to them"
    BANNED = "they are refused although they have certificates"
    MEMBERS = "connections of other peers end after the handshake"
    SOURCES = "connections from elsewhere are closed"


class HostedDHT(DHT):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's DHT, in a process that ends with its parent.

    Args:
        folder: holds all sockets of this node. It is removed when the parent of this process has died.
        authorizer: signs and validates every call.
        listener: the public port, which is closed in this process at its start; None only dials.
        sources: those that are admitted at first.
        stays_connected: keep connections to all admitted peers open, as a peer does that only dials.
        members: ids of the peers that are admitted at first; None admits all.
        options: options of hivemind.DHT, DHTNode and P2P.
    """

    # Both only in the DHT process. A peer has a public port, or contacts, or both.
    _port: PublicPort | None = None
    _contacts: Contacts | None = None

    def __init__(
        self,
        folder: Path,
        authorizer: CertificateAuthorizer,
        listener: socket.socket | None = None,
        sources: Collection[str] = (),
        stays_connected: bool = False,
        members: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        # By default hivemind puts its sockets into /tmp: every user sees them, and they are never removed.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        # p2pd would relay the bytes of strangers. Its option -relay=0 alone does not turn that off, and
        # hivemind passes no other options but those of the mode.
        settings = folder / "p2pd.json"
        settings.write_text('{"Relay": {"Enabled": false}}')
        modes = P2P.DHT_MODE_MAPPING.items()
        P2P.DHT_MODE_MAPPING = {mode: {**flags, "f": settings} for mode, flags in modes}
        self._folder = folder
        self._listener, self._members = listener, members
        first = {Whom.SOURCES: frozenset(sources), Whom.MEMBERS: frozenset(members or ())}
        self._told: dict[Whom, frozenset[str]] = dict.fromkeys(Whom, frozenset()) | first
        self._stays_connected = stays_connected or listener is None
        super().__init__(start=False, authorizer=authorizer, **options)

    def start(self) -> None:
        super().start()
        if self._listener is not None:
            self._listener.close()  # the averagers, which this process forks later, must not hold the port

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._folder)
        if self._listener is None:
            super().run()
            return
        with reserve_loopback_port() as reservation:
            port = reservation.getsockname()[1]
            self.kwargs["host_maddrs"] = [multiaddress(LOOPBACK, port)]
            self._port = PublicPort(self._listener, port, self._told[Whom.SOURCES], self._members)
            super().run()

    def open_port(self, deadline: float) -> None:
        """Accept connections from now on; until then they wait. p2pd must be ready."""
        self._call(_open_port, deadline)

    def greet(self, deadline: float) -> None:
        """Introduce this peer to the initial peers again, the coordinator among them."""
        self._call(partial(_greet, addresses=tuple(self.initial_peers)), deadline)

    def keep_greeting(self) -> None:
        """Greet the initial peers regularly until this process ends."""
        work = partial(_keep_greeting, addresses=tuple(self.initial_peers))
        self._greeting = self.run_coroutine(work, return_future=True)

    def keep_contacts(self) -> None:
        """Stay connected to the peers of Whom.PEERS until this process ends, if asked to."""
        if self._stays_connected:
            self._contact_keeper = self.run_coroutine(_keep_contacts, return_future=True)

    def contact(self, addresses: Mapping[str, str], deadline: float) -> None:
        """Dial each of these peers at this multiaddress; it must be one that stays connected to others."""
        for some in _parts(addresses):
            known = {peer: addresses[peer] for peer in some}
            self._call(partial(_note_addresses, addresses=known), deadline)

    def disconnect(self, peers: Collection[PeerId], deadline: float) -> None:
        """Close the connections to `peers`."""
        for some in _parts(peers):
            self._call(partial(_disconnect, peers=some), deadline)

    def tell(self, whom: Whom, names: Collection[str], deadline: float) -> None:
        """Exactly `names` are of this kind from now on."""
        then, before = frozenset(names), self._told[whom]
        self._told[whom] = then
        # Only the difference is sent, because one call carries few names.
        for added in _parts(then - before):
            self._call(partial(_change, whom=whom, added=added, removed=()), deadline)
        for removed in _parts(before - then):
            self._call(partial(_change, whom=whom, added=(), removed=removed), deadline)

    def _call(self, work: Callable[..., Any], deadline: float) -> None:
        self.run_coroutine(work, return_future=True).result(deadline)


def _parts(names: Collection[str]) -> Iterator[Sequence[str]]:
    """`names` in parts that fit into one call."""
    ordered = sorted(names)
    for start in range(0, len(ordered), _NAMES_PER_CALL):
        yield ordered[start : start + _NAMES_PER_CALL]


# The functions below run in the DHT process.


async def _change(
    dht: HostedDHT, node: DHTNode, *, whom: Whom, added: Sequence[str], removed: Sequence[str]
) -> None:
    if whom is Whom.BANNED:
        node.protocol.authorizer.banned.update(added)
        node.protocol.authorizer.banned.difference_update(removed)
    elif whom is Whom.PEERS and dht._contacts is not None:
        dht._contacts.change(added, removed)
    elif whom is Whom.MEMBERS and dht._port is not None:
        dht._port.change_members(added, removed)
    elif whom is Whom.SOURCES and dht._port is not None:
        dht._port.change(added, removed)


async def _open_port(dht: HostedDHT, node: DHTNode) -> None:
    if dht._port is not None:
        dht._port.open(node.p2p.list_peers)


async def _keep_contacts(dht: HostedDHT, node: DHTNode) -> None:
    dht._contacts = Contacts(node.p2p)
    await dht._contacts.keep()


async def _note_addresses(dht: HostedDHT, _: DHTNode, *, addresses: Mapping[str, str]) -> None:
    if dht._contacts is not None:
        dht._contacts.note_addresses(addresses)


async def _disconnect(_: DHT, node: DHTNode, *, peers: Sequence[str]) -> None:
    for peer in peers:
        with suppress(Exception):  # hivemind and libp2p raise anything here
            async with asyncio.timeout(_CALL_SECONDS):
                await node.p2p._client.disconnect(PeerID.from_base58(peer))


async def _keep_greeting(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    while addresses:
        # A random pause, so that the nodes of a run do not all greet at the same moment.
        await asyncio.sleep(_GREET_SECONDS * random.uniform(0.5, 1.5))
        await _greet(_, node, addresses=addresses)


async def _greet(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    for address in addresses:
        # hivemind would send the id in the address as a CID, and p2pd refuses such an address.
        place, _, peer_id = address.rpartition("/p2p/")
        peer = PeerID.from_base58(peer_id)
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await node.p2p._client.connect(peer, [Multiaddr(place)])
            if await node.protocol.call_ping(peer) is not None:
                # hivemind avoids a silent peer for a time that doubles; this ends it at once.
                node.blacklist.register_success(peer)
        except Exception as error:  # hivemind and libp2p raise anything here
            log.debug("greeting %s failed: %s", address, error)
