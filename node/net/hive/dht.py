"""The DHT process, which also owns p2pd, libp2p's daemon."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.dht import DHTNode
from hivemind.p2p import P2P

from node.net.hive.authorizer import CertificateAuthorizer
from node.net.hive.lifetime import end_with_parent

_PEERS_PER_CALL = 32
"""As many as fit into one piece of the control pipe, to which several processes write."""


class HostedDHT(DHT):
    """hivemind's DHT, in a process that ends with its parent.

    Args:
        folder: where this node's sockets live, those of its averagers too; removed when this process finds
            its parent dead.
        authorizer: signs and validates every call.
        options: of hivemind.DHT, DHTNode and P2P.
    """

    def __init__(self, folder: Path, authorizer: CertificateAuthorizer, **options: Any) -> None:
        # hivemind would put its sockets into /tmp, open to everybody and never to be found again.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        self._folder = folder
        self._banned: frozenset[str] = frozenset()
        super().__init__(start=False, authorizer=authorizer, **options)

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._folder)
        super().run()

    def keep_out(self, banned: Collection[str], deadline: float) -> None:
        """From now on exactly the peers in `banned` are refused in spite of their certificates."""
        newly = frozenset(banned) - self._banned
        pardoned = self._banned - frozenset(banned)
        self._banned = frozenset(banned)
        for peers, out in ((sorted(newly), True), (sorted(pardoned), False)):
            for start in range(0, len(peers), _PEERS_PER_CALL):
                change = partial(_change_bans, peers=peers[start : start + _PEERS_PER_CALL], out=out)
                self.run_coroutine(change, return_future=True).result(deadline)


async def _change_bans(_: DHT, node: DHTNode, *, peers: Sequence[str], out: bool) -> None:
    """In the DHT process."""
    authorizer = node.protocol.authorizer
    if out:
        authorizer.ban(peers)
    else:
        authorizer.pardon(peers)
