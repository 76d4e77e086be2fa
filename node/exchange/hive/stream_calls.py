"""Access to the streams by which other peers call an averager: an allow list, and bounds.

libp2p's Noise handshake proves the peer id of the caller (`context.remote_id`), so a list of peer ids is
enough. hivemind's own authorization covers only unary calls; see :mod:`node.exchange.hive.authorizer`.

hivemind reads the messages of a stream before their handler runs: one of any call with one request, and six
more of every stream that goes on. So its readers are bounded here, before the first byte.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto.p2pd_pb2 import RPCError

from node.exchange.allow_list import AllowList, NotAdmitted
from node.exchange.transfer import CHUNK_BYTES
from protocol.server.limits import FairShare

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of a stream. libp2p's daemon has the same bound for unary calls; hivemind accepts 2^64."""


@dataclass(frozen=True)
class MessageBounds:
    """Of each message of a stream: its bytes, and the seconds from its length to its end."""

    nbytes: int
    seconds: float | None


_OF_ANSWERS = MessageBounds(MAX_MESSAGE_BYTES, None)
"""Of what this process has asked for."""
BOUNDS: ContextVar[MessageBounds] = ContextVar("bounds", default=_OF_ANSWERS)
"""Of what this task reads."""
REQUEST_BOUNDS = MessageBounds(16 << 10, 10.0)
CHUNK_BOUNDS = MessageBounds(2 * CHUNK_BYTES, 10.0)
STREAMS_OF_ONE, STREAMS_IN_ALL = 64, 512
_REFUSALS_OF_ONE, _REFUSALS_IN_ALL = 4, 64
_REFUSED_SECONDS, _DROPPED_BYTES = 10.0, 4096

_Handler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

Guard = Callable[[P2P, AllowList], Any]
"""What a peer registers its calls with, in place of its P2P."""


class AllowedCalls:
    """Wraps the remote calls of `servicer`, unary and streaming: only peers of the allow list may call.

    It is passed to hivemind's ``add_p2p_handlers`` as `wrapper`. When a peer leaves the allow list, its open
    calls end at their next message.
    """

    def __init__(self, servicer: Any, allow_list: AllowList) -> None:
        self._servicer, self._allow_list = servicer, allow_list

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        # hivemind inspects the signature of each handler, so both wrappers keep it (`wraps`).
        if inspect.isasyncgenfunction(method):

            @wraps(method)
            async def stream(request: Any, context: P2PContext) -> AsyncIterator[Any]:
                self._check(context)
                async for message in method(request, context):
                    self._check(context)  # again: a long transfer must end when its peer is banned
                    yield message

            return stream

        @wraps(method)
        async def call(request: Any, context: P2PContext) -> Any:
            self._check(context)
            return await method(request, context)

        return call

    def _check(self, context: P2PContext) -> None:
        self._allow_list.check(context.remote_id.to_base58(), context.handle_name)


def limit_messages() -> None:
    """Refuse messages beyond the BOUNDS of a task in this process and those that it forks.

    hivemind reads a length of eight bytes from the stream and then that number of bytes.
    """

    async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        bounds = BOUNDS.get()
        # Checked before reading: a false length would let one message fill the memory.
        if size > bounds.nbytes:
            raise ValueError(f"a message of {size} bytes, more than {bounds.nbytes}")
        async with asyncio.timeout(bounds.seconds):
            return await reader.readexactly(size)

    # hivemind has no option for this bound. Forked processes inherit the replaced function.
    P2P.receive_raw_data = staticmethod(receive_raw_data)


class GuardedStreams:
    """`p2p` as hivemind's ``add_p2p_handlers`` uses it; only peers of the allow list get a stream."""

    # hivemind's own, on this object: they hand what they read to `add_binary_stream_handler` below.
    _add_protobuf_stream_handler = P2P._add_protobuf_stream_handler

    def __init__(self, p2p: P2P, allow_list: AllowList) -> None:
        self._p2p, self._allow_list = p2p, allow_list
        self._places = FairShare(STREAMS_OF_ONE, STREAMS_IN_ALL)
        self._refusals = FairShare(_REFUSALS_OF_ONE, _REFUSALS_IN_ALL)
        self._bounds: dict[str, MessageBounds] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def add_protobuf_handler(
        self, name: str, handler: Any, request_type: type[Message], *, stream_input: bool, **options: Any
    ) -> None:
        self._bounds[name] = CHUNK_BOUNDS if stream_input else REQUEST_BOUNDS
        await P2P.add_protobuf_handler(
            self, name, handler, request_type, stream_input=stream_input, **options
        )

    async def add_binary_stream_handler(self, name: str, handler: _Handler, **options: Any) -> None:
        async def guarded(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            caller = info.peer_id.to_base58()
            try:
                self._allow_list.check(caller, name)
            except NotAdmitted as refusal:
                await self._refuse(caller, str(refusal), reader, writer)
                return
            if not self._places.take(caller):
                writer.transport.abort()
                return
            BOUNDS.set(self._bounds[name])
            try:
                await handler(info, reader, writer)
            finally:
                self._places.release(caller)

        await self._p2p.add_binary_stream_handler(name, guarded, **options)

    async def _refuse(
        self, caller: str, reason: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tell `caller` why its stream ends, if few of its streams are refused at the moment."""
        if not self._refusals.take(caller):
            writer.transport.abort()
            return
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_REFUSED_SECONDS):
                    await P2P.send_protobuf(RPCError(message=reason), writer)
                    # p2pd resets a stream that is closed here first: the caller would lose the reason.
                    while await reader.read(_DROPPED_BYTES):
                        pass
            writer.close()
        finally:
            self._refusals.release(caller)
