"""gRPC without sockets: stands for ``grpc.aio.server`` and ``grpc.aio.secure_channel`` in a virtual swarm.

Stubs, servicers, messages, interceptors, statuses and trailing metadata are the real ones, and messages
travel as bytes. A machine proves who it is by running: no TLS.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc

from protocol.trust.tls import OPERATOR_URI, peer_of
from tests.virtual.loop import Life, current_life, start
from tests.virtual.network import OPERATOR, Network, here

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 20.0
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Status:
    """How a call has ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        empty = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self.code, empty, grpc.aio.Metadata(*self.metadata), self.details)


class Unavailable(Exception):
    """No connection to the server."""


class Mailbox:
    """Messages in one direction. `get` returns None once it is closed and empty."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def get(self) -> bytes | None:
        while not self._messages:
            if self._closed:
                return None
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return self._messages.popleft()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class RpcTalk:
    """One call between two machines, from its first message to its status."""

    def __init__(self, network: Network, server: VirtualServer) -> None:
        self.caller, self.host = here(), server.name
        self.caller_life, self.host_life, self.server = current_life.get(), server.life, server
        self.requests, self.replies = Mailbox(), Mailbox()
        self.status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._network = network
        self._handler: asyncio.Task[None] | None = None
        network.opened(self)

    def begin(self, handling: Callable[[RpcTalk], Any]) -> None:
        self._handler = start(self.host_life, handling(self), name="handler")

    async def request(self, message: bytes) -> None:
        await self._network.travel(self.caller, self.host, len(message))
        self.requests.put(message)

    async def reply(self, message: bytes) -> None:
        await self._network.travel(self.host, self.caller, len(message))
        self.replies.put(message)

    async def end(self, status: Status) -> None:
        """The server has nothing more to say."""
        await self._network.travel(self.host, self.caller, 0)
        self._close(status)

    def break_off(self, why: str) -> None:
        self._close(Status(grpc.StatusCode.UNAVAILABLE, why))
        if self._handler is not None:
            self._handler.cancel()

    def cancel(self) -> None:
        """The caller no longer wants it."""
        if not self.status.done():
            self._close(Status(grpc.StatusCode.CANCELLED, "cancelled"))
            if self._handler is not None:
                self._handler.cancel()

    def _close(self, status: Status) -> None:
        if not self.status.done():
            self.status.set_result(status)
        self.replies.close()
        self.requests.close()
        self._network.ended(self)


class VirtualContext:
    """A servicer's side of a call."""

    def __init__(self, talk: RpcTalk, uri: str, handler: Any) -> None:
        self._talk, self._uri, self._handler = talk, uri, handler
        self.status = Status(grpc.StatusCode.OK)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"peer_uri": [self._uri.encode()]}

    def peer(self) -> str:
        return self._talk.caller

    async def read(self) -> Any:
        message = await self._talk.requests.get()
        return grpc.aio.EOF if message is None else self._handler.request_deserializer(message)

    async def write(self, message: Any) -> None:
        if self._talk.status.done():
            raise grpc.aio.UsageError("the call has ended")
        await self._talk.reply(self._handler.response_serializer(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self.status = Status(code, details, trailing_metadata)
        raise grpc.aio.AbortError


class VirtualServer:
    """What ``grpc.aio.server`` returns, for the machine that runs now."""

    def __init__(self, network: VirtualGrpc, interceptors: Sequence[Any]) -> None:
        life = current_life.get()
        assert life is not None, "only a machine can serve"
        self.life, self.name, self._grpc = life, life.name, network
        self._interceptors = tuple(interceptors)
        self._services: list[Any] = []
        self._addresses: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The same handlers once more."""

    def add_secure_port(self, address: str, credentials: object) -> int:
        """The host is always the machine itself, by its name."""
        port = int(address.rpartition(":")[2]) or self._grpc.free_port()
        self._addresses.append(f"{self.name}:{port}")
        return port

    async def start(self) -> None:
        self._grpc.listens(self, self._addresses)

    async def stop(self, grace: float | None) -> None:
        self._grpc.listens_no_more(self)

    async def serve(self, talk: RpcTalk, path: str) -> None:
        """Handle one call."""
        handler = await self._handler(path)
        context = VirtualContext(talk, self._grpc.uri_of(talk.caller), handler)
        status = Status(grpc.StatusCode.CANCELLED, "cancelled")
        try:
            await self._answer(handler, talk, context)
            status = context.status
        except grpc.aio.AbortError:
            status = context.status
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("%s failed", path)
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            if not talk.status.done():
                await talk.end(status)

    async def _answer(self, handler: Any, talk: RpcTalk, context: VirtualContext) -> None:
        if handler.request_streaming:
            await handler.stream_stream(_requests(context), context)
            return
        message = await talk.requests.get()
        if message is None:
            return
        request = handler.request_deserializer(message)
        if handler.response_streaming:
            async for reply in handler.unary_stream(request, context):
                await context.write(reply)
        else:
            await context.write(await handler.unary_unary(request, context))

    async def _handler(self, path: str) -> Any:
        async def found(details: Any) -> Any:
            candidates = (service.service(details) for service in self._services)
            return next(handler for handler in candidates if handler is not None)

        look_up: Callable[[Any], Awaitable[Any]] = found
        for interceptor in reversed(self._interceptors):

            def intercepted(details: Any, inner: Any = look_up, through: Any = interceptor) -> Awaitable[Any]:
                return through.intercept_service(inner, details)  # type: ignore[no-any-return]

            look_up = intercepted
        return await look_up(SimpleNamespace(method=path, invocation_metadata=()))


async def _requests(context: VirtualContext) -> AsyncIterator[Any]:
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message


class VirtualCall:
    """A caller's side of a call with streams; both ends of it, or the server's alone."""

    def __init__(
        self, channel: VirtualChannel, path: str, coders: Coders, options: Mapping[str, Any]
    ) -> None:
        self._channel, self._path, self._coders = channel, path, coders
        self._talk: RpcTalk | None = None
        self._status: Status | None = None
        self._opening = asyncio.ensure_future(self._open(bool(options.get("wait_for_ready"))))
        self._sending: asyncio.Future[None] | None = None

    def send_only(self, request: Any) -> VirtualCall:
        """Send one request, in the background, as the only one."""
        self._sending = asyncio.ensure_future(self._send(request))
        return self

    async def write(self, message: Any) -> None:
        await self._opening
        if self._talk is None or self._talk.status.done():
            raise (await self._final()).error()
        await self._talk.request(self._coders.encode(message))

    def done_writing(self) -> None:
        if self._talk is not None:
            self._talk.requests.close()

    async def read(self) -> Any:
        await self._opening
        message = await self._talk.replies.get() if self._talk else None
        if message is not None:
            return self._coders.decode(message)
        status = await self._final()
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
        if self._talk is not None:
            self._talk.cancel()
        return True

    async def code(self) -> grpc.StatusCode:
        return (await self._final()).code

    async def details(self) -> str:
        return (await self._final()).details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._final()).metadata)

    async def _open(self, patient: bool) -> None:
        try:
            self._talk = await self._channel.open(self._path, patient)
        except Unavailable as error:
            self._status = Status(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _send(self, request: Any) -> None:
        await self._opening
        if self._talk is not None:
            await self._talk.request(self._coders.encode(request))

    async def _final(self) -> Status:
        if not self._opening.cancelled():
            await self._opening
        if self._status is None:
            assert self._talk is not None
            self._status = await asyncio.shield(self._talk.status)
        return self._status


@dataclass(frozen=True)
class Coders:
    """How a method's messages become bytes and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


class VirtualChannel:
    """What ``grpc.aio.secure_channel`` returns."""

    def __init__(self, network: VirtualGrpc, address: str) -> None:
        self._grpc, self._address = network, address
        self._calls: list[Any] = []

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        coders = Coders(request_serializer, response_deserializer)

        def call(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            return self._keep(
                asyncio.ensure_future(self._ask(path, coders, request, timeout, wait_for_ready))
            )

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        coders = Coders(request_serializer, response_deserializer)
        return lambda request, **options: self._keep(
            VirtualCall(self, path, coders, options).send_only(request)
        )

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        coders = Coders(request_serializer, response_deserializer)
        return lambda **options: self._keep(VirtualCall(self, path, coders, options))

    async def open(self, path: str, patient: bool) -> RpcTalk:
        server = await self._grpc.connect(self._address, patient)
        talk = RpcTalk(self._grpc.network, server)
        talk.begin(lambda talk: server.serve(talk, path))
        return talk

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    def _keep(self, call: Any) -> Any:
        self._calls = [old for old in self._calls if not getattr(old, "done", bool)()]
        self._calls.append(call)
        return call

    async def _ask(
        self, path: str, coders: Coders, request: Any, seconds: float | None, patient: bool
    ) -> Any:
        message = coders.encode(request)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(self._grpc.deliveries(path) - 1):
                    await self._send_again(path, message)
                talk = await self.open(path, patient)
                try:
                    await talk.request(message)
                    reply = await talk.replies.get()
                    status = await asyncio.shield(talk.status)
                finally:
                    talk.cancel()
        except TimeoutError:
            raise Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded").error() from None
        except Unavailable as error:
            raise Status(grpc.StatusCode.UNAVAILABLE, str(error)).error() from None
        if status.code is not grpc.StatusCode.OK:
            raise status.error()
        assert reply is not None
        return coders.decode(reply)

    async def _send_again(self, path: str, message: bytes) -> None:
        """A repetition of the call whose answer nobody hears."""
        talk = await self.open(path, patient=False)
        await talk.request(message)


class VirtualGrpc:
    """All servers of a virtual swarm.

    Attributes:
        duplicated: methods, by the end of their paths, of which every call arrives twice.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.duplicated: set[str] = set()
        self._servers: dict[str, VirtualServer] = {}
        self._uris: dict[str, str] = {OPERATOR: OPERATOR_URI}
        self._ports = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """gRPC is this one meanwhile."""

        def server(*_: Any, interceptors: Sequence[Any] = (), **__: Any) -> VirtualServer:
            return VirtualServer(self, interceptors)

        def channel(address: str, *_: Any, **__: Any) -> VirtualChannel:
            return VirtualChannel(self, address)

        with patch("grpc.aio.server", server), patch("grpc.aio.secure_channel", channel):
            yield

    def knows(self, name: str, uri: str) -> None:
        """The machine `name` has a certificate for `uri`."""
        self._uris[name] = uri

    def uri_of(self, name: str) -> str:
        return self._uris.get(name, "")

    def peer_of(self, name: str) -> str:
        """The peer id of the machine `name`."""
        return str(peer_of(self.uri_of(name)))

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def deliveries(self, path: str) -> int:
        return 2 if path.rpartition("/")[2] in self.duplicated else 1

    def listens(self, server: VirtualServer, addresses: Sequence[str]) -> None:
        self._servers |= dict.fromkeys(addresses, server)
        self.network.announce_change()

    def listens_no_more(self, server: VirtualServer) -> None:
        self._servers = {address: other for address, other in self._servers.items() if other is not server}
        self.network.has_stopped(server)

    def has_died(self, life: Life) -> None:
        """All processes of `life` have ended."""
        self._servers = {address: each for address, each in self._servers.items() if each.life is not life}
        self.network.has_died(life)

    async def connect(self, address: str, patient: bool) -> VirtualServer:
        """The server at `address`; a patient caller waits for it, however long.

        Raises Unavailable.
        """
        clock = asyncio.get_running_loop().time
        caller, host, ends = here(), address.rpartition(":")[0], clock() + _CONNECT_SECONDS
        life = current_life.get()
        while True:
            if life is not None and life.is_unwound:
                raise Unavailable("the test is over")
            may_call, server = self.network.may_call(caller, host), self._servers.get(address)
            if may_call and server is not None:
                await self.network.travel(caller, host, 0)
                if self._servers.get(address) is server:
                    return server
                continue
            if may_call and not patient:
                raise Unavailable(f"connection to {address} refused")
            try:
                async with asyncio.timeout_at(None if patient else ends):
                    await self.network.change()
            except TimeoutError:
                raise Unavailable(f"connection to {address} timed out") from None
