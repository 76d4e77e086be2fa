"""The DHT process, which also owns p2pd, libp2p's daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.p2p import P2P

from node.net.hive.lifetime import end_with_parent


class HostedDHT(DHT):
    """hivemind's DHT, in a process that ends with its parent.

    Args:
        folder: where this node's sockets live, those of its averagers too; removed when this process finds
            its parent dead.
        options: of hivemind.DHT, DHTNode and P2P.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        # hivemind would put its sockets into /tmp, open to everybody and never to be found again.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        self._folder = folder
        super().__init__(start=False, **options)

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._folder)
        super().run()
