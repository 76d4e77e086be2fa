"""A cancelled step or validation of several ranks has queued whole turns of its operations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.core.train.pipeline import Pipeline
from node.ipc.worker_calls import Backward, Evaluate, Forward
from protocol.types import Plan
from tests.support.running_replica import replica_of, spec_of

SPEC = spec_of(**{"inner.microbatches": 11, "data.validation_batches": 11})


class HeldWorker:
    """Answers as many operations as the test lets it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.queued: list[Forward | Backward | Evaluate] = []
        self.answers = asyncio.Semaphore(0)

    async def queue(self, request: Forward | Backward | Evaluate) -> Any:
        self.queued.append(request)
        return self

    async def answer(self) -> None:
        await self.answers.acquire()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("answered", [0, 1, 2, 3, 5, 8])
async def test_each_rank_gets_equally_many_passes_of_a_step_that_is_cancelled(
    ranks: int, answered: int
) -> None:
    replica = replica_of(SPEC, 1)
    for is_step in (True, False):
        worker = HeldWorker(ranks)
        pipeline = Pipeline(SPEC, Plan(1, 1, 0, (replica,), "test"), replica, 0, worker, None, None)  # type: ignore[arg-type]
        work: Any = pipeline.inner_step(1, 0) if is_step else pipeline.validate(1)
        task = asyncio.create_task(work)
        for _ in range(answered):
            worker.answers.release()
        for _ in range(50):  # it goes as far as it can
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        passes = [sum(each.microbatch % ranks == rank for each in worker.queued) for rank in range(ranks)]
        # The last turn has no microbatch for some ranks, which repeat another one.
        is_whole = len(worker.queued) == (22 if is_step else 11)
        assert len({*passes}) == 1 or is_whole
        assert len(worker.queued) > answered, "the worker has more to do"
