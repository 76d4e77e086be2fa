"""A gateway in front of a server: whose connections it lets through, and what of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from protocol.server.gateway import ConnectionLimits, Gateway, listen_on
from protocol.server.refusal_log import RefusalLog

STRANGER, HONEST = "127.0.0.1", "127.0.0.2"


@dataclass
class Echo:
    """A server that sends everything back, and remembers its clients by gRPC's names."""

    port: int = 0
    peers: list[str] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append("ipv4:{}:{}".format(*writer.get_extra_info("peername")))
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@asynccontextmanager
async def behind_gateway(
    port: Callable[[], Awaitable[int]],
    limits: ConnectionLimits | None = None,
    admits: Callable[[str], bool] = lambda _: True,
    refusals: RefusalLog | None = None,
) -> AsyncIterator[Gateway]:
    gateway = Gateway(listen_on("127.0.0.1", 0), limits, admits, refusals)
    gateway.start(port)
    yield gateway
    await gateway.close()


def to(echo: Echo) -> Callable[[], Awaitable[int]]:
    async def port() -> int:
        return echo.port

    return port


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(gateway: Gateway, source: str = STRANGER) -> Ends:
    return await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=(source, 0))


async def echoed(ends: Ends, data: bytes = b"hello") -> bool:
    """Whether `data` comes back; False where the connection is closed instead."""
    reader, writer = ends
    with suppress(OSError, asyncio.IncompleteReadError):
        writer.write(data)
        return await reader.readexactly(len(data)) == data
    return False


async def is_closed(ends: Ends) -> bool:
    try:
        return await ends[0].read(1) == b""
    except ConnectionResetError:
        return True


async def test_bytes_go_both_ways_and_wait_for_slow_readers() -> None:
    async with echoing() as echo, behind_gateway(to(echo)) as gateway:
        reader, writer = await connect(gateway)
        data = bytes(range(256)) * (64 << 10)  # 16 MiB: more than all buffers between the ends hold
        writer.write(data)
        sending = asyncio.create_task(writer.drain())
        assert await reader.readexactly(len(data)) == data
        await sending


def test_the_first_bytes_of_a_server_that_does_not_wait_for_the_client_arrive() -> None:
    def greet(server: socket.socket) -> None:
        for _ in range(100):
            with server.accept()[0] as connection:
                connection.sendall(b"welcome")
                connection.recv(100)

    async def connect_often(port: int) -> None:
        async with behind_gateway(to(Echo(port))) as gateway:
            for _ in range(100):  # whether they came too early was a matter of chance
                reader, writer = await connect(gateway)
                writer.write(b"hello")
                assert await reader.read(7) == b"welcome"
                writer.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        # In a thread: a server on the event loop of the gateway would never be early.
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        uvloop.run(connect_often(server.getsockname()[1]))


async def test_the_server_learns_the_source_of_each_connection() -> None:
    async with echoing() as echo, behind_gateway(to(echo)) as gateway:
        assert await echoed(await connect(gateway, STRANGER))
        assert await echoed(await connect(gateway, HONEST))
        assert [gateway.source_of(peer) for peer in echo.peers] == [STRANGER, HONEST]
        assert gateway.source_of("ipv4:192.0.2.1:9") == "192.0.2.1"


async def test_the_server_can_close_a_connection() -> None:
    async with echoing() as echo, behind_gateway(to(echo)) as gateway:
        ends = await connect(gateway)
        assert await echoed(ends)
        gateway.close_connection(echo.peers[0])
        assert await is_closed(ends)


async def test_a_connection_that_says_nothing_is_closed_and_never_reaches_the_server() -> None:
    async with (
        echoing() as echo,
        behind_gateway(to(echo), ConnectionLimits(first_byte_seconds=0.1)) as gateway,
    ):
        assert await is_closed(await connect(gateway))
        assert echo.peers == []
        assert gateway.connections == 0


async def test_the_open_connections_of_one_source_are_limited_and_others_are_not_affected() -> None:
    async with echoing() as echo, behind_gateway(to(echo), ConnectionLimits(open_each=3)) as gateway:
        open_ones = [await connect(gateway) for _ in range(3)]
        assert all([await echoed(ends) for ends in open_ones])
        assert not await echoed(await connect(gateway))
        assert await echoed(await connect(gateway, HONEST))
        open_ones[0][1].close()
        while not await echoed(await connect(gateway)):
            pass  # the place is free as soon as the gateway has noticed


