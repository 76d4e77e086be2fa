"""A relay and a peer behind it, on this machine, with real certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from node.home.relay.agent import RelayAgent
from node.security.channels import server_tls
from node.security.credentials import Credentials
from protocol.relay.destinations import Destinations
from protocol.relay.exposed import RelayedService
from protocol.relay.server import RelayLimits, RelayServer
from protocol.server.gateway import Gateway, listen_on
from protocol.types import PeerId, RelayAddress
from tests.support.certificates import credentials

RELAY = PeerId("the-relay")


@asynccontextmanager
async def relaying(
    limits: RelayLimits | None = None,
    port: int = 0,
    ports: range = range(0),
    destinations: Destinations | None = None,
) -> AsyncIterator[RelayServer]:
    shown = credentials(RELAY)
    limits = limits or RelayLimits()
    gateway = Gateway(listen_on("127.0.0.1", port), limits.connections)
    relay = RelayServer(gateway, RELAY, lambda: server_tls(shown), ports, limits, None, destinations)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


def address_of(relay: RelayServer) -> RelayAddress:
    return RelayAddress(RELAY, f"127.0.0.1:{relay.port}")


@asynccontextmanager
async def behind(
    relay: RelayAddress,
    peer: str,
    port: int,
    shown: Callable[[], Credentials] | None = None,
) -> AsyncIterator[RelayAgent]:
    """An agent of `peer`, whose links and DHT peer are both at the local `port`; it is connected."""
    own = credentials(peer)
    local = ("127.0.0.1", port)
    servers = {service: lambda: local for service in RelayedService}
    agent = RelayAgent(relay, PeerId(peer), shown or (lambda: own), servers)
    keeping = asyncio.create_task(agent.keep())
    try:
        await agent.connected()
        yield agent
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


@asynccontextmanager
async def serving(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[int]:
    """A local TCP server; its port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
