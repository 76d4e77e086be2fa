"""A peer behind a relay: who reaches it, what the relay sees, and what ends its connections."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from tempfile import NamedTemporaryFile

import pytest

from node.net.link import LinkLimits, LinkMember
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from node.security.credentials import Credentials
from protocol.relay.exposed import PeerLimits
from protocol.relay.greeting import TOKEN_BYTES, dial_back
from protocol.relay.server import RelayLimits, RelayServer
from protocol.server.admitted_sources import AdmittedSources
from protocol.trust.names import tls_name
from protocol.trust.rate_limit import ByteRate
from protocol.types import DType, Frame, FrameId, FrameKind, PeerId, TensorHeader
from protocol.wire.framing import CHUNK_BYTES
from tests.support.certificates import authority, credentials
from tests.support.relays import address_of, behind, relaying, serving

HOME, CALLER = "home", "caller"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def tls(shown: Credentials, is_server: bool = False) -> ssl.SSLContext:
    """Shows a certificate of the run, and demands one of the other end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=shown.authority.decode())
    with NamedTemporaryFile() as pair:
        pair.write(shown.key + shown.certificate)
        pair.flush()
        context.load_cert_chain(pair.name)
    return context


@asynccontextmanager
async def echoing_home(port: int = 0) -> AsyncIterator[int]:
    """The port of a TLS server with the certificate of HOME, which sends everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", port, ssl=tls(credentials(HOME), is_server=True))
    async with server:
        yield server.sockets[0].getsockname()[1]


async def call(relay: RelayServer, name: str = HOME, source: str = "127.0.0.1") -> Ends:
    return await asyncio.open_connection(
        "127.0.0.1",
        relay.port,
        ssl=tls(credentials(CALLER)),
        server_hostname=tls_name(name),
        local_addr=(source, 0),
    )


async def echoed(ends: Ends, data: bytes = b"hello") -> bool:
    reader, writer = ends
    with suppress(OSError, asyncio.IncompleteReadError):
        writer.write(data)
        return await reader.readexactly(len(data)) == data
    return False


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except OSError:
        return True


async def reaches(relay: RelayServer, name: str = HOME, source: str = "127.0.0.1") -> bool:
    try:
        ends = await call(relay, name, source)
    except OSError:
        return False
    try:
        return await echoed(ends)
    finally:
        ends[1].transport.abort()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(0.02)


async def test_bytes_go_both_ways_and_wait_for_slow_readers() -> None:
    async with relaying() as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        reader, writer = await call(relay)
        data = bytes(range(256)) * (32 << 10)  # 8 MiB: more than all buffers between the ends hold
        writer.write(data)
        sending = asyncio.create_task(writer.drain())
        assert await reader.readexactly(len(data)) == data
        await sending
        writer.close()


async def test_a_link_of_two_peers_through_the_relay() -> None:
    upper, lower = (
        LinkMember("run", "h", PeerId(CALLER), 0, 0),
        LinkMember("run", "h", PeerId(HOME), 0, 1),
    )
    limits = LinkLimits(frame_bytes=8 * CHUNK_BYTES, waiting_frames=4)
    server = LinkServer(lambda: credentials(HOME))
    port = await server.start("127.0.0.1", 0)
    async with relaying() as relay, behind(address_of(relay), HOME, port):
        one, other = await asyncio.gather(
            dial(f"127.0.0.1:{relay.port}", upper, lower, limits, 10, credentials(CALLER)),
            server.accept(lower, upper, limits, 10),
        )
        payload = bytes(range(256)) * 4096
        header = (TensorHeader("t", DType.U8, (len(payload),)),)
        frame = Frame(FrameId(1, 1, 0, 1, FrameKind.FORWARD), header, payload)
        await one.send(frame, 10)
        assert await other.take(frame.id, 10) == frame
        await one.close()
        await other.close()
    await server.close()


async def test_the_dht_peer_has_a_port_of_its_own_whose_server_may_speak_first() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        writer.close()

    async with relaying() as relay, serving(greet) as port, behind(address_of(relay), HOME, port) as agent:
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.dht_port)
        writer.write(b"x")
        assert await reader.read() == b"welcome"
        writer.close()


async def test_the_dht_peer_is_reached_from_admitted_sources_alone() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)

    async with relaying() as relay, serving(echo) as port, behind(address_of(relay), HOME, port) as agent:

        async def call_from(source: str) -> Ends:
            return await asyncio.open_connection("127.0.0.1", agent.dht_port, local_addr=(source, 0))

        agent.admit(AdmittedSources({"127.0.0.2", "127.0.0.3"}))
        member, other, stranger = [await call_from(f"127.0.0.{number}") for number in (2, 3, 4)]
        assert await echoed(member)
        assert await echoed(other)
        stranger[1].write(b"hello")
        agent.admit(AdmittedSources({"127.0.0.2"}))
        assert await is_closed(other[0])
        assert await echoed(member)
        member[1].transport.abort()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # an answer would be there by now, as the member's was
                await stranger[0].read(1)
        stranger[1].transport.abort()


async def test_the_relay_sees_only_ciphertext() -> None:
    secret, seen = b"a secret of the run " * 8, bytearray()
    async with relaying() as relay, echoing_home() as port, behind(address_of(relay), HOME, port):

        async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream = await asyncio.open_connection("127.0.0.1", relay.port)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(1 << 16):
                    seen.extend(data)
                    sink.write(data)

            with suppress(OSError):
                await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))

        async with serving(watch) as watched:
            ends = await asyncio.open_connection(
                "127.0.0.1", watched, ssl=tls(credentials(CALLER)), server_hostname=tls_name(HOME)
            )
            assert await echoed(ends, secret)
            ends[1].transport.abort()
    assert len(seen) > 2 * len(secret)
    assert tls_name(HOME).encode() in seen
    assert secret[:20] not in seen


async def test_a_restarted_relay_is_found_again_with_the_same_ports() -> None:
    async with echoing_home() as port, AsyncExitStack() as stack:
        async with relaying() as relay:
            own_port = relay.port
            agent = await stack.enter_async_context(behind(address_of(relay), HOME, port))
            dht_port = agent.dht_port
            assert await reaches(relay)
        async with relaying(port=own_port) as again:
            await until(lambda: reaches(again))
            assert agent.dht_port == dht_port


async def test_the_next_control_connection_of_a_peer_keeps_its_connections() -> None:
    async with relaying() as relay, echoing_home() as port, behind(address_of(relay), HOME, port) as first:
        ends = await call(relay)
        assert await echoed(ends)
        async with behind(address_of(relay), HOME, port) as next_one:
            assert await echoed(ends)
            assert (len(relay.exposed), next_one.dht_port) == (1, first.dht_port)
        ends[1].transport.abort()


async def test_an_expired_certificate_ends_the_connections() -> None:
    short = credentials(HOME, replace(authority(), seconds=3.0))
    async with (
        relaying() as relay,
        echoing_home() as port,
        behind(address_of(relay), HOME, port, lambda: short),
    ):
        reader, _ = ends = await call(relay)
        assert await echoed(ends)
        assert await is_closed(reader)
        assert time.time() >= short.expires
        assert not await reaches(relay)


async def test_a_ban_ends_the_connections_and_refuses_new_ones() -> None:
    async with relaying() as relay, echoing_home() as port, behind(address_of(relay), HOME, port) as agent:
        reader, _ = ends = await call(relay)
        assert await echoed(ends)
        relay.refuse({PeerId(HOME)})
        assert await is_closed(reader)
        assert not await reaches(relay)
        with pytest.raises(OSError, match=r"Connect call failed|refused"):
            await asyncio.open_connection("127.0.0.1", agent.dht_port)
        relay.refuse(frozenset())
        await until(lambda: reaches(relay))


async def test_a_peer_that_is_gone_is_carried_no_longer() -> None:
    limits = RelayLimits(peer=PeerLimits(absence_seconds=0.2))
    async with relaying(limits) as relay, echoing_home() as port:
        async with behind(address_of(relay), HOME, port):
            assert await reaches(relay)

        async def is_forgotten() -> bool:
            return len(relay.exposed) == 0

        await until(is_forgotten)
        assert not await reaches(relay)


@pytest.mark.parametrize(
    "first", [dial_back(bytes(TOKEN_BYTES)), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x3f\xff"]
)
async def test_strangers_get_nothing(first: bytes) -> None:
    async with relaying() as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        assert not await reaches(relay, "nobody")
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(first)
        assert await is_closed(reader)
        assert await reaches(relay)


async def test_a_control_connection_needs_a_certificate_of_the_run_and_of_that_peer() -> None:
    async with relaying() as relay, echoing_home() as port:
        other = credentials("other")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), behind(address_of(relay), HOME, port, lambda: other):
                pass
        assert len(relay.exposed) == 0


async def test_a_token_is_good_for_one_time() -> None:
    tokens: list[bytes] = []
    async with relaying() as relay, echoing_home() as home:

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Between the agent and the relay."""
            ends = await asyncio.open_connection("127.0.0.1", relay.port)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(1 << 16):
                    if data.startswith(b"hetnode-relay-1\n"):
                        tokens.append(data[: 16 + TOKEN_BYTES])
                    sink.write(data)

            with suppress(OSError):
                await asyncio.gather(copy(reader, ends[1]), copy(ends[0], writer))

        async with serving(record) as port:
            between = address_of(relay)
            between = type(between)(between.peer, f"127.0.0.1:{port}")
            async with behind(between, HOME, home):
                assert await reaches(relay)
                reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
                writer.write(tokens[0])
                assert await is_closed(reader)


