"""The caller's side of virtual gRPC: a stub cannot tell it from the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from tests.virtual.rpc_call import OpenCall, Shown, Status, Unavailable

if TYPE_CHECKING:
    from tests.virtual.rpc import VirtualGrpc


class VirtualCall:
    """A call whose replies are a stream; its requests are a stream or one message."""

    def __init__(
        self, channel: VirtualChannel, path: str, codec: MessageCodec, options: Mapping[str, Any]
    ) -> None:
        self._channel, self._path, self._codec = channel, path, codec
        self._call: OpenCall | None = None
        self._status: Status | None = None
        opening = self._open(bool(options.get("wait_for_ready")), options.get("metadata", ()))
        self._opening = asyncio.ensure_future(opening)
        self._sending: asyncio.Future[None] | None = None

    def send_only(self, request: Any) -> VirtualCall:
        """Send the only request of the call in the background."""
        self._sending = asyncio.ensure_future(self._send(request))
        return self

    async def write(self, message: Any) -> None:
        await self._opening
        if self._call is None or self._call.status.done():
            raise (await self._final_status()).error()
        await self._call.request(self._codec.encode(message))

    def done_writing(self) -> None:
        if self._call is not None:
            self._call.requests.close()

    async def read(self) -> Any:
        await self._opening
        message = await self._call.replies.get() if self._call else None
        if message is not None:
            return self._codec.decode(message)
        status = await self._final_status()
        if status.code is not grpc.StatusCode.OK:
            raise status.error()
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        self._opening.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self._status = self._status or Status(grpc.StatusCode.CANCELLED, "cancelled")
        if self._call is not None:
            self._call.cancel()
        return True

    async def code(self) -> grpc.StatusCode:
        return (await self._final_status()).code

    async def details(self) -> str:
        return (await self._final_status()).details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._final_status()).metadata)

    async def _open(self, wait_for_ready: bool, shown: Shown) -> None:
        try:
            self._call = await self._channel.open(self._path, wait_for_ready, shown)
        except Unavailable as error:
            self._status = Status(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _send(self, request: Any) -> None:
        await self._opening
        if self._call is not None:
            await self._call.request(self._codec.encode(request))

    async def _final_status(self) -> Status:
        if not self._opening.cancelled():
            await self._opening
        if self._status is None:
            assert self._call is not None
            self._status = await asyncio.shield(self._call.status)
        return self._status


@dataclass(frozen=True)
class MessageCodec:
    """The codec of a method: requests to bytes, bytes to replies."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


class VirtualChannel:
    """What ``grpc.aio.secure_channel`` returns."""

    def __init__(self, virtual_grpc: VirtualGrpc, address: str) -> None:
        self._grpc, self._address = virtual_grpc, address
        self._calls: list[Any] = []

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        codec = MessageCodec(request_serializer, response_deserializer)

        def call(
            request: Any, timeout: float | None = None, wait_for_ready: bool = False, metadata: Shown = ()
        ) -> Any:
            calling = self._call_unary(path, codec, request, timeout, wait_for_ready, metadata)
            return self._remember(asyncio.ensure_future(calling))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        codec = MessageCodec(request_serializer, response_deserializer)
        return lambda request, **options: self._remember(
            VirtualCall(self, path, codec, options).send_only(request)
        )

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        codec = MessageCodec(request_serializer, response_deserializer)
        return lambda **options: self._remember(VirtualCall(self, path, codec, options))

    async def open(self, path: str, wait_for_ready: bool, shown: Shown = ()) -> OpenCall:
        server = await self._grpc.connect(self._address, wait_for_ready)
        call = OpenCall(self._grpc.network, server, shown)
        call.handle(lambda call: server.serve(call, path))
        return call

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    def _remember(self, call: Any) -> Any:
        self._calls = [old for old in self._calls if not getattr(old, "done", bool)()]
        self._calls.append(call)
        return call

    async def _call_unary(
        self,
        path: str,
        codec: MessageCodec,
        request: Any,
        seconds: float | None,
        wait_for_ready: bool,
        shown: Shown,
    ) -> Any:
        message = codec.encode(request)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(self._grpc.deliveries(path) - 1):
                    await self._send_duplicate(path, message)
                call = await self.open(path, wait_for_ready, shown)
                try:
                    await call.request(message)
                    reply = await call.replies.get()
                    status = await asyncio.shield(call.status)
                finally:
                    call.cancel()
        except TimeoutError:
            raise Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded").error() from None
        except Unavailable as error:
            raise Status(grpc.StatusCode.UNAVAILABLE, str(error)).error() from None
        if status.code is not grpc.StatusCode.OK:
            raise status.error()
        assert reply is not None
        return codec.decode(reply)

    async def _send_duplicate(self, path: str, message: bytes) -> None:
        """Send the call once more; the caller ignores the reply."""
        call = await self.open(path, wait_for_ready=False)
        await call.request(message)
