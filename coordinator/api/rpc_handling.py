"""The common begin and end of all gRPC calls.

Bytes that are not a valid message are refused with BAD_REQUEST. A HetnodeError becomes the error of the call.
While the coordinator stops, all calls end with UNAVAILABLE.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coordinator.command_loop import Stopped
from coordinator.membership.validation import bad_request
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.tls import identity_of
from protocol.wire.rpc_errors import abort_with

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Service = TypeVar("Service")
Request = TypeVar("Request")
Reply = TypeVar("Reply")

# Logged refusals. Not RATE_LIMITED: a peer that floods the coordinator must not flood its log, too.
_SUSPICIOUS = frozenset(
    (
        ErrorCode.BAD_REQUEST,
        ErrorCode.BANNED,
        ErrorCode.CERTIFICATE_REFUSED,
        ErrorCode.INVITE_EXPIRED,
        ErrorCode.INVITE_FORGED,
        ErrorCode.INVITE_REVOKED,
        ErrorCode.INVITE_UNKNOWN,
        ErrorCode.INVITE_USED,
        ErrorCode.QUARANTINED,
    )
)

_UNDECODABLE = object()


class Decoding(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses bytes that are not a valid message. gRPC itself would log a traceback and answer UNKNOWN."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.request_streaming:
            return handler  # gRPC decodes the messages of a stream one by one, and ends the call itself

        # The deserializer has no context to end the call with, so it leaves a mark for the handler.
        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return _UNDECODABLE

        async def answer(request: Any, context: Context) -> Any:
            if request is _UNDECODABLE:
                await _end(context, _no_message(details.method))
            return await handler.unary_unary(request, context)

        async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
            if request is _UNDECODABLE:
                await _end(context, _no_message(details.method))
            async for reply in handler.unary_stream(request, context):
                yield reply

        way = {"unary_stream": answers} if handler.response_streaming else {"unary_unary": answer}
        return handler._replace(request_deserializer=decode, **way)


def _no_message(method: str) -> HetnodeError:
    return bad_request(f"the bytes of a call of {method} are not a message of that call")


def answering(
    method: Callable[[Service, Request, Context], Awaitable[Reply]],
) -> Callable[[Service, Request, Context], Awaitable[Reply]]:
    """Decorates a call with one reply: turns errors into the end of the call."""

    @wraps(method)
    async def answer(self: Service, request: Request, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except (HetnodeError, Stopped) as end:
            await _end(context, end)

    return answer


def streaming(
    method: Callable[[Service, Request, Context], AsyncIterator[Reply]],
) -> Callable[[Service, Request, Context], AsyncIterator[Reply]]:
    """Decorates a call with a stream of replies: turns errors into the end of the call."""

    @wraps(method)
    async def answers(self: Service, request: Request, context: Context) -> AsyncIterator[Reply]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except (HetnodeError, Stopped) as end:
            await _end(context, end)

    return answers


async def _end(context: Context, end: HetnodeError | Stopped) -> NoReturn:
    if isinstance(end, HetnodeError):
        if end.code in _SUSPICIOUS:
            log.warning("refused %s (%s): %s", identity_of(context) or "no identity", context.peer(), end)
        await abort_with(context, end)
    # Nodes repeat calls that end with UNAVAILABLE until the coordinator is back.
    await context.abort(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
    raise AssertionError("abort returned")
