"""Links over real gRPC on loopback: greetings, frames both ways, and what happens when bytes are wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from node.net import link_dialer, link_handshake
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from node.security.channels import open_channel, server_tls
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.line import BURST_SECONDS, Line, LineLimits
from protocol.trust.names import tls_name
from protocol.types import PROTOCOL_VERSION, DType, Frame, FrameId, FrameKind, PeerId, TensorHeader
from protocol.wire.framing import CHUNK_BYTES, FRAME_ID
from tests.support.certificates import credentials

UPPER_SHOWS, LOWER_SHOWS, LIAR_SHOWS = credentials("upper"), credentials("lower"), credentials("liar")
LIMITS = LinkLimits(frame_bytes=8 * CHUNK_BYTES, waiting_frames=4)
UPPER = LinkMember("run", "hash", PeerId("upper"), 0, 0)
LOWER = LinkMember("run", "hash", PeerId("lower"), 0, 1)


def frame(microbatch: int, size: int, kind: FrameKind = FrameKind.FORWARD) -> Frame:
    frame_id = FrameId(1, 1, 0, microbatch, kind)
    return Frame(frame_id, (TensorHeader("t", DType.U8, (size,)),), bytes([microbatch]) * size)


def greeting_of(place: LinkMember) -> pb.LinkMessage:
    """What that end of a link says first."""
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        run=place.run,
        spec_hash=place.spec_hash,
        peer=place.peer,
        replica=place.replica,
        position=place.position,
        epoch=place.epoch,
        round=place.round_number,
    )
    return pb.LinkMessage(hello=hello)


def channel_of(shown: Credentials, address: str) -> grpc.aio.Channel:
    """To the member at `address`, by hand."""
    return open_channel(address, shown, tls_name(LOWER.peer), ())


@pytest.fixture
async def server() -> AsyncIterator[tuple[LinkServer, str]]:
    server = LinkServer(lambda: LOWER_SHOWS)
    port = await server.start("127.0.0.1", 0)
    yield server, f"127.0.0.1:{port}"
    await server.close()


@pytest.fixture
async def pair(server: tuple[LinkServer, str]) -> AsyncIterator[tuple[LiveLink, LiveLink]]:
    """The dialled and the accepting end of one link."""
    accepting, address = server
    ends = await asyncio.gather(
        dial(address, UPPER, LOWER, LIMITS, 10, UPPER_SHOWS), accepting.accept(LOWER, UPPER, LIMITS, 10)
    )
    yield ends
    for end in ends:
        await end.close()


async def test_frames_larger_than_a_chunk_cross_in_both_directions(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    down, up = frame(1, 3 * CHUNK_BYTES + 7), frame(2, CHUNK_BYTES, FrameKind.BACKWARD)
    _, _, got_down, got_up = await asyncio.gather(
        upper.send(down, 10), lower.send(up, 10), lower.take(down.id, 10), upper.take(up.id, 10)
    )
    assert (got_down, got_up) == (down, up)
    assert upper.bytes_sent > 3 * CHUNK_BYTES


async def test_frames_are_taken_by_id_in_any_order(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    for microbatch in range(3):
        await upper.send(frame(microbatch, 10), 10)
    for microbatch in (2, 0, 1):
        assert await lower.take(frame(microbatch, 10).id, 10) == frame(microbatch, 10)


async def test_a_repeated_frame_is_returned_once(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    for sent in (frame(1, 10), frame(1, 10), frame(2, 10)):
        await upper.send(sent, 10)
    await lower.take(frame(2, 10).id, 10)
    await lower.take(frame(1, 10).id, 10)
    with pytest.raises(HetnodeError) as missing:
        await lower.take(frame(1, 10).id, 0.01)
    assert missing.value.code is ErrorCode.NEIGHBOUR_LOST


async def test_a_sender_waits_while_its_neighbour_takes_no_frames(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    total = 40  # far more than the inbox and gRPC's windows hold together
    sending = [asyncio.create_task(upper.send(frame(i, CHUNK_BYTES), 10)) for i in range(total)]
    await lower.take(frame(0, CHUNK_BYTES).id, 10)
    assert not all(task.done() for task in sending)
    for i in range(1, total):
        assert await lower.take(frame(i, CHUNK_BYTES).id, 10) == frame(i, CHUNK_BYTES)
    await asyncio.gather(*sending)


async def test_closing_one_end_raises_at_the_other(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    waiting = asyncio.create_task(lower.take(frame(0, 1).id, 30))
    await upper.close()
    with pytest.raises(HetnodeError) as lost:
        await waiting
    assert lost.value.code is ErrorCode.NEIGHBOUR_LOST


@pytest.mark.parametrize("first", [0, 1])
async def test_neighbours_part_without_an_error_in_either_order(
    pair: tuple[LiveLink, LiveLink], first: int
) -> None:
    upper, lower = pair
    ends = (pair[first], pair[1 - first])
    await upper.send(frame(1, CHUNK_BYTES), 10)
    early = asyncio.create_task(ends[0].part(30))
    await lower.take(frame(1, CHUNK_BYTES).id, 10)
    lower.drop_before(100)
    assert not early.done()
    await ends[1].part(30)
    await early


async def test_a_neighbour_that_is_gone_needs_no_farewell(pair: tuple[LiveLink, LiveLink]) -> None:
    upper, lower = pair
    await upper.close()
    await asyncio.wait_for(lower.part(30), 10)


async def test_a_neighbour_of_another_run_is_refused_with_both_hashes(server: tuple[LinkServer, str]) -> None:
    accepting, address = server
    stranger = replace(UPPER, spec_hash="other-hash")
    accept = asyncio.create_task(accepting.accept(LOWER, UPPER, LIMITS, 10))
    with pytest.raises(HetnodeError) as refused:
        await dial(address, stranger, LOWER, LIMITS, 10, UPPER_SHOWS)
    assert refused.value.code is ErrorCode.SPEC_MISMATCH
    assert "other-hash" in str(refused.value)
    assert "'hash'" in str(refused.value) or "with hash" in str(refused.value)
    accept.cancel()


async def test_an_idle_link_outlives_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members may wait for minutes between rounds, with nothing but keepalive probes on the link."""
    monkeypatch.setattr(link_handshake, "KEEPALIVE_SECONDS", 1.0)  # gRPC goes no lower
    server = LinkServer(lambda: LOWER_SHOWS)
    port = await server.start("127.0.0.1", 0)
    upper, lower = await asyncio.gather(
        dial(f"127.0.0.1:{port}", UPPER, LOWER, LIMITS, 10, UPPER_SHOWS),
        server.accept(LOWER, UPPER, LIMITS, 10),
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(upper.wait_closed(), 6)
    await upper.send(frame(1, 10), 10)
    assert await lower.take(frame(1, 10).id, 10) == frame(1, 10)
    for end in (upper, lower, server):
        await end.close()


async def test_an_endpoint_without_a_listener_is_reported_with_its_address() -> None:
    with pytest.raises(HetnodeError) as unreachable:
        await dial("127.0.0.1:9", UPPER, LOWER, LIMITS, 0.3, UPPER_SHOWS)
    assert unreachable.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE
    assert "127.0.0.1:9" in str(unreachable.value)


async def test_silence_is_told_once_while_the_link_is_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_dialer, "PATIENCE_SECONDS", 0.1)
    told: list[str] = []
    with pytest.raises(HetnodeError):
        await dial("127.0.0.1:9", UPPER, LOWER, LIMITS, 1.0, UPPER_SHOWS, on_silence=told.append)
    assert len(told) == 1
    assert "127.0.0.1:9" in told[0] or "nothing answers" in told[0]


