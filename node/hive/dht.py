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
"""They fit into one atomic write to the control pipe, to which several processes write (PIPE_BUF)."""

_GREET_SECONDS = 20.0
"""Mean time between two greetings of the initial peers. One that was started again knows no other peer."""
_CALL_SECONDS = 5.0


class HostedDHT(DHT):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's DHT, in a process that ends with its parent.

    Args:
        folder: where this node's sockets live, those of its averagers too; removed when this process finds
            its parent dead.
        authorizer: signs and validates every call.
        options: of hivemind.DHT, DHTNode and P2P.
    """

    def __init__(self, folder: Path, authorizer: CertificateAuthorizer, **options: Any) -> None:
        # By default hivemind puts its sockets into /tmp, where all users see them and none removes them.
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
        """Greet the initial peers from time to time, from now on."""
        work = partial(_keep_greeting, addresses=tuple(self.initial_peers))
        self._greeting = self.run_coroutine(work, return_future=True)

    def ban(self, banned: Collection[str], deadline: float) -> None:
        """From now on exactly the peers in `banned` are refused, although they have certificates."""
        newly = frozenset(banned) - self._banned
        unbanned = self._banned - frozenset(banned)
        self._banned = frozenset(banned)
        for peers, out in ((sorted(newly), True), (sorted(unbanned), False)):
            for start in range(0, len(peers), _PEERS_PER_CALL):
                change = partial(_change_bans, peers=peers[start : start + _PEERS_PER_CALL], out=out)
                self.run_coroutine(change, return_future=True).result(deadline)


async def _change_bans(_: DHT, node: DHTNode, *, peers: Sequence[str], out: bool) -> None:
    """In the DHT process."""
    authorizer = node.protocol.authorizer
    if out:
        authorizer.ban(peers)
    else:
        authorizer.unban(peers)


async def _keep_greeting(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    """In the DHT process, until it ends."""
    while addresses:
        await asyncio.sleep(_GREET_SECONDS * random.uniform(0.5, 1.5))
        await _greet(_, node, addresses=addresses)


async def _greet(_: DHT, node: DHTNode, *, addresses: Sequence[str]) -> None:
    """In the DHT process."""
    for address in map(Multiaddr, addresses):
        peer = PeerID.from_base58(address["p2p"])
        with suppress(Exception):  # hivemind and libp2p raise anything here
            await asyncio.wait_for(node.p2p._client.connect(peer, [address]), _CALL_SECONDS)
            if await node.protocol.call_ping(peer) is not None:
                # hivemind doubles the time for which it avoids a peer that did not answer.
                node.blacklist.register_success(peer)
