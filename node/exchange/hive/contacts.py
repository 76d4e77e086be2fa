"""Keeps a peer that accepts no connections connected to those that may ask it for something.

Calls travel in both directions of a connection, whichever end opened it. Runs in the DHT process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NoReturn

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from node.exchange.payload_exchange import own_order
from protocol.server.backoff import pause_after

log = logging.getLogger(__name__)

MOST_CONTACTS = 128
"""p2pd closes idle connections above 512, and the tables of home routers are small."""
_CHECK_SECONDS = 2.0
_DIAL_SECONDS = 5.0
_DIALS_AT_ONCE = 8
_LONGEST_PAUSE = 120.0  # between two attempts to reach the same peer


class Contacts:
    """The peers to which this one stays connected. Belongs to one event loop."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p, self._me = p2p, p2p.peer_id.to_base58()
        self._wanted: frozenset[str] = frozenset()
        self._failures: dict[str, tuple[int, float]] = {}  # how many in a row, and when to try again
        self._addresses: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._dials = asyncio.Semaphore(_DIALS_AT_ONCE)

    def change(self, added: Iterable[str], removed: Iterable[str]) -> None:
        """Change the peers that are wanted. Of more than MOST_CONTACTS every peer chooses others."""
        self._wanted = self._wanted.difference(removed).union(added) - {self._me}
        self._failures = {peer: each for peer, each in self._failures.items() if peer in self._wanted}
        self._addresses = {peer: each for peer, each in self._addresses.items() if peer in self._wanted}
        self._changed.set()

    def note_addresses(self, addresses: Mapping[str, str]) -> None:
        """Dial those of these peers that are wanted at this multiaddress, and at once if it is new."""
        for peer in self._wanted & addresses.keys():
            if self._addresses.get(peer) != addresses[peer]:
                self._addresses[peer] = addresses[peer]
                self._failures.pop(peer, None)
                self._changed.set()

    async def keep(self) -> NoReturn:
        """Open what is missing, until cancelled. A peer that cannot be reached is tried ever more seldom."""
        while True:
            self._changed.clear()
            try:
                await self._open_missing()
            except Exception as error:  # hivemind and libp2p raise anything here
                log.debug("cannot see to the connections of this peer: %r", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._changed.wait()

    async def _open_missing(self) -> None:
        wanted = own_order(self._wanted, self._me)[:MOST_CONTACTS]
        if not wanted:
            return
        connected = {info.peer_id.to_base58() for info in await self._p2p.list_peers()}
        now = asyncio.get_running_loop().time()
        missing = [peer for peer in wanted if peer not in connected and self._is_due(peer, now)]
        await asyncio.gather(*map(self._open, missing))

    def _is_due(self, peer: str, now: float) -> bool:
        return now >= self._failures.get(peer, (0, now))[1]

    async def _open(self, peer: str) -> None:
        async with self._dials:
            try:
                # Without addresses p2pd asks the other peers where this one is.
                known = [Multiaddr(self._addresses[peer])] if peer in self._addresses else ()
                async with asyncio.timeout(_DIAL_SECONDS):
                    await self._p2p._client.connect(PeerID.from_base58(peer), known)
            except Exception as error:  # as above
                failed = self._failures.get(peer, (0, 0.0))[0] + 1
                pause = pause_after(failed, _CHECK_SECONDS, _LONGEST_PAUSE)
                self._failures[peer] = (failed, asyncio.get_running_loop().time() + pause)
                log.debug("no connection to %s: %r", peer, error)
            else:
                self._failures.pop(peer, None)
