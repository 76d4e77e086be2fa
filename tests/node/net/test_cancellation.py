from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from node.net.cancellation import run_to_the_end


async def test_work_goes_on_when_its_caller_is_cancelled_and_its_later_failure_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # what other tests have left
    go_on, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        done.set()
        raise ValueError("the worker has ended")

    caller = asyncio.create_task(run_to_the_end(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    go_on.set()
    with caplog.at_level(logging.ERROR):
        await done.wait()
        await asyncio.sleep(0)
        assert caller.cancelled()
        del caller
        gc.collect()  # asyncio reports a failure that nobody has taken when the task is freed
    assert not caplog.records


async def test_a_caller_that_waits_gets_the_failure() -> None:
    async def work() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await run_to_the_end(work())
