"""One gRPC call between two machines of a virtual swarm: its messages, its status and its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from tests.virtual.loop import VirtualProcess, current_process, start
from tests.virtual.network import Network, current_machine

Metadata = Sequence[tuple[str, str]]
Shown = Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class Status:
    """The result of a call: gRPC's status code, text and trailing metadata."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        empty = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self.code, empty, grpc.aio.Metadata(*self.metadata), self.details)


class Unavailable(Exception):
    """No connection to the server."""


class MessageQueue:
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


class Server(Protocol):
    """The part of a server that a call needs."""

    name: str
    process: VirtualProcess


class OpenCall:
    """One call between two machines, from its first message to its status. `shown`: its metadata."""

    def __init__(self, network: Network, server: Server, shown: Shown = ()) -> None:
        self.shown = shown
        self.caller, self.host = current_machine(), server.name
        self.caller_process, self.host_process, self.server = current_process.get(), server.process, server
        self.requests, self.replies = MessageQueue(), MessageQueue()
        self.status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._network = network
        self._handler: asyncio.Task[None] | None = None
        network.add(self)

    def handle(self, handler: Callable[[OpenCall], Any]) -> None:
        """Run `handler` as a task of the server's process."""
        self._handler = start(self.host_process, handler(self), name="handler")

    async def request(self, message: bytes) -> None:
        await self._network.transfer(self.caller, self.host, len(message))
        self.requests.put(message)

    async def reply(self, message: bytes) -> None:
        await self._network.transfer(self.host, self.caller, len(message))
        self.replies.put(message)

    async def end(self, status: Status) -> None:
        """Send the status, the last message of the server."""
        await self._network.transfer(self.host, self.caller, 0)
        self._close(status)

    def fail(self, why: str) -> None:
        """Both ends see that the connection has failed."""
        self._close(Status(grpc.StatusCode.UNAVAILABLE, why))
        if self._handler is not None:
            self._handler.cancel()

    def cancel(self) -> None:
        """The caller cancels the call."""
        if not self.status.done():
            self._close(Status(grpc.StatusCode.CANCELLED, "cancelled"))
            if self._handler is not None:
                self._handler.cancel()

    def _close(self, status: Status) -> None:
        if not self.status.done():
            self.status.set_result(status)
        self.replies.close()
        self.requests.close()
        self._network.remove(self)
