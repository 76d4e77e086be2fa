"""The production worker in the process of the test: it handles one call after the other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from node.ipc.channel import Buffer, Reply
from node.ipc.typed_calls import handlers, name_of
from node.ipc.worker_calls import Apply, BeginRound, EndInnerPhase
from node.worker.worker import Worker
from protocol.errors import ErrorCode, HetnodeError
from tests.support.fault_script import Killed
from tests.virtual.loop import current_process

log = logging.getLogger(__name__)


class VirtualWorker:
    """Stands for the :class:`node.ipc.channel.Child` that a worker's process is.

    Args:
        seconds: how long a microbatch takes on the virtual clock, which moves at the end of an inner step.

    The worker reports these seconds as its time of computing, because real seconds differ from run to run.
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
        process = current_process.get()
        if process is not None and process.is_unwound:
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
                await asyncio.get_running_loop().create_future()  # this process is over
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
    """Encode and decode `body`, as between two processes."""
    return json.loads(json.dumps(body))