async def test_one_source_cannot_take_all_connections_of_a_peer() -> None:
    limits = RelayLimits(peer=PeerLimits(streams=8, streams_of_source=3))
    async with relaying(limits) as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        greedy = [await call(relay, source="127.0.0.2") for _ in range(3)]
        assert all([await echoed(each) for each in greedy])
        assert not await reaches(relay, source="127.0.0.2")
        assert await reaches(relay, source="127.0.0.3")
        greedy[0][1].transport.abort()
        await until(lambda: reaches(relay, source="127.0.0.2"))


async def test_new_connections_of_one_source_for_a_peer_are_limited() -> None:
    limits = RelayLimits(peer=PeerLimits(source_calls_at_once=2, source_calls_per_minute=1e-6))
    async with relaying(limits) as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        assert [await reaches(relay, source="127.0.0.2") for _ in range(4)] == [True, True, False, False]
        assert await reaches(relay, source="127.0.0.3")


async def test_connections_that_say_nothing_leave_room_for_others() -> None:
    limits = RelayLimits(greetings_of_source=4, greetings=16)
    async with relaying(limits) as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        slow = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", relay.port, local_addr=("127.0.0.2", 0))
            writer.write(b"\x16\x03\x01")
            slow.append(writer)
        assert await reaches(relay, source="127.0.0.3")
        for writer in slow:
            writer.transport.abort()


