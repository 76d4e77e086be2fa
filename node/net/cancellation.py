"""Work that is cancelled when something else happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LeaveRequested(Exception):
    """This node was asked to leave while no other node waited for it."""


async def cancel_when(end: Awaitable[BaseException], work: Awaitable[T]) -> T:
    """The result of `work`. When `end` completes first, `work` is cancelled and that error is raised.

    Both have ended when this returns, raises or is cancelled.
    """
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ending.result()
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def cancel_when_failed(other: asyncio.Task[object], work: Awaitable[T]) -> T:
    """The result of `work`. When `other` fails first, `work` is cancelled, and that error is raised."""

    async def failed() -> BaseException:
        await asyncio.wait({other})
        error = other.exception()
        if error is None:
            await asyncio.Event().wait()  # `other` has succeeded: only the end of `work` counts now
        assert error is not None
        return error

    return await cancel_when(failed(), work)


async def cancel_when_leaving(leaving: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of `work`, during which no other node waits for this one.

    Raises LeaveRequested once `leaving` is set.
    """

    async def requested() -> LeaveRequested:
        await leaving.wait()
        return LeaveRequested()

    return await cancel_when(requested(), work)


async def run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which goes on when the caller is cancelled. Then its failure is not reported."""
    task = asyncio.create_task(work)
    # What has cancelled the caller, such as the end of the worker, is the cause of that failure.
    task.add_done_callback(_note_failure)
    await asyncio.shield(task)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