async def test_many_new_connections_of_one_source_wait_and_more_are_closed() -> None:
    # No turn comes while the test runs.
    limits = ConnectionLimits(burst=1, per_second=1e-6, waiting=2)
    async with echoing() as echo, behind_gateway(to(echo), limits) as gateway:
        served = [await connect(gateway), await connect(gateway, HONEST)]
        assert all([await echoed(ends) for ends in served])
        waiting = [await connect(gateway) for _ in range(2)]
        assert await is_closed(await connect(gateway))
        assert all([await echoed(ends) for ends in served])
        assert len(echo.peers) == 2
        assert gateway.connections == 4
    assert all([await is_closed(ends) for ends in waiting])


async def test_a_waiting_connection_has_its_turn() -> None:
    limits = ConnectionLimits(burst=1, per_second=20.0, waiting=5)
    async with echoing() as echo, behind_gateway(to(echo), limits) as gateway:
        ends = [await connect(gateway) for _ in range(6)]
        assert all([await echoed(each) for each in ends])


async def test_new_connections_go_to_the_newest_server_and_open_ones_stay() -> None:
    async with echoing() as former, echoing() as newest:
        ports = [former.port]

        async def port() -> int:
            return ports[-1]

        async with behind_gateway(port) as gateway:
            first = await connect(gateway)
            assert await echoed(first)
            ports.append(newest.port)
            assert await echoed(await connect(gateway))
            assert await echoed(first)
            assert (len(former.peers), len(newest.peers)) == (1, 1)


async def test_the_sources_of_connections_from_one_port_to_two_servers_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system may give two connections the same port if they go to different ports."""
    loop = asyncio.get_running_loop()
    create_connection, used = loop.create_connection, []

    async def from_used_port(protocol: Callable[[], asyncio.Protocol], host: str, port: int) -> Any:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.bind((host, used[0] if len(used) == 1 else 0))
        used.append(connection.getsockname()[1])
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        return await create_connection(protocol, sock=connection)

    async with echoing() as first, echoing() as second:
        ports = [first.port, second.port]

        async def port() -> int:
            return ports.pop(0)

        async with behind_gateway(port) as gateway:
            one, other = await connect(gateway, HONEST), await connect(gateway, STRANGER)
            monkeypatch.setattr(loop, "create_connection", from_used_port)
            assert await echoed(one)
            assert await echoed(other)
            assert used[0] == used[1], "the second connection has tried the port of the first"
            assert gateway.source_of(first.peers[-1]) == HONEST
            assert gateway.source_of(second.peers[-1]) == STRANGER


async def test_a_server_that_is_gone_closes_the_connection() -> None:
    async def nowhere() -> int:
        raise OSError("stopped")

    async with behind_gateway(nowhere) as gateway:
        assert not await echoed(await connect(gateway))
        assert gateway.connections == 0


async def test_closing_ends_all_connections_and_frees_the_port() -> None:
    async with echoing() as echo:
        async with behind_gateway(to(echo)) as gateway:
            ends = await connect(gateway)
            assert await echoed(ends)
            port = gateway.port
            with pytest.raises(OSError, match="in use"):
                listen_on("127.0.0.1", port)
        assert await is_closed(ends)
        listen_on("127.0.0.1", port).close()


async def test_a_source_that_is_not_admitted_gets_no_byte_and_takes_no_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = RefusalLog(logging.getLogger("test"))
    limits = ConnectionLimits(open_each=1, burst=1, per_second=1e-6)
    async with (
        echoing() as echo,
        behind_gateway(to(echo), limits, lambda source: source == HONEST, refusals) as gateway,
    ):
        for _ in range(20):
            assert await is_closed(await connect(gateway, STRANGER))
        assert await echoed(await connect(gateway, HONEST))
        assert len(echo.peers) == 1
        assert (gateway.refused, gateway.connections) == (20, 1)
        refusals.summarize()
    assert f"refused {STRANGER}: connections from there are not admitted" in caplog.messages
    assert f"10 more refused calls of {STRANGER}" in caplog.messages


async def test_open_connections_of_a_source_end_when_it_is_no_longer_admitted() -> None:
    admitted = {STRANGER, HONEST}
    # The second connection of each source waits for a turn that does not come.
    limits = ConnectionLimits(burst=1, per_second=1e-6)
    async with echoing() as echo, behind_gateway(to(echo), limits, admitted.__contains__) as gateway:
        ends = {source: [await connect(gateway, source) for _ in range(2)] for source in (STRANGER, HONEST)}
        assert await echoed(ends[STRANGER][0])
        assert await echoed(ends[HONEST][0])
        admitted.remove(STRANGER)
        gateway.close_refused()
        assert all([await is_closed(each) for each in ends[STRANGER]])
        assert await echoed(ends[HONEST][0])
        assert gateway.connections == 2
