"""The server's side of virtual gRPC: a servicer cannot tell it from the real one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from tests.virtual.loop import current_process
from tests.virtual.rpc_call import Metadata, OpenCall, Shown, Status

if TYPE_CHECKING:
    from tests.virtual.rpc import VirtualGrpc

log = logging.getLogger(__name__)


class VirtualContext:
    """The `context` that a servicer gets with a call."""

    def __init__(self, call: OpenCall, uri: str, handler: Any) -> None:
        self._call, self._uri, self._handler = call, uri, handler
        self.status = Status(grpc.StatusCode.OK)
        self.done_callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.done_callbacks.append(callback)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"peer_uri": [self._uri.encode()]}

    def peer(self) -> str:
        return self._call.caller

    def invocation_metadata(self) -> Shown:
        return self._call.shown

    async def read(self) -> Any:
        message = await self._call.requests.get()
        if message is None:
            return grpc.aio.EOF
        decode = self._handler.request_deserializer
        return decode(message) if decode else message

    async def write(self, message: Any) -> None:
        if self._call.status.done():
            raise grpc.aio.UsageError("the call has ended")
        await self._call.reply(self._handler.response_serializer(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self.status = Status(code, details, trailing_metadata)
        raise grpc.aio.AbortError


class VirtualServer:
    """What ``grpc.aio.server`` returns, for the machine that runs now."""

    def __init__(self, virtual_grpc: VirtualGrpc, interceptors: Sequence[Any]) -> None:
        process = current_process.get()
        assert process is not None, "only a machine can serve"
        self.process, self.name, self._grpc = process, process.name, virtual_grpc
        self._interceptors = tuple(interceptors)
        self._services: list[Any] = []
        self._addresses: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """gRPC's generated code registers the same handlers twice; this server needs them once."""

    def add_secure_port(self, address: str, credentials: object) -> int:
        """Listen on the port of `address`, or on a free one. The host is always this machine."""
        port = int(address.rpartition(":")[2]) or self._grpc.free_port()
        self._addresses.append(f"{self.name}:{port}")
        return port

    async def start(self) -> None:
        self._grpc.add_server(self, self._addresses)

    async def stop(self, grace: float | None) -> None:
        self._grpc.remove_server(self)

    async def serve(self, call: OpenCall, path: str) -> None:
        """Handle one call."""
        handler = await self._handler(path)
        context = VirtualContext(call, self._grpc.uri_of(call.caller), handler)
        status = Status(grpc.StatusCode.CANCELLED, "cancelled")
        try:
            await self._answer(handler, call, context)
            status = context.status
        except grpc.aio.AbortError:
            status = context.status
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("%s failed", path)
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            if not call.status.done():
                await call.end(status)
            for callback in context.done_callbacks:
                callback(context)

    async def _answer(self, handler: Any, call: OpenCall, context: VirtualContext) -> None:
        if handler.request_streaming:
            if handler.response_streaming:
                await handler.stream_stream(_requests(context), context)
            else:
                await context.write(await handler.stream_unary(_requests(context), context))
            return
        message = await call.requests.get()
        if message is None:
            return
        request = handler.request_deserializer(message)
        if handler.response_streaming:
            async for reply in handler.unary_stream(request, context):
                await context.write(reply)
        else:
            await context.write(await handler.unary_unary(request, context))

    async def _handler(self, path: str) -> Any:
        async def find(details: Any) -> Any:
            candidates = (service.service(details) for service in self._services)
            return next(handler for handler in candidates if handler is not None)

        look_up: Callable[[Any], Awaitable[Any]] = find
        for interceptor in reversed(self._interceptors):

            def intercept(
                details: Any, inner: Any = look_up, interceptor: Any = interceptor
            ) -> Awaitable[Any]:
                return interceptor.intercept_service(inner, details)  # type: ignore[no-any-return]

            look_up = intercept
        return await look_up(SimpleNamespace(method=path, invocation_metadata=()))


async def _requests(context: VirtualContext) -> AsyncIterator[Any]:
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message
