"""The production worker in the process of the test: it handles one call after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from random import Random

from node.ipc.worker_calls import Apply, BeginRound, EndInnerPhase
from node.worker.process import NodeWorker
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import Call, Reply, decode_answer, encode_answer, name_of
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
        self.worker = NodeWorker(Random(1))
        self._handlers = self.worker.handlers()
        self._seconds, self._computed = seconds, 0.0
        self._calls: asyncio.Queue[tuple[asyncio.Future[Reply], Call]] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(), name="worker")

    def call(self, call: Call) -> Awaitable[Reply]:
        process = current_process.get()
        if process is not None and process.is_unwound:
            raise HetnodeError(ErrorCode.WORKER_DIED, "The test is over.", "")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((answer, replace(call, blobs=[bytes(blob) for blob in call.blobs])))
        return answer

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self, grace: float) -> None:
        self._serving.cancel()
        self._closed.set()

    async def _serve(self) -> None:
        while True:
            answer, call = await self._calls.get()
            if call.method == name_of(BeginRound):
                self._computed = 0.0
            elif call.method == name_of(Apply):
                seconds = self._seconds * self.worker.trainer.samples.microbatches
                await asyncio.sleep(seconds)
                self._computed += seconds
            try:
                result = self._handlers[call.method](call)
                if call.method == name_of(EndInnerPhase):
                    report = decode_answer(EndInnerPhase(), result)
                    result = encode_answer(EndInnerPhase, replace(report, compute_seconds=self._computed))
                result = replace(result, blobs=[bytes(blob) for blob in result.blobs])
            except Killed:
                await asyncio.get_running_loop().create_future()  # this process is over
            except HetnodeError as error:
                if not answer.done():
                    answer.set_exception(HetnodeError(error.code, error.cause, error.remedy))
            except Exception as error:
                log.exception("call %s failed", call.method)
                if not answer.done():
                    answer.set_exception(RuntimeError(f"worker: {error!r}"))
            else:
                if not answer.done():
                    answer.set_result(result)
