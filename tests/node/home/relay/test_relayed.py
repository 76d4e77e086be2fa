"""A node that others cannot dial: who reaches it through a relay, and that the coordinator is told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.home.relay.relayed import RelayedNode
from node.net.addresses import ClaimedPorts
from node.net.link_server import LinkServer
from node.net.reach import AUTO
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.endpoints import split_endpoint
from protocol.trust.names import tls_name
from protocol.trust.reachability import NOT_REACHED, Addresses, Reached
from protocol.types import PeerId, Reachability, RelayAddress, Role
from tests.support.certificates import credentials
from tests.support.relays import address_of, relaying

HOME = PeerId("home")
OPEN = Reached(Reachability.OPEN, endpoint=True, dht=True)


class BusyCoordinator:
    """Takes the addresses of a node that tells them twice."""

    def __init__(self, folder: Path) -> None:
        tls = credentials(HOME)
        files = {"certificate_file": folder / "certificate.pem", "key_file": folder / "key.pem"}
        files["certificate_file"].write_bytes(tls.certificate)
        files["key_file"].write_bytes(tls.key)
        self.credentials: Any = SimpleNamespace(tls=tls, **files)
        self.told: list[Addresses] = []

    async def update_addresses(self, addresses: Addresses) -> Reached:
        self.told.append(addresses)
        if len(self.told) == 1:
            raise HetnodeError(ErrorCode.RATE_LIMITED, "Too many nodes are dialled back.", "Try again.")
        return Reached(Reachability.RELAYED, endpoint=True, dht=True)


class Peer:
    """The DHT peer of a node, and its record."""

    def __init__(self) -> None:
        self.restarts, self.moved = 0, asyncio.Event()

    async def restart(self) -> None:
        self.restarts += 1

    async def move(self, _: str, dht: str) -> None:
        self.moved.set()


async def shows_certificate(address: str) -> bool:
    """Whether the node answers there, with a certificate of its own."""
    tls = ssl.create_default_context(cadata=credentials(HOME).authority.decode())
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    host, port = split_endpoint(address)
    _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=tls_name(HOME))
    writer.transport.abort()
    return True


async def test_a_node_that_listens_at_one_address_is_reached_through_a_relay_and_says_so(
    tmp_path: Path,
) -> None:
    coordinator = BusyCoordinator(tmp_path)
    server = LinkServer(lambda: coordinator.credentials.tls)
    ports = ClaimedPorts("192.168.1.10", "127.0.0.2", 0)
    async with relaying() as relay, AsyncExitStack() as stack:
        await ports.open(server, Role.STAGE, 0, coordinator.credentials, stack)
        node = RelayedNode(HOME, AUTO, cast(Any, coordinator), ports, server, stack)
        node.relays = lambda: [address_of(relay)]
        await node.take()
        assert node.exposure is not None
        assert await shows_certificate(node.exposure.endpoint)
        assert await shows_certificate(node.exposure.dht)
        expected = Addresses(node.exposure.endpoint, node.exposure.dht, relayed=True)
        assert coordinator.told == [expected, expected]
        assert ports.addresses == expected


@pytest.mark.parametrize("takes", [True, False], ids=["by its watch", "by another call"])
async def test_a_node_that_is_not_reached_any_more_takes_a_relay(tmp_path: Path, takes: bool) -> None:
    """Whoever notes it. Its DHT peer starts again unless the caller does that."""
    coordinator = BusyCoordinator(tmp_path)
    ports = ClaimedPorts("192.168.1.10", "127.0.0.2", 0)
    server = LinkServer(lambda: coordinator.credentials.tls)
    peer = Peer()
    async with relaying() as relay, AsyncExitStack() as stack:
        await ports.open(server, Role.STAGE, 0, coordinator.credentials, stack)
        node = RelayedNode(HOME, AUTO, cast(Any, coordinator), ports, server, stack)
        node.relays = lambda: [address_of(relay)]
        ports.note_reached(OPEN)
        await node.take()
        assert not node.is_needed
        keeping = asyncio.create_task(node.keep(cast(Any, peer), cast(Any, peer)))
        stack.callback(keeping.cancel)
        await asyncio.sleep(0)  # it waits now
        ports.note_reached(NOT_REACHED)
        if takes:
            await node.take()
        else:
            await peer.moved.wait()
        assert node.exposure is not None
        assert await shows_certificate(node.exposure.endpoint)
        assert coordinator.told[-1] == Addresses(node.exposure.endpoint, node.exposure.dht, relayed=True)
        assert peer.restarts == (0 if takes else 1)


@pytest.mark.parametrize(("relays", "has"), [((), "has none"), (("192.0.2.7:7800",), "has 192.0.2.7:7800")])
async def test_a_chosen_relay_that_the_run_does_not_have_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, relays: Sequence[str], has: str
) -> None:
    coordinator = BusyCoordinator(tmp_path)
    server = LinkServer(lambda: coordinator.credentials.tls)
    ports = ClaimedPorts("192.168.1.10", "127.0.0.2", 0)
    async with AsyncExitStack() as stack:
        node = RelayedNode(HOME, "192.0.2.1:7800", cast(Any, coordinator), ports, server, stack)
        node.relays = lambda: [RelayAddress(PeerId(each), each) for each in relays]
        await node.take()
    assert f"192.0.2.1:7800 is no relay of this run, which {has}" in caplog.text
