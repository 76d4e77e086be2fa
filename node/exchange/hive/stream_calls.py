"""Bounds on the streams by which other peers call an averager.

hivemind reads the messages of a stream before their handler runs: one of any call with one request, and six
more of every stream that goes on. So its readers are bounded here, before the first byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto.p2pd_pb2 import RPCError

from node.exchange.allow_list import AllowList, NotAdmitted
from node.exchange.hive.access import BOUNDS, MessageBounds
from node.exchange.transfer import CHUNK_BYTES
from protocol.server.limits import FairShare

REQUEST_BOUNDS = MessageBounds(16 << 10, 10.0)
CHUNK_BOUNDS = MessageBounds(2 * CHUNK_BYTES, 10.0)
STREAMS_OF_ONE, STREAMS_IN_ALL = 64, 512
_REFUSALS_OF_ONE, _REFUSALS_IN_ALL = 4, 64
_REFUSED_SECONDS, _DROPPED_BYTES = 10.0, 4096

_Handler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

Guard = Callable[[P2P, AllowList], Any]
"""What a peer registers its calls with, in place of its P2P."""


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
