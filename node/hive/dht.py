"""The DHT process, which also owns p2pd, libp2p's daemon."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from node.hive.authorizer import CertificateAuthorizer
from node.hive.lifetime import end_with_parent

_PEERS_PER_CALL = 32
"""Peers of one call: several processes write to the control pipe; only writes up to PIPE_BUF are atomic."""

_GREET_SECONDS = 20.0
"""Mean seconds between two greetings of the initial peers. After a restart they know no other peer."""
_CALL_SECONDS = 5.0


class HostedDHT(DHT):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's DHT, in a process that ends with its parent.

    Args:
        folder: holds all sockets of this node. It is removed when the parent of this process has died.
        authorizer: signs and validates every call.
        options: options of hivemind.DHT, DHTNode and P2P.
    """

    def __init__(self, folder: Path, authorizer: CertificateAuthorizer, **options: Any) -> None:
        # By default hivemind puts its sockets into /tmp: every user sees them, and they are never removed.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        self._folder = folder
        self._banned: frozenset[str] = frozenset()
        super().__init__(start=False, authorizer=authorizer, **options)

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._folder)
        super().run()

    def greet(self, deadline: float) -> None:
        """Introduce this peer to the initial peers again, the coordinator among them."""
        work = partial(_greet, addresses=tuple(self.initial_peers))
        self.run_coroutine(work, return_future=True).result(deadline)

    def keep_greeting(self) -> None:
        """Greet the initial peers regularly until this process ends."""
        work = partial(_keep_greeting, addresses=tuple(self.initial_peers))
        self._greeting = self.run_coroutine(work, return_future=True)

    def ban(self, banned: Collection[str], deadline: float) -> None:
        """Refuse exactly the peers in `banned` from now on, although they have certificates."""
        # Only the difference is sent, because one call carries few peers.
        then, before = frozenset(banned), self._banned
        self._banned = then
        for peers, is_banned in ((sorted(then - before), True), (sorted(before - then), False)):
            for start in range(0, len(peers), _PEERS_PER_CALL):
                some = peers[start : start + _PEERS_PER_CALL]
                work = partial(_change_bans, peers=some, is_banned=is_banned)
                self.run_coroutine(work, return_future=True).result(deadline)


# The functions below run in the DHT process.


async def _change_bans(_: DHT, node: DHTNode, *, peers: Sequence[str], is_banned: bool) -> None:
    banned = node.protocol.authorizer.banned
    (banned.update if is_banned else banned.difference_update)(peers)


async def _keep_greeting(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    while addresses:
        # A random pause, so that the nodes of a run do not all greet at the same moment.
        await asyncio.sleep(_GREET_SECONDS * random.uniform(0.5, 1.5))
        await _greet(_, node, addresses=addresses)


async def _greet(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    for address in map(Multiaddr, addresses):
        peer = PeerID.from_base58(address["p2p"])
        with suppress(Exception):  # hivemind and libp2p raise anything here
            await asyncio.wait_for(node.p2p._client.connect(peer, [address]), _CALL_SECONDS)
            if await node.protocol.call_ping(peer) is not None:
                # hivemind avoids a silent peer for a time that doubles; this ends it at once.
                node.blacklist.register_success(peer)
