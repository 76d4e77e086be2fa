"""Who gets a link: exactly the peer that the plan names, under a certificate of the run's authority."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from node.security.channels import open_channel
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.names import tls_name
from protocol.types import PROTOCOL_VERSION, DType, Frame, FrameId, FrameKind, PeerId, TensorHeader
from protocol.wire.framing import CHUNK_BYTES
from protocol.wire.rpc_errors import error_from_rpc
from tests.support.certificates import authority, credentials

LIMITS = LinkLimits(frame_bytes=8 * CHUNK_BYTES, waiting_frames=4)
UPPER = LinkMember("run", "hash", PeerId("upper"), 0, 0)
LOWER = LinkMember("run", "hash", PeerId("lower"), 0, 1)
FRAME = Frame(
    FrameId(1, 1, 0, 1, FrameKind.FORWARD), (TensorHeader("t", DType.U8, (100,)),), bytes([7]) * 100
)


class Shown:
    """What a server shows, which may change while it runs."""

    def __init__(self, now: Credentials) -> None:
        self.now = now


@pytest.fixture
def shown() -> Shown:
    return Shown(credentials(LOWER.peer))


@pytest.fixture
async def server(shown: Shown) -> AsyncIterator[tuple[LinkServer, str]]:
    server = LinkServer(lambda: shown.now)
    port = await server.start("127.0.0.1", 0)
    yield server, f"127.0.0.1:{port}"
    await server.close()


async def connect(server: tuple[LinkServer, str]) -> tuple[LiveLink, LiveLink]:
    accepting, address = server
    ends = await asyncio.gather(
        dial(address, UPPER, LOWER, LIMITS, 10, credentials(UPPER.peer)),
        accepting.accept(LOWER, UPPER, LIMITS, 10),
    )
    return ends[0], ends[1]


async def refusal_of(channel: grpc.aio.Channel, peer: str) -> HetnodeError | None:
    """How the server ends a stream that greets in the name of `peer`; None if the TLS handshake failed."""
    async with channel:
        call = pb_grpc.StageLinkStub(channel).Exchange()
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, run="run", spec_hash="hash", peer=peer)
        try:
            await call.write(pb.LinkMessage(hello=hello))
            answer = await call.read()
            assert answer is grpc.aio.EOF
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        status = grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata()
        )
        refusal = error_from_rpc(status)
        assert refusal is not None or status.code() is grpc.StatusCode.UNAVAILABLE
        return refusal


async def test_a_member_that_greets_as_another_is_refused_before_any_frame(
    server: tuple[LinkServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    accepting, address = server
    accept = asyncio.create_task(accepting.accept(LOWER, UPPER, LIMITS, 30))
    channel = open_channel(address, credentials("liar"), tls_name(LOWER.peer), ())
    refusal = await refusal_of(channel, UPPER.peer)
    assert refusal is not None
    assert refusal.code is ErrorCode.CERTIFICATE_REFUSED
    assert "hetnode:peer:liar" in caplog.text
    assert not accept.done()
    upper = await dial(address, UPPER, LOWER, LIMITS, 10, credentials(UPPER.peer))
    lower = await accept
    await upper.send(FRAME, 10)
    assert await lower.take(FRAME.id, 10) == FRAME
    for end in (upper, lower):
        await end.close()


@pytest.mark.parametrize("caller", ["of another authority", "whose time is over", "without any certificate"])
async def test_a_caller_without_a_valid_certificate_is_refused(
    server: tuple[LinkServer, str], caller: str
) -> None:
    accepting, address = server
    accept = asyncio.create_task(accepting.accept(LOWER, UPPER, LIMITS, 30))
    if caller == "without any certificate":
        trust = grpc.ssl_channel_credentials(authority().pem)
        name = (("grpc.ssl_target_name_override", tls_name(LOWER.peer)),)
        channel = grpc.aio.secure_channel(address, trust, options=name)
    else:
        ended = caller == "whose time is over"
        issuer = authority() if ended else authority("another")
        bad = credentials(UPPER.peer, issuer, ended)
        believing_us = Credentials(authority().pem, bad.certificate, bad.key)
        channel = open_channel(address, believing_us, tls_name(LOWER.peer), ())
    assert await refusal_of(channel, UPPER.peer) is None
    assert not accept.done()
    accept.cancel()


async def test_a_plaintext_caller_is_refused(server: tuple[LinkServer, str]) -> None:
    assert await refusal_of(grpc.aio.insecure_channel(server[1]), UPPER.peer) is None


@pytest.mark.parametrize("answering", ["another member", "another authority", "an expired certificate"])
async def test_a_dialling_member_sends_only_to_the_peer_of_the_plan(
    server: tuple[LinkServer, str], shown: Shown, answering: str
) -> None:
    shown.now = {
        "another member": credentials("another"),
        "another authority": credentials(LOWER.peer, authority("another")),
        "an expired certificate": credentials(LOWER.peer, ended=True),
    }[answering]
    await server[0].renew()
    with pytest.raises(HetnodeError) as refused:
        await dial(server[1], UPPER, LOWER, LIMITS, 10, credentials(UPPER.peer))
    assert refused.value.code is ErrorCode.CERTIFICATE_REFUSED
    assert LOWER.peer in str(refused.value)


async def test_a_renewed_certificate_is_shown_to_new_connections_and_ends_no_link(
    server: tuple[LinkServer, str], shown: Shown
) -> None:
    upper, lower = await connect(server)
    shown.now = credentials("renamed")  # another name, to see that it is the new one
    await server[0].renew()
    with pytest.raises(HetnodeError):
        await dial(server[1], UPPER, LOWER, LIMITS, 10, credentials(UPPER.peer))
    await upper.send(FRAME, 10)
    assert await lower.take(FRAME.id, 10) == FRAME
    for end in (upper, lower):
        await end.close()


async def test_the_link_of_a_banned_neighbour_ends_with_the_reason(server: tuple[LinkServer, str]) -> None:
    upper, lower = await connect(server)
    await lower.close(HetnodeError(ErrorCode.BANNED, "It was banned.", ""))
    assert (await lower.wait_closed()).code is ErrorCode.BANNED
    assert (await asyncio.wait_for(upper.wait_closed(), 10)).code is ErrorCode.BANNED


async def test_the_open_streams_of_one_peer_are_bounded(server: tuple[LinkServer, str]) -> None:
    async with open_channel(server[1], credentials("hoarder"), tls_name(LOWER.peer), ()) as channel:
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, run="run", spec_hash="hash", peer="hoarder")
        calls = [pb_grpc.StageLinkStub(channel).Exchange() for _ in range(5)]
        for call in calls:
            # The server can refuse a stream while its first message is still being written.
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await call.write(pb.LinkMessage(hello=hello))
        done, waiting = await asyncio.wait(
            [asyncio.create_task(call.code()) for call in calls], return_when=asyncio.FIRST_COMPLETED
        )
        assert (len(done), len(waiting)) == (1, 4)
        for call in calls:
            call.cancel()
    upper, lower = await connect(server)
    for end in (upper, lower):
        await end.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(greets=st.booleans(), noise=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
async def test_random_bytes_of_a_certified_peer_end_only_its_stream(
    server: tuple[LinkServer, str], greets: bool, noise: list[bytes]
) -> None:
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION, run="run", spec_hash="hash", peer=UPPER.peer, replica=0, position=0
    )
    greeting = [pb.LinkMessage(hello=hello).SerializeToString()] if greets else []
    accepted = asyncio.create_task(server[0].accept(LOWER, UPPER, LIMITS, 30))
    async with open_channel(server[1], credentials(UPPER.peer), tls_name(LOWER.peer), ()) as channel:
        call = channel.stream_stream("/hetnode.v1.StageLink/Exchange")(iter([*greeting, *noise]))
        with contextlib.suppress(grpc.RpcError):
            async with asyncio.timeout(30):
                async for _ in call:
                    pass
    if accepted.done():
        await accepted.result().close()
    accepted.cancel()
    upper, lower = await connect(server)
    await upper.send(FRAME, 10)
    assert await lower.take(FRAME.id, 10) == FRAME
    for end in (upper, lower):
        await end.close()
