"""The streams by which peers call an averager: real libp2p daemons, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast
from unittest.mock import Mock

import pytest
import pytest_asyncio
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from node.checkpoint.transfer import CheckpointServer
from node.exchange.allow_list import AllowList
from node.exchange.hive.payload_peer import PayloadPeer
from node.exchange.hive.stream_calls import (
    CHUNK_BOUNDS,
    REQUEST_BOUNDS,
    STREAMS_OF_ONE,
    GuardedStreams,
    limit_messages,
)
from node.exchange.payload_store import PayloadStore
from protocol.pb.payload_pb2 import StateRequest
from tests.builders import keyed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = 120.0
PREFIX = "run-stage-0::PayloadPeer"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Callers:
    """A member and a stranger, both connected to an averager."""

    member: P2P
    stranger: P2P
    averager: P2P

    async def open(self, caller: P2P, call: str) -> Ends:
        _, reader, writer = await caller.call_binary_stream_handler(self.averager.peer_id, f"{PREFIX}.{call}")
        return reader, writer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def callers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callers]:
    folder = tmp_path_factory.mktemp("averager")
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(P2P, "receive_raw_data", P2P.receive_raw_data)  # put back at the end
        limit_messages()
        averager = await P2P.create(nat_port_map=False)
        stack.push_async_callback(averager.shutdown)
        peers = []
        for _ in range(2):
            peers.append(await P2P.create(await averager.get_visible_maddrs(), nat_port_map=False))
            stack.push_async_callback(peers[-1].shutdown)
        member, stranger = peers
        served = PayloadPeer(averager, "run", 0, 1000, PayloadStore(folder, 4), CheckpointServer(folder))
        await served.serve(AllowList([member.peer_id.to_base58()]))
        yield Callers(member, stranger, averager)


def began(nbytes: int) -> bytes:
    """The begin of a message that says that it has so many bytes."""
    return P2P.MESSAGE_MARKER + nbytes.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the stream is closed."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENT)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("call", ["rpc_fetch", "rpc_fetch_range", "rpc_push", "rpc_state"])
async def test_a_stranger_is_refused_before_anything_of_it_is_read(callers: Callers, call: str) -> None:
    reader, writer = await callers.open(callers.stranger, call)
    async with asyncio.timeout(PATIENT):
        await reader.readuntil(b"not in the plan")
    writer.close()
    await rest(reader)  # the stream ends


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("rpc_fetch", REQUEST_BOUNDS.nbytes),
        ("rpc_fetch_range", REQUEST_BOUNDS.nbytes),
        ("rpc_state", REQUEST_BOUNDS.nbytes),
        ("rpc_push", CHUNK_BOUNDS.nbytes),
    ],
)
async def test_a_message_above_the_bound_of_its_call_is_closed_unread(
    callers: Callers, call: str, most: int
) -> None:
    reader, writer = await callers.open(callers.member, call)
    writer.write(began(most + 1))
    assert await rest(reader) == b""
    writer.close()


class OneCall:
    """The part of a P2P that a server of one call uses, and that call."""

    peer_id = PeerID.from_base58(keyed(0).peer)
    call: Callable[..., Awaitable[None]]

    async def add_binary_stream_handler(
        self, _: str, handler: Callable[..., Awaitable[None]], **__: object
    ) -> None:
        self.call = handler


async def test_unfinished_calls_of_a_member_take_no_more_than_their_places() -> None:
    member, other = (PeerID.from_base58(keyed(number).peer) for number in (1, 2))
    p2p = OneCall()
    guarded = GuardedStreams(cast(P2P, p2p), AllowList([member.to_base58(), other.to_base58()]))
    await guarded.add_protobuf_handler("call", None, StateRequest, stream_input=False, stream_output=True)
    tasks = []

    def begin(caller: PeerID) -> tuple[asyncio.Task[None], asyncio.StreamReader, Mock]:
        """A call of which nothing comes."""
        reader, writer = asyncio.StreamReader(), Mock()
        info = StreamInfo(caller, Multiaddr("/ip4/127.0.0.1/tcp/1"), "call")
        tasks.append(asyncio.ensure_future(p2p.call(info, reader, writer)))
        return tasks[-1], reader, writer

    calls = [begin(member) for _ in range(STREAMS_OF_ONE)]
    first, reader, _ = calls[0]
    above, _, refused = begin(member)
    await above
    refused.transport.abort.assert_called_once()
    begin(other)
    reader.feed_eof()
    await first
    begin(member)
    refused_again, _, _ = begin(member)
    await refused_again
    held = [task for task in tasks if not task.done()]
    assert len(held) == STREAMS_OF_ONE + 1
    for task in held:
        task.cancel()
    await asyncio.wait(held)


async def test_a_member_is_answered(callers: Callers) -> None:
    stub = PayloadPeer.get_stub(callers.member, callers.averager.peer_id, namespace="run-stage-0")
    answers = await stub.rpc_state(StateRequest(stage=0, part="stage", round=1))
    assert "no such checkpoint" in (await asyncio.wait_for(anext(answers), PATIENT)).refusal
