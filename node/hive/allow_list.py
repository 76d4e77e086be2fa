"""Who may call this peer over libp2p, and how much it may send in one message.

libp2p's Noise handshake proves the peer id of whoever calls (`context.remote_id`), so a list of peer ids is
all that a gate needs. hivemind's own authorization covers unary calls alone; see :mod:`.authorizer`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from functools import wraps
from typing import Any

from hivemind.p2p import P2P, P2PContext

from node import hooks

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of a stream: that of a unary call in libp2p's daemon. hivemind itself would take 2^64."""

_MAX_NAMED = 1024  # strangers named in the log; more are refused without a word


class NotAdmitted(Exception):
    """The caller is not in the roster. It is told so."""


class AllowList:
    """The peers that may call, by base58 id. Empty at first: nobody may."""

    def __init__(self, peers: Iterable[str] = ()) -> None:
        self._peers = frozenset(peers)
        self._named: set[str] = set()

    def admit(self, peers: Iterable[str]) -> None:
        """From now on exactly `peers` may call."""
        self._peers = frozenset(peers)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def check(self, context: P2PContext) -> None:
        """Raises NotAdmitted unless the caller may call; the log names each stranger once."""
        peer = context.remote_id.to_base58()
        hooks.current().before_contact(peer)
        if peer in self._peers:
            return
        if peer not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(peer)
            log.warning("refused %s a call of %s: it is not in the plan", peer, context.handle_name)
        raise NotAdmitted("this peer is not in the plan, or was banned")


class Gated:
    """The remote calls of `servicer`, unary and streaming, for peers of the roster only.

    Is the `wrapper` of hivemind's ``add_p2p_handlers``. A call that is open when its peer is struck off the
    roster ends at its next message.
    """

    def __init__(self, servicer: Any, allow_list: AllowList) -> None:
        self._servicer, self._allow_list = servicer, allow_list

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        if inspect.isasyncgenfunction(method):

            @wraps(method)
            async def stream(request: Any, context: P2PContext) -> AsyncIterator[Any]:
                self._allow_list.check(context)
                async for message in method(request, context):
                    self._allow_list.check(context)
                    yield message

            return stream

        @wraps(method)
        async def call(request: Any, context: P2PContext) -> Any:
            self._allow_list.check(context)
            return await method(request, context)

        return call


def limit_messages() -> None:
    """Refuse messages larger than MAX_MESSAGE_BYTES in this process and those that it forks.

    hivemind reads a length of eight bytes from the stream and then as many bytes as it says.
    """

    async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
        return await reader.readexactly(size)

    P2P.receive_raw_data = staticmethod(receive_raw_data)
