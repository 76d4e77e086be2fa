"""Unary calls that this process reads itself: real libp2p daemons, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError, write_unsigned_varint
from hivemind.proto.dht_pb2 import FindRequest, FindResponse

from node.exchange.hive.unary_calls import CALLS_OF_ONE, MAX_REQUEST_BYTES, answer_calls, call_places

NAME, OTHER_NAME = "Test.rpc_find", "Test.rpc_find_again"
PATIENT = 120.0
FRAMING = 200
"""More bytes than libp2p puts around a request."""


@dataclass(frozen=True)
class Pair:
    caller: P2P
    server: P2P
    seen: list[FindRequest]

    async def call(self, nbytes: int) -> bytes:
        """The nonce of the answer to a call with a key of so many bytes."""
        request = FindRequest(keys=[bytes(nbytes)])
        calling = self.caller.call_protobuf_handler(self.server.peer_id, NAME, request, FindResponse)
        return bytes((await asyncio.wait_for(calling, PATIENT)).auth.nonce)

    async def begin(self, nbytes: int, name: str = NAME) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a call that says that it has so many bytes, and send none of them."""
        _, reader, writer = await self.caller.call_binary_stream_handler(self.server.peer_id, name)
        await write_unsigned_varint(writer, nbytes)
        return reader, writer


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    seen: list[FindRequest] = []

    async def rpc_find(request: FindRequest, context: P2PContext) -> FindResponse:
        seen.append(request)
        if not request.keys[0]:
            raise ValueError("an empty key")
        answer = FindResponse()
        answer.auth.nonce = context.remote_id.to_bytes()
        return answer

    async with AsyncExitStack() as stack:
        server = await P2P.create(nat_port_map=False)
        stack.push_async_callback(server.shutdown)
        caller = await P2P.create(await server.get_visible_maddrs(), nat_port_map=False)
        stack.push_async_callback(caller.shutdown)
        places = call_places()
        for name in (NAME, OTHER_NAME):
            await answer_calls(server, name, rpc_find, FindRequest, places)
        yield Pair(caller, server, seen)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether a call ends without an answer."""
    async with asyncio.timeout(PATIENT):
        return await reader.read(100) == b""


async def test_a_call_is_answered_and_an_exception_is_told(pair: Pair) -> None:
    assert await pair.call(MAX_REQUEST_BYTES - FRAMING) == pair.caller.peer_id.to_bytes()
    with pytest.raises(P2PHandlerError, match="an empty key"):
        await pair.call(0)


async def test_a_call_above_the_bound_is_closed_unread(pair: Pair) -> None:
    with pytest.raises(P2PDaemonError):
        await pair.call(MAX_REQUEST_BYTES)
    reader, _ = await pair.begin(MAX_REQUEST_BYTES + 1)
    assert await ended(reader)
    assert not pair.seen
    assert await pair.call(1)


async def test_calls_that_do_not_come_take_no_more_than_their_places(pair: Pair) -> None:
    names = (NAME, OTHER_NAME)
    calls = [await pair.begin(MAX_REQUEST_BYTES, names[i % 2]) for i in range(CALLS_OF_ONE + 1)]
    reading = {asyncio.create_task(ended(reader)): writer for reader, writer in calls}
    done, held = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [True], "only the one above the limit is closed"
    with pytest.raises(P2PDaemonError):
        await pair.call(1)
    one = next(iter(held))
    reading[one].write(b"\xff" * MAX_REQUEST_BYTES)  # no message of protobuf
    assert await one
    assert await pair.call(1)
    for task in held:
        task.cancel()
