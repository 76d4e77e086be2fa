"""What all calls of a gRPC server start and end with: admission, the first message, and errors.

gRPC starts a handler of a call with one request only when the request has arrived, and a caller that never
sends it keeps a place. So every handler is turned into one of a stream of requests: it begins with the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.limits import FairShare
from protocol.server.refusal_log import RefusalLog
from protocol.trust.rate_limit import RateLimit
from protocol.wire.rpc_errors import abort_with

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

FIRST_MESSAGE_SECONDS = 10.0
# Refused calls of one connection; beyond these it is closed. Each refusal costs what a small call costs.
_REFUSALS_AT_ONCE, _REFUSALS_PER_SECOND = 256, 50.0

# Logged refusals. Not RATE_LIMITED and not what happens to honest peers.
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


@dataclass(frozen=True)
class CallPolicy:
    """Who may call.

    Attributes:
        caller_of: who a call is counted for: the holder of its certificate, or its source.
        source_of: the source of a connection, by gRPC's name of the client; for the log.
        drop: closes a connection, by gRPC's name of the client.
        check: raises HetnodeError for a caller that is not served at all; asked before anything else.
        calls: the places for open calls.
        stopping: an error of handlers after which the caller should repeat the call; it gets UNAVAILABLE.
    """

    caller_of: Callable[[Context], str]
    source_of: Callable[[str], str]
    drop: Callable[[str], None]
    check: Callable[[Context], None]
    calls: FairShare
    stopping: type[Exception]
    log: logging.Logger
    first_message_seconds: float = FIRST_MESSAGE_SECONDS


class _LateMessageError(Exception):
    """A caller has not sent its first message in time."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Runs each call of a server under an :class:`CallPolicy`.

    A HetnodeError of a handler becomes the error of the call. Bytes that are not a valid message are refused
    with BAD_REQUEST. A call whose first message does not arrive in time ends with UNAVAILABLE: the caller's
    line or machine stood still. A connection of which very many calls are refused is closed.

    Attributes:
        refused: how many calls were refused, by code.
    """

    def __init__(self, admission: CallPolicy) -> None:
        self._admission, self.refused = admission, Counter[ErrorCode]()
        self._refusals = RefusalLog(admission.log)
        self._patience = RateLimit(_REFUSALS_AT_ONCE, _REFUSALS_PER_SECOND)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method: str = details.method
        if handler.request_streaming:

            async def serve(requests: AsyncIterator[Any], context: Context) -> None:
                await handler.stream_stream(requests, context)

            return handler._replace(stream_stream=self._admitted(serve))
        if handler.response_streaming:

            async def answers(requests: AsyncIterator[bytes], context: Context) -> None:
                request = await self._first(requests, handler.request_deserializer, method)
                async with aclosing(handler.unary_stream(request, context)) as replies:
                    async for reply in replies:
                        await context.write(reply)

            return grpc.stream_stream_rpc_method_handler(
                self._admitted(answers), None, handler.response_serializer
            )

        async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
            request = await self._first(requests, handler.request_deserializer, method)
            return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(self._admitted(answer), None, handler.response_serializer)

    def _admitted(
        self, serve: Callable[[AsyncIterator[Any], Context], Awaitable[Any]]
    ) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
        """`serve` for callers that are admitted, and its errors as the end of the call."""
        calls = self._admission.calls

        async def admitted(requests: AsyncIterator[Any], context: Context) -> Any:
            caller = self._admission.caller_of(context)
            try:
                self._admission.check(context)
                if not calls.take(caller):
                    raise rate_limited(f"{caller[:96]} has too many calls open")
                try:
                    return await serve(requests, context)
                finally:
                    calls.release(caller)
            except HetnodeError as error:
                await self._refuse(context, caller, error)
            except self._admission.stopping:
                # Nodes repeat calls that end with UNAVAILABLE until the coordinator is back.
                await context.abort(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
            except _LateMessageError as late:
                try:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(late))
                finally:
                    self._lose_patience(context)

        return admitted

    async def _first(
        self, requests: AsyncIterator[bytes], decode: Callable[[bytes], Any], method: str
    ) -> Any:
        seconds = self._admission.first_message_seconds
        try:
            async with asyncio.timeout(seconds):
                return decode(await anext(requests))
        except TimeoutError:
            raise _LateMessageError(f"No message came within {seconds:g} s of a call of {method}.") from None
        except StopAsyncIteration:
            raise _bad(f"a call of {method} ended without a message") from None
        except DecodeError:
            raise _bad(f"the bytes of a call of {method} are not a message of that call") from None

    async def _refuse(self, context: Context, caller: str, error: HetnodeError) -> NoReturn:
        self.refused[error.code] += 1
        if error.code in _SUSPICIOUS:
            source = self._admission.source_of(context.peer())
            self._refusals.record(caller if caller == source else f"{caller[:96]} at {source}", error)
        try:
            await abort_with(context, error)
        finally:
            self._lose_patience(context)

    def _lose_patience(self, context: Context) -> None:
        if not self._patience.allows(context.peer(), asyncio.get_running_loop().time()):
            self._admission.drop(context.peer())


def rate_limited(cause: str) -> HetnodeError:
    return HetnodeError(ErrorCode.RATE_LIMITED, f"{cause}.", "Wait a little and try again.")


def _bad(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_REQUEST,
        f"{cause[0].upper()}{cause[1:]}.",
        "Update the older program of the two.",
    )
