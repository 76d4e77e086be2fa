"""What a caller over libp2p may do: the allow list before every call, and a bound on each message.

libp2p's Noise handshake proves the peer id of the caller (`context.remote_id`), so a list of peer ids is all
that is needed. hivemind's own authorization covers unary calls alone; see :mod:`node.hive.authorizer`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from functools import wraps
from typing import Any

from hivemind.p2p import P2P, P2PContext

from node.transport.allow_list import AllowList

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of a stream: that of a unary call in libp2p's daemon. hivemind's own bound is 2^64."""


class AllowedCalls:
    """The remote calls of `servicer`, unary and streaming, for peers of the allow list only.

    Is the `wrapper` of hivemind's ``add_p2p_handlers``. When a peer leaves the allow list, its open calls end
    at their next message.
    """

    def __init__(self, servicer: Any, allow_list: AllowList) -> None:
        self._servicer, self._allow_list = servicer, allow_list

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        if inspect.isasyncgenfunction(method):

            @wraps(method)
            async def stream(request: Any, context: P2PContext) -> AsyncIterator[Any]:
                self._check(context)
                async for message in method(request, context):
                    self._check(context)
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
    """Refuse messages larger than MAX_MESSAGE_BYTES in this process and those that it forks.

    hivemind reads a length of eight bytes from the stream and then that number of bytes.
    """

    async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
        return await reader.readexactly(size)

    P2P.receive_raw_data = staticmethod(receive_raw_data)
