"""The coordinator's own relay, for nodes that accept no connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from coordinator.api.public_ports import RelayPorts
from coordinator.authority import Authority, ServerCertificate
from coordinator.run.command_loop import RUN_TOPIC, CommandLoop, Stopped
from coordinator.run.state.state import State
from protocol.relay.destinations import Destinations
from protocol.relay.server import RelayLimits, RelayServer
from protocol.server.renewed_server import ServerTls
from protocol.types import PeerId, RelayAddress


@dataclass(frozen=True)
class OwnRelay:
    """The coordinator's relay, and its address for nodes."""

    server: RelayServer
    address: RelayAddress

    async def start(self, command_loop: CommandLoop, stack: AsyncExitStack) -> None:
        """Carry connections for the peers of the run until `stack` is closed."""
        await self.server.start()
        stack.push_async_callback(self.server.stop)
        stack.callback(asyncio.create_task(self._keep_refusing(command_loop)).cancel)

    async def _keep_refusing(self, command_loop: CommandLoop) -> None:
        """End what is carried for peers that are excluded from the run."""
        known = frozenset[PeerId]()

        def changed(state: State) -> frozenset[PeerId] | None:
            return None if state.excluded == known else state.excluded

        with suppress(Stopped):
            while True:
                known = await command_loop.until(RUN_TOPIC, changed)
                self.server.refuse(known)


def own_relay(
    ports: RelayPorts,
    peer: PeerId,
    authority: Authority,
    destinations: Destinations,
    sharing: Mapping[str, Callable[[], Awaitable[int]]],
) -> OwnRelay:
    """The relay of the coordinator, which is `peer`. Not started yet. See RelayServer for the arguments."""
    certificate = ServerCertificate(authority, peer)

    def tls() -> ServerTls:
        return ServerTls(*certificate.pair(), authority.pem)

    # Each stream takes a second connection, by which the node dials back.
    limits = RelayLimits(ports.gateway.limits, streams=ports.gateway.limits.open_in_all // 2)
    server = RelayServer(ports.gateway, peer, tls, ports.dht, limits, sharing, destinations)
    return OwnRelay(server, RelayAddress(peer, ports.address))
