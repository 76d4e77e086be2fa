"""A gRPC server whose certificate changes while clients connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from node.security.channels import open_channel, server_tls
from protocol.server.renewed_server import RenewedServer
from protocol.trust.names import tls_name
from tests.support.certificates import credentials
from tests.support.hostile import handshakes
from tests.support.ports import free_port

CLIENT = credentials("client")


class Shown:
    """What the server is to show, which each renewal changes."""

    def __init__(self) -> None:
        self.now = credentials("server")

    def change(self, name: str = "server") -> None:
        self.now = credentials(name)


def new_server(*options: tuple[str, int]) -> grpc.aio.Server:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Echo": handler}),))
    return server


@asynccontextmanager
async def running(same_port: bool) -> AsyncIterator[tuple[RenewedServer, Shown]]:
    shown = Shown()
    server = RenewedServer(new_server, lambda: server_tls(shown.now), same_port)
    await server.start("127.0.0.1")
    yield server, shown
    await server.stop(0)


def channel_to(port: int, name: str = "server") -> grpc.aio.Channel:
    return open_channel(f"127.0.0.1:{port}", CLIENT, tls_name(name), ())


async def echoed(call: Any) -> bool:
    await call.write(b"hello")
    return bool(await call.read() == b"hello")


@pytest.mark.parametrize("same_port", [True, False])
async def test_a_renewed_certificate_is_shown_and_open_calls_go_on(same_port: bool) -> None:
    async with running(same_port) as (server, shown):
        port = await server.port()
        async with channel_to(port) as channel:
            call = channel.stream_stream("/test/Echo")()
            assert await echoed(call)
            shown.change("renamed")  # another name, to see that it is the new one
            renewed_port = await server.port()
            assert (renewed_port == port) is same_port
            assert await echoed(call)
            async with channel_to(renewed_port, "renamed") as other:
                assert await echoed(other.stream_stream("/test/Echo")())
            assert await echoed(call)
            if not same_port:  # a former server also serves new calls of open connections
                assert await echoed(channel.stream_stream("/test/Echo")())


async def test_the_same_certificate_is_shown_by_the_same_server() -> None:
    async with running(same_port=False) as (server, _):
        assert await server.port() == await server.port()


@pytest.mark.parametrize("same_port", [True, False])
async def test_handshakes_and_renewals_at_the_same_time(same_port: bool) -> None:
    async with running(same_port) as (server, shown):

        async def renew() -> None:
            for _ in range(5):
                shown.change()
                await server.port()

        ends = [
            asyncio.create_task(handshakes(f"127.0.0.1:{await server.port()}", 100, 10, ["127.0.0.1"]))
            for _ in range(2)
        ]
        await renew()
        for end in ends:
            await end
        async with channel_to(await server.port()) as channel:
            assert await echoed(channel.stream_stream("/test/Echo")())


async def test_a_port_in_use_is_an_error_although_its_servers_share_it() -> None:
    port = free_port()
    servers = [RenewedServer(new_server, lambda: server_tls(CLIENT), same_port=True) for _ in range(2)]
    assert await servers[0].start("127.0.0.1", port) == port
    with pytest.raises(OSError, match="in use"):
        await servers[1].start("127.0.0.1", port)
    await servers[0].stop(0)


async def test_a_stopped_server_starts_no_other() -> None:
    async with running(same_port=False) as (server, shown):
        await server.stop(0)
        shown.change()
        with pytest.raises(OSError, match="stopped"):
            await server.port()
