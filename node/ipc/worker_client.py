"""The client of the worker process: typed calls, which pass the hooks of the node."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from node import hooks
from node.ipc.worker_calls import Abandon
from protocol.wire.typed_calls import Call, Reply, Request, decode_answer, encode_request

Answer = TypeVar("Answer")


class Channel(Protocol):
    """Sends calls to the worker in their order, as :class:`node.ipc.channel.Child` does."""

    def call(self, call: Call) -> Awaitable[Reply]:
        """Queue a call and return the future of its reply."""

    async def wait_closed(self) -> None:
        """Return when the worker has ended."""


@dataclass(frozen=True)
class QueuedCall(Generic[Answer]):
    """A call that is queued at the worker and perhaps done already."""

    request: Request[Answer]
    reply: Awaitable[Reply]

    async def answer(self) -> Answer:
        """Wait for the answer. Raises HetnodeError as the worker raised it, or WORKER_DIED."""
        reply = await self.reply
        await hooks.current().after_worker_call(self.request)
        return decode_answer(self.request, reply)


@dataclass(frozen=True)
class WorkerClient:
    """Calls to the worker at the other end of `channel`; see :mod:`node.ipc.worker_calls`.

    Attributes:
        ranks: the number of processes that answer together, each with a share of the microbatches.
        reads_files: whether all of them can open the files of this machine.
    """

    channel: Channel
    ranks: int = 1
    reads_files: bool = True

    async def call(self, request: Request[Answer]) -> Answer:
        """Queue a call and wait for its answer. Raises as :meth:`QueuedCall.answer`."""
        queued = await self.queue(request)
        return await queued.answer()

    async def guard(self) -> None:
        """Wait until the worker has ended. Then raises HetnodeError WORKER_DIED."""
        await self.channel.wait_closed()
        await self.call(Abandon())  # any call to a process that has ended raises its death

    async def queue(self, request: Request[Answer]) -> QueuedCall[Answer]:
        """Queue a call, behind all that were queued before. Its answer can be awaited later."""
        await hooks.current().before_worker_call(request)
        return QueuedCall(request, self.channel.call(encode_request(request)))
