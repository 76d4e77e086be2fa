"""How tests wait for other processes: poll a condition until it holds, and fail at a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

_POLL_SECONDS = 0.05


def wait_until(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    """Return as soon as `condition` holds; AssertionError with `what` after `seconds`.

    A function as `what` is called only for the error, for example to read a log.
    """
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, _failure(seconds, what)
        time.sleep(_POLL_SECONDS)


async def until(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    """:func:`wait_until` for coroutines."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, _failure(seconds, what)
        await asyncio.sleep(_POLL_SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _failure(seconds: float, what: str | Callable[[], str]) -> str:
    return f"not within {seconds:.0f} s: {what if isinstance(what, str) else what()}"