async def test_a_port_in_use_is_reported(server: tuple[LinkServer, str]) -> None:
    port = int(server[1].rpartition(":")[2])
    with pytest.raises(HetnodeError) as taken:
        await LinkServer(lambda: LOWER_SHOWS).start("127.0.0.1", port)
    assert taken.value.code is ErrorCode.PORT_IN_USE


BAD_MESSAGES = {
    "not a frame": pb.LinkMessage(),
    "chunk without header": pb.LinkMessage(chunk=b"x"),
    "unknown kind": pb.LinkMessage(header=pb.FrameHeader(id=pb.FrameId(kind="nonsense"))),
    "oversized": pb.LinkMessage(
        header=pb.FrameHeader(
            id=FRAME_ID.to_pb(frame(0, 1).id),
            tensors=[pb.TensorHeader(name="t", dtype="u8", shape=[2**30])],
            nbytes=2**30,
        )
    ),
}


async def test_members_are_connected_only_when_they_are_in_the_same_round(
    server: tuple[LinkServer, str],
) -> None:
    accepting, address = server
    upper, lower = replace(UPPER, round_number=5), replace(LOWER, round_number=5)
    accept = asyncio.create_task(accepting.accept(lower, upper, LIMITS, 10))
    with pytest.raises(HetnodeError) as early:
        await dial(
            address, replace(UPPER, round_number=4), replace(LOWER, round_number=4), LIMITS, 1, UPPER_SHOWS
        )
    assert early.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE
    assert not accept.done()
    for end in await asyncio.gather(dial(address, upper, lower, LIMITS, 10, UPPER_SHOWS), accept):
        await end.close()


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_a_bad_message_closes_that_stream_only(server: tuple[LinkServer, str], name: str) -> None:
    accepting, address = server
    good = await asyncio.gather(
        dial(address, UPPER, LOWER, LIMITS, 10, UPPER_SHOWS), accepting.accept(LOWER, UPPER, LIMITS, 10)
    )
    liar = LinkMember("run", "hash", PeerId("liar"), 1, 0)
    accept = asyncio.create_task(accepting.accept(LOWER, liar, LIMITS, 10))
    async with channel_of(LIAR_SHOWS, address) as channel:
        call = pb_grpc.StageLinkStub(channel).Exchange()
        await call.write(greeting_of(liar))
        await call.read()
        broken = await accept
        await call.write(BAD_MESSAGES[name])
        reason = await asyncio.wait_for(broken.wait_closed(), 10)
        assert reason.code in (ErrorCode.FRAME_CORRUPT, ErrorCode.FRAME_TOO_LARGE)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await good[0].send(frame(7, 100), 10)
    assert await good[1].take(frame(7, 100).id, 10) == frame(7, 100)
    for end in good:
        await end.close()