def test_the_rate_of_a_peer() -> None:
    rate = ByteRate(1000.0, burst=0.5)
    assert rate.take(500, 10.0) == 0.0
    assert rate.take(500, 10.0) == pytest.approx(0.5)
    assert rate.take(250, 10.5) == pytest.approx(0.25)
    assert rate.take(500, 60.0) == 0.0


async def test_a_flood_through_the_relay_is_slowed_down_and_arrives_whole() -> None:
    limits = RelayLimits(peer=PeerLimits(bytes_per_second=4e6))
    async with relaying(limits) as relay, echoing_home() as port, behind(address_of(relay), HOME, port):
        began = asyncio.get_running_loop().time()
        assert await echoed(await call(relay), bytes(3 << 20))
        # 6 MiB both directions together, of which a quarter of a second's worth goes at once
        assert asyncio.get_running_loop().time() - began > (2 * (3 << 20) / 4e6 - 0.25) * 0.9


async def test_a_relay_that_names_an_impossible_port_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter((0x10000, 0xFFFFFFFF, 7801))

    async def expose(*_: object) -> AsyncIterator[int]:
        yield next(ports)
        await asyncio.Event().wait()

    async with relaying() as relay:
        monkeypatch.setattr(relay.exposed, "expose", expose)
        async with behind(address_of(relay), HOME, 9) as agent:
            assert await agent.connected() == 7801
