"""Work that something else may put an end to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class AskedToLeave(Exception):
    """This node is to leave, and nobody waits for it."""


async def unless(end: Awaitable[BaseException], work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as `end` is there: that is raised then.

    Both are over when this returns, raises or is cancelled.
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


async def unless_failed(other: asyncio.Task[Any], work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if `other` fails: its error is raised then."""

    async def failed() -> BaseException:
        await asyncio.wait({other})
        error = other.exception()
        if error is None:
            await asyncio.Event().wait()  # there is no end but that of the work
        assert error is not None
        return error

    return await unless(failed(), work)


async def unless_asked(leaving: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of `work`, during which nobody waits for this node.

    Raises AskedToLeave once `leaving` is set.
    """

    async def asked() -> AskedToLeave:
        await leaving.wait()
        return AskedToLeave()

    return await unless(asked(), work)