async def test_a_stream_that_does_not_greet_is_refused(server: tuple[LinkServer, str]) -> None:
    async with channel_of(UPPER_SHOWS, server[1]) as channel:
        call = pb_grpc.StageLinkStub(channel).Exchange()
        await call.write(pb.LinkMessage(chunk=b"hello?"))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_another_protocol_version_is_refused_with_both_numbers(server: tuple[LinkServer, str]) -> None:
    async with channel_of(UPPER_SHOWS, server[1]) as channel:
        call = pb_grpc.StageLinkStub(channel).Exchange()
        await call.write(pb.LinkMessage(hello=pb.Hello(protocol_version=PROTOCOL_VERSION + 1, peer="upper")))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"version {PROTOCOL_VERSION + 1}" in await call.details()
        assert f"the other version {PROTOCOL_VERSION}" in await call.details()


async def test_a_newer_neighbour_that_speaks_this_version_too_is_greeted(
    server: tuple[LinkServer, str],
) -> None:
    newer = greeting_of(UPPER)
    newer.hello.protocol_version, newer.hello.oldest_protocol = PROTOCOL_VERSION + 1, PROTOCOL_VERSION
    accept = asyncio.create_task(server[0].accept(LOWER, UPPER, LIMITS, 10))
    async with channel_of(UPPER_SHOWS, server[1]) as channel:
        call = pb_grpc.StageLinkStub(channel).Exchange()
        await call.write(newer)
        assert (await call.read()).hello.peer == LOWER.peer
        await (await accept).close()


@pytest.mark.parametrize(
    "greeting",
    [greeting_of(LOWER).SerializeToString(), b""],
    ids=["after the greeting", "instead of one"],
)
async def test_bytes_that_are_no_message_end_the_link_at_the_dialling_end(greeting: bytes) -> None:
    async def answer(_: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()
        for message in filter(None, (greeting, b"\xff\xff\xff garbage")):
            await context.write(message)
        await context.read()

    handler = grpc.stream_stream_rpc_method_handler(answer)  # bytes, as they are
    service = pb.DESCRIPTOR.services_by_name["StageLink"].full_name
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Exchange": handler}),))
    port = server.add_secure_port("127.0.0.1:0", server_tls(LOWER_SHOWS).credentials())
    await server.start()

    async def one_frame() -> None:
        dialled = await dial(f"127.0.0.1:{port}", UPPER, LOWER, LIMITS, 10, UPPER_SHOWS)
        try:
            await dialled.take(frame(0, 1).id, 60)
        finally:
            await dialled.close()

    with pytest.raises(HetnodeError) as refused:
        await one_frame()
    assert refused.value.code is ErrorCode.FRAME_CORRUPT
    await server.stop(0)


async def test_a_frame_that_is_not_finished_in_time_ends_the_link(pair: tuple[LiveLink, LiveLink]) -> None:
    sender = pair[0]

    async def fill_all_that_lies_between() -> None:
        for microbatch in range(100):
            await sender.send(frame(microbatch, 8 * CHUNK_BYTES), 0.5)

    with pytest.raises(HetnodeError, match="took no frame"):
        await fill_all_that_lies_between()
    reason = await asyncio.wait_for(sender.wait_closed(), 10)
    assert reason.code is ErrorCode.NEIGHBOUR_LOST
    with pytest.raises(HetnodeError, match="not finished"):
        await sender.send(frame(100, 1), 10)


async def test_a_link_moves_no_faster_than_the_limits_of_its_ends(tmp_path: Path) -> None:
    rate, size = 2e6, 500_000
    slow_up = Line.create(LineLimits(upload=rate), tmp_path / "up")
    slow_down = Line.create(LineLimits(download=rate), tmp_path / "down")
    server = LinkServer(lambda: LOWER_SHOWS, line=slow_down)
    port = await server.start("127.0.0.1", 0)
    upper, lower = await asyncio.gather(
        dial(f"127.0.0.1:{port}", UPPER, LOWER, LIMITS, 10, UPPER_SHOWS, line=slow_up),
        server.accept(LOWER, UPPER, LIMITS, 10),
    )
    try:
        began = time.monotonic()
        for microbatch in range(3):
            sent = frame(microbatch, size)
            await upper.send(sent, 60)
            assert await lower.take(sent.id, 60) == sent
        seconds = time.monotonic() - began
        assert 3 * size <= rate * (seconds + BURST_SECONDS) + slow_up.up.piece_bytes
        back = frame(9, size, FrameKind.BACKWARD)
        await lower.send(back, 60)  # this direction has no limit at either end
        assert await upper.take(back.id, 60) == back
    finally:
        for end in (upper, lower):
            await end.close()
        await server.close()
