"""Access control for calls over libp2p: an allow list of peers, and a bound on the size of each message.

libp2p's Noise handshake proves the peer id of the caller (`context.remote_id`), so a list of peer ids is
enough. hivemind's own authorization covers only unary calls; see :mod:`node.exchange.hive.authorizer`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from hivemind.p2p import P2P, P2PContext

from node.exchange.allow_list import AllowList

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
