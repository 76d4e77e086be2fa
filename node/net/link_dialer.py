"""The dialling end of links, and :class:`Links`, with which a member opens links at either end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from node.net.link import Link, LinkEndpoint, LinkLimits, Received, read_message, refusal
from node.net.link_handshake import SERVICE, check_hello, hello_in, hello_of, stream_options, unreachable
from node.net.link_server import LinkServer
from node.net.streams import STREAM_ERRORS, status_of
from node.security.channels import open_channel, tls_failure
from node.security.credentials import Credentials
from protocol.errors import ErrorCode
from protocol.trust.tls import tls_name
from protocol.wire.link_message import LinkMessage
from protocol.wire.rpc_errors import error_from_rpc

_RETRY_SECONDS = 0.2


class Links:
    """Opens this node's links to its neighbours: it dials some and accepts the others.

    Args:
        server: None if this node only dials.
        credentials: called for each link that is dialled.
        received: called for each timed frame of a dialled link.
    """

    def __init__(
        self,
        server: LinkServer | None,
        credentials: Callable[[], Credentials],
        received: Received | None = None,
    ) -> None:
        self._server, self._credentials, self._received = server, credentials, received

    async def dial(
        self, endpoint: str, here: LinkEndpoint, neighbour: LinkEndpoint, limits: LinkLimits, deadline: float
    ) -> Link:
        """As :func:`dial`."""
        return await dial(endpoint, here, neighbour, limits, deadline, self._credentials(), self._received)

    async def accept(
        self, here: LinkEndpoint, neighbour: LinkEndpoint, limits: LinkLimits, deadline: float
    ) -> Link:
        """As :meth:`LinkServer.accept`."""
        assert self._server is not None, "the plan lets only members accept that listen"
        return await self._server.accept(here, neighbour, limits, deadline)


async def dial(
    endpoint: str,
    here: LinkEndpoint,
    neighbour: LinkEndpoint,
    limits: LinkLimits,
    deadline: float,
    credentials: Credentials,
    received: Received | None = None,
) -> Link:
    """Open the link from `here` to `neighbour` at `endpoint`; try again for `deadline` seconds.

    Raises HetnodeError: NEIGHBOUR_UNREACHABLE; CERTIFICATE_REFUSED if another peer answers; or the refusal of
    the neighbour.
    """
    channel = open_channel(endpoint, credentials, tls_name(neighbour.peer), stream_options())
    exchange: Any = channel.stream_stream(
        f"/{SERVICE}/Exchange", LinkMessage.to_bytes, LinkMessage.from_bytes
    )
    unanswered = ""
    try:
        async with asyncio.timeout(deadline):
            while True:
                call = exchange()
                try:
                    await _greet(call, here, neighbour)
                    break
                except STREAM_ERRORS:
                    unanswered = await _why_to_retry(call, endpoint, neighbour) or unanswered
                # The neighbour has not seen the plan yet, or is starting.
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        await channel.close()
        why = f"no answer from {endpoint} within {deadline:.0f} s {unanswered}".strip()
        raise unreachable(neighbour, why) from None
    except BaseException:
        await channel.close()
        raise
    link = Link(neighbour, call.read, call.write, limits, received)
    closing = asyncio.create_task(_close_channel_after(link, call, channel))
    _background.add(closing)
    closing.add_done_callback(_background.discard)
    return link


async def _greet(call: Any, here: LinkEndpoint, neighbour: LinkEndpoint) -> None:
    """Exchange greetings. Raises one of STREAM_ERRORS, or a HetnodeError for a wrong other end."""
    await call.write(hello_of(here))
    hello = hello_in(await read_message(call.read()))
    if hello is None:
        raise unreachable(neighbour, "it closed the stream without a greeting")
    check_hello(hello, neighbour)


async def _why_to_retry(call: Any, endpoint: str, neighbour: LinkEndpoint) -> str:
    """gRPC's message on a failed call that may succeed later.

    Raises HetnodeError if it cannot succeed: CERTIFICATE_REFUSED, or the refusal of the neighbour.
    """
    status = await status_of(call)
    if why := tls_failure(status):
        raise refusal(
            ErrorCode.CERTIFICATE_REFUSED,
            f"what answers at {endpoint} has no certificate of {neighbour.peer} ({why})",
        ) from None
    error = error_from_rpc(status)
    # UNKNOWN_PEER may end: the neighbour may still follow an older plan.
    if error is not None and error.code is not ErrorCode.UNKNOWN_PEER:
        raise error from None
    if error is None and status.code() is grpc.StatusCode.UNAVAILABLE:
        return str(status.details())[:200]
    return ""


_background: set[asyncio.Task[None]] = set()  # asyncio holds only weak references to tasks


async def _close_channel_after(link: Link, call: Any, channel: grpc.aio.Channel) -> None:
    await link.wait_closed()
    call.cancel()
    await channel.close()
