"""Four nodes with the real transport that know each other through the DHT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hive_nodes import REFUSED, Node, start_node


@dataclass(frozen=True)
class HiveNetwork:
    """The bootstrap peer hosts no stage, alice and bob host stages 0 and 1, carol hosts stage 1.

    Carol's disk takes no payloads, so hers stay in memory, and she sends them without a check of their hash.
    """

    bootstrap: Node
    alice: Node
    bob: Node
    carol: Node

    async def admit(self, *others: Node, banned: Sequence[Node] = ()) -> None:
        """Tell alice, bob and carol that the plan contains them and `others`."""
        members = (self.alice, self.bob, self.carol)
        peers = [node.identity.peer for node in (*members, *others)]
        for node in members:
            await node.hivemind.admit(peers, [node.identity.peer for node in banned])


@asynccontextmanager
async def open_network(folder: Path) -> AsyncIterator[HiveNetwork]:
    async with AsyncExitStack() as stack:
        bootstrap = await start_node(folder, "bootstrap", ())
        stack.push_async_callback(bootstrap.hivemind.close)
        addresses = bootstrap.hivemind.addresses
        starting = [
            asyncio.create_task(start_node(folder, name, stages, addresses, payloads=payloads))
            for name, stages, payloads in (
                ("alice", (0, 1), None),
                ("bob", (0, 1), None),
                ("carol", (1,), REFUSED),
            )
        ]
        nodes = await asyncio.gather(*starting)
        for node in nodes:
            stack.push_async_callback(node.hivemind.close)
        network = HiveNetwork(bootstrap, *nodes)
        await network.admit()
        yield network
