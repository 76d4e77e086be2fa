"""A node whose network lets out connections to its relay alone: what it opens through the relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import pytest

from node.home.relay.agent import RelayAgent
from node.home.relay.tunnels import Tunnels
from node.security.channels import open_channel
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.relay.destinations import Destinations
from protocol.relay.server import RelayServer
from protocol.trust.names import tls_name
from protocol.types import PeerId
from protocol.wire.rpc_errors import error_from_rpc
from tests.support.certificates import credentials
from tests.support.ports import free_port
from tests.support.relays import RELAY, address_of, behind, relaying, serving

HOME = "home"


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """The port of another member, on the machine of the relay."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    async with serving(echo) as port:
        yield port


def reaching(*ports: int) -> Destinations:
    return Destinations(tuple, (), ports)


@asynccontextmanager
async def tunnels_of(agent: RelayAgent) -> AsyncIterator[Tunnels]:
    tunnels = Tunnels(agent.dial, lambda: agent.relay.endpoint)
    try:
        yield tunnels
    finally:
        tunnels.close()


async def answer_at(address: str) -> bytes:
    """What comes back through `address`; nothing if it is closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"hello")
        return await reader.read(5)
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def test_tunnels_are_needed_where_no_first_dht_peer_answers() -> None:
    async with echoing() as port, relaying() as relay, behind(address_of(relay), HOME, port) as agent:
        open_one, closed = (f"/ip4/127.0.0.1/tcp/{each}/p2p/Qm1" for each in (port, free_port()))
        async with tunnels_of(agent) as tunnels:
            for known in ((), (open_one,), (closed, open_one)):
                await tunnels.look(known)
                assert not tunnels.is_needed
                assert await tunnels.through(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
                assert await tunnels.first_peers(known) == known
            await tunnels.look((closed,))
            assert tunnels.is_needed
            (instead,) = await tunnels.first_peers((closed,))
            assert instead.startswith("/ip4/127.0.0.1/tcp/")
            assert instead.endswith("/p2p/Qm1")
            assert instead != closed
            assert await tunnels.through(agent.relay.endpoint) == agent.relay.endpoint
            assert await tunnels.through("") == ""


async def test_connections_go_through_the_relay_also_after_it_was_restarted() -> None:
    async with echoing() as member, AsyncExitStack() as stack:
        async with relaying(destinations=reaching(member)) as relay:
            own_port = relay.port
            agent = await stack.enter_async_context(behind(address_of(relay), HOME, member))
            tunnels = await stack.enter_async_context(tunnels_of(agent))
            tunnels.is_needed = True
            place = await tunnels.through(f"127.0.0.1:{member}")
            assert place != f"127.0.0.1:{member}"
            assert await tunnels.through(f"127.0.0.1:{member}") == place
            assert [await answer_at(place) for _ in range(3)] == [b"hello"] * 3
        async with relaying(port=own_port, destinations=reaching(member)):
            while True:
                if await answer_at(place) == b"hello":
                    break
                await asyncio.sleep(0.02)


async def test_what_the_relay_does_not_dial_is_closed() -> None:
    async with (
        echoing() as other,
        relaying(destinations=reaching()) as relay,
        behind(address_of(relay), HOME, other) as agent,
        tunnels_of(agent) as tunnels,
    ):
        tunnels.is_needed = True
        assert await answer_at(await tunnels.through(f"127.0.0.1:{other}")) == b""
        with pytest.raises(HetnodeError, match="own machine") as error:
            await agent.dial(f"127.0.0.1:{other}")
        assert error.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE


async def test_nothing_answers_at_the_address() -> None:
    nobody = free_port()
    async with (
        relaying(destinations=reaching(nobody)) as relay,
        behind(address_of(relay), HOME, nobody) as agent,
    ):
        with pytest.raises(HetnodeError) as error:
            await agent.dial(f"127.0.0.1:{nobody}")
        assert error.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE


async def test_a_ban_ends_what_the_peer_has_opened() -> None:
    async with (
        echoing() as member,
        relaying(destinations=reaching(member)) as relay,
        behind(address_of(relay), HOME, member) as agent,
        tunnels_of(agent) as tunnels,
    ):
        tunnels.is_needed = True
        host, _, port = (await tunnels.through(f"127.0.0.1:{member}")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        relay.refuse({PeerId(HOME)})
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("caller", "named", "code"),
    [
        ("stranger", HOME, ErrorCode.CERTIFICATE_REFUSED),
        ("stranger", "stranger", ErrorCode.NEIGHBOUR_UNREACHABLE),
    ],
)
async def test_only_a_peer_behind_the_relay_may_dial_in_its_own_name(
    caller: str, named: str, code: ErrorCode
) -> None:
    async with (
        echoing() as member,
        relaying(destinations=reaching(member)) as relay,
        behind(address_of(relay), HOME, member),
    ):
        assert await _refusal(relay, caller, named, member) is code


async def _refusal(relay: RelayServer, caller: str, named: str, port: int) -> ErrorCode | None:
    async with open_channel(f"127.0.0.1:{relay.port}", credentials(caller), tls_name(RELAY), ()) as channel:
        try:
            await pb_grpc.RelayStub(channel).Dial(pb.DialRequest(peer=named, address=f"127.0.0.1:{port}"))
        except grpc.aio.AioRpcError as error:
            refusal = error_from_rpc(error)
            return refusal.code if refusal else None
    return None
