"""Tells whose connection to p2pd a connection is: p2pd's handshake has proved it, and p2pd can list it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo

from protocol.trust.multiaddress import tcp_place

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05

ListPeers = Callable[[], Awaitable[Iterable[PeerInfo]]]
"""p2pd's connections whose handshake is over."""


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
