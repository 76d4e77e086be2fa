"""The production worker without its process: called in the loop, one call after the other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from node.ipc.channel import Buffer, Reply
from node.ipc.typed_calls import name_of
from node.ipc.worker_calls import Apply, BeginRound, EndInnerPhase
from node.worker.worker import Worker, handlers
from protocol.errors import ErrorCode, HetnodeError
from tests.support.fault_script import Killed
from tests.virtual.loop import current_life

log = logging.getLogger(__name__)


class VirtualWorker:
    """Stands for the :class:`node.ipc.channel.Child` that a worker's process is.

    Args:
        seconds: how long a microbatch of an inner step takes on the virtual clock. All of a step's pass at
            its end.

    It says that it computes for so long, too: real seconds would differ from one run to the next.
    """

    pid = 0

    def __init__(self, seconds: float) -> None:
        self.worker = Worker()
        self._handlers = handlers(self.worker)
        self._seconds, self._computed = seconds, 0.0
        self._calls: asyncio.Queue[tuple[asyncio.Future[Reply], str, Any, list[bytes]]] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(), name="worker")

    def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Awaitable[Reply]:
        life = current_life.get()
        if life is not None and life.is_unwound:
            raise HetnodeError(ErrorCode.WORKER_DIED, "The test is over.", "")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((answer, method, _through_json(body), [bytes(blob) for blob in blobs]))
        return answer

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self, grace: float) -> None:
        self._serving.cancel()
        self._closed.set()

    async def _serve(self) -> None:
        while True:
            answer, method, body, blobs = await self._calls.get()
            if method == name_of(BeginRound):
                self._computed = 0.0
            elif method == name_of(Apply):
                seconds = self._seconds * self.worker.trainer.samples.microbatches
                await asyncio.sleep(seconds)
                self._computed += seconds
            try:
                reply = self._handlers[method](body, blobs)
                answer_body = _through_json(reply.body)
                if method == name_of(EndInnerPhase):
                    answer_body["answer"]["compute_seconds"] = self._computed
                result = Reply(answer_body, [bytes(blob) for blob in reply.blobs])
            except Killed:
                await asyncio.get_running_loop().create_future()  # this life is over
            except HetnodeError as error:
                if not answer.done():
                    answer.set_exception(HetnodeError(error.code, error.cause, error.remedy))
            except Exception as error:
                log.exception("call %s failed", method)
                if not answer.done():
                    answer.set_exception(RuntimeError(f"worker: {error!r}"))
            else:
                if not answer.done():
                    answer.set_result(result)


def _through_json(body: Mapping[str, Any]) -> Any:
    """As it would arrive from another process."""
    return json.loads(json.dumps(body))
