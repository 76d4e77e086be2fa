"""The dialling end of links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc

from node.net.link import LinkLimits, LinkMember, LiveLink, Received, read_message, refusal
from node.net.link_handshake import SERVICE, check_hello, hello_in, hello_of, stream_options, unreachable
from node.net.peer_address import target_of
from node.net.streams import STREAM_ERRORS, status_of, text_of
from node.security.channels import open_channel, out_of_date, tls_failure
from node.security.credentials import Credentials, stamp
from protocol.errors import ErrorCode
from protocol.server.line import UNLIMITED, Line
from protocol.trust.names import tls_name
from protocol.wire.link_message import LinkMessage
from protocol.wire.rpc_errors import error_from_rpc

_RETRY_SECONDS = 0.2
PATIENCE_SECONDS = 4.0
"""After so long without any answer the caller is told: before the round can close without its replica."""
_background: set[asyncio.Task[None]] = set()  # asyncio holds only weak references to tasks


async def dial(
    endpoint: str,
    here: LinkMember,
    neighbour: LinkMember,
    limits: LinkLimits,
    deadline: float,
    credentials: Credentials,
    received: Received | None = None,
    line: Line = UNLIMITED,
    on_silence: Callable[[str], None] = lambda why: None,
) -> LiveLink:
    """Open the link from `here` to `neighbour` at `endpoint`; try again for `deadline` seconds.

    Calls `on_silence` with the reason, once, if nothing answers at the endpoint for some seconds.

    Raises HetnodeError: NEIGHBOUR_UNREACHABLE, at once if no peer may have the endpoint; CERTIFICATE_REFUSED
    if another peer answers; or the refusal of the neighbour.
    """
    unanswered = ""
    silence = asyncio.get_running_loop().call_later(
        PATIENCE_SECONDS, lambda: on_silence(unanswered or "nothing answers there")
    )
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(deadline):
                while True:
                    try:
                        target = await target_of(endpoint, neighbour.name)
                        break
                    except OSError as error:
                        unanswered = f"({error})"
                    await asyncio.sleep(_RETRY_SECONDS)
                channel = open_channel(target, credentials, tls_name(neighbour.peer), stream_options())
                stack.push_async_callback(channel.close)
                method, encode, decode = f"/{SERVICE}/Exchange", LinkMessage.to_bytes, LinkMessage.from_bytes
                exchange: Any = channel.stream_stream(method, encode, decode)
                while True:
                    call = exchange()
                    try:
                        await _greet(call, here, neighbour)
                        break
                    except STREAM_ERRORS:
                        why = await _why_to_retry(call, endpoint, neighbour)
                        if not why:
                            silence.cancel()  # the neighbour answers
                        unanswered = why or unanswered
                    # The neighbour has not seen the plan yet, or is starting.
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            why = f"no answer from {endpoint} within {deadline:.0f} s {unanswered}".strip()
            raise unreachable(neighbour, why) from None
        finally:
            silence.cancel()
        stack.pop_all()  # from here on the channel lives as long as the link
    link = LiveLink(neighbour, call.read, call.write, limits, received, line)
    closing = asyncio.create_task(_close_after(link, call, channel))
    _background.add(closing)
    closing.add_done_callback(_background.discard)
    return link


async def _close_after(link: LiveLink, call: Any, channel: grpc.aio.Channel) -> None:
    await link.wait_closed()
    call.cancel()
    await channel.close()


async def _greet(call: Any, here: LinkMember, neighbour: LinkMember) -> None:
    """Exchange greetings. Raises one of STREAM_ERRORS, or a HetnodeError for a wrong other end."""
    await call.write(hello_of(here))
    hello = hello_in(await read_message(call.read()))
    if hello is None:
        raise unreachable(neighbour, "it closed the stream without a greeting")
    check_hello(hello, neighbour)


async def _why_to_retry(call: Any, endpoint: str, neighbour: LinkMember) -> str:
    """gRPC's message on a failed call that may succeed later.

    Raises HetnodeError if it cannot succeed: CERTIFICATE_REFUSED, or the refusal of the neighbour.
    """
    status = await status_of(call)
    if why := tls_failure(status):
        if out_of_date(why):
            why += f"; the clock of this machine says {stamp(time.time())}"
        raise refusal(
            ErrorCode.CERTIFICATE_REFUSED,
            f"what answers at {endpoint} has no certificate of {neighbour.peer} ({why})",
        ) from None
    error = error_from_rpc(status)
    # UNKNOWN_PEER may end: the neighbour may still follow an older plan.
    if error is not None and error.code is not ErrorCode.UNKNOWN_PEER:
        raise error from None
    if error is None and status.code() is grpc.StatusCode.UNAVAILABLE:
        return text_of(status)
    return ""
