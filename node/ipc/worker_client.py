"""Calls to the worker process."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from node import hooks
from node.ipc.channel import Buffer, Reply


class Caller(Protocol):
    """Sends calls to another process, in their order."""

    def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Awaitable[Reply]: ...

    async def wait_closed(self) -> None:
        """Return when the process has ended."""


@dataclass(frozen=True)
class PendingCall:
    """A call that is queued at the worker."""

    _method: str
    _body: Mapping[str, Any]
    _reply: Awaitable[Reply]

    async def result(self) -> Reply:
        reply = await self._reply
        await hooks.current().after_worker_call(self._method, self._body)
        return reply


@dataclass(frozen=True)
class WorkerClient:
    """Calls to the worker behind `caller`, which does them in the order in which they are queued."""

    caller: Caller

    async def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Reply:
        """Queue the call and wait for its answer."""
        pending = await self.queue(method, body, *blobs)
        return await pending.result()

    async def queue(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> PendingCall:
        """Queue the call. Its answer can be awaited later."""
        await hooks.current().before_worker_call(method, body)
        return PendingCall(method, body, self.caller.call(method, body, *blobs))
