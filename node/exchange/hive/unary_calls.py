"""Answers unary calls of libp2p in this process, which reads no more of a call than it wants.

p2pd, libp2p's daemon, takes unary calls whole, as many at a time as anyone sends, before it hands one over.
So unary calls are registered as streams: p2pd then only copies bytes, and no faster than they are read here.
The bytes on the wire are those of p2pd's own unary calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint, write_pbmsg
from hivemind.proto.p2pd_pb2 import CallUnaryResponse, PersistentConnectionRequest

from protocol.server.limits import FairShare

MAX_REQUEST_BYTES = 16 << 10
"""Of a call. Answers may be larger: this process asks only a few peers for them."""
CALLS_OF_ONE, CALLS_IN_ALL = 32, 256
"""That are answered at the same time."""
_SECONDS = 10.0
"""In which a call must have come, been answered, and been closed by its caller."""
_LENGTH_BITS = 32


def call_places() -> FairShare:
    """The calls that may be answered at the same time, shared by all methods of a server."""
    return FairShare(CALLS_OF_ONE, CALLS_IN_ALL)


async def answer_calls(
    p2p: P2P,
    name: str,
    method: Callable[[Any, P2PContext], Awaitable[Message]],
    request_type: type[Message],
    places: FairShare,
) -> None:
    """Let `method` answer the unary calls `name` of other peers from now on.

    A call that is too large, and one for which `places` has none, is closed without an answer. An exception
    of `method` is told to the caller.
    """

    async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = info.peer_id.to_base58()
        if not places.take(caller):
            writer.transport.abort()
            return
        try:
            async with asyncio.timeout(_SECONDS):
                call = await _read(reader)
                answer = PersistentConnectionRequest(callId=call.callId)
                try:
                    request = request_type.FromString(call.callUnary.data)
                    context = P2PContext(handle_name=name, local_id=p2p.peer_id, remote_id=info.peer_id)
                    response = await method(request, context)
                    answer.unaryResponse.response = response.SerializeToString()
                except Exception as error:
                    answer.unaryResponse.CopyFrom(CallUnaryResponse(error=repr(error).encode()))
                await write_pbmsg(writer, answer)
                # p2pd resets a stream that is closed here first, and the caller loses what it has not read.
                await reader.read(1)
            writer.close()
        except (DecodeError, EOFError, OSError, TimeoutError, ValueError):
            writer.transport.abort()  # with unread bytes: p2pd resets the stream, and drops what it holds
        finally:
            places.release(caller)

    await p2p.add_binary_stream_handler(name, handle)


async def _read(reader: asyncio.StreamReader) -> PersistentConnectionRequest:
    """The next message. Raises ValueError, DecodeError; IncompleteReadError, an EOFError."""
    size = await read_unsigned_varint(reader, _LENGTH_BITS)
    if size > MAX_REQUEST_BYTES:
        raise ValueError(f"a call of {size} bytes, more than {MAX_REQUEST_BYTES}")
    call = PersistentConnectionRequest()
    call.ParseFromString(await reader.readexactly(size))
    return call
