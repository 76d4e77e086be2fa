"""The visits of a guest: it takes part, leaves in order when it has to rest, and comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.home.guest.guest import Guest, Rest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Visit:
    """How a visit or a rest ended: whether the run is over, and the folder of the checkpoint, if any."""

    is_over: bool
    kept: Path | None


_FIRST = asyncio.FIRST_COMPLETED

TakePart = Callable[[asyncio.Event], Awaitable[Visit]]
"""Takes part in the run until it is over, or until a while after the given event is set. A cancellation ends
it in order, without delay."""


async def take_turns(
    guest: Guest, leaving: asyncio.Event, take_part: TakePart, rest: Callable[[], Awaitable[Visit]]
) -> Visit | None:
    """Take part while `guest` may, `rest` while it must not, until the run is over or `leaving` is set.

    `rest` runs until it is cancelled, or until the run is over. Returns the last visit; None if there was
    none, or if a visit was ended without delay. Raises every error of `take_part` and `rest`.
    """
    visit: Visit | None = None
    looking = asyncio.create_task(guest.keep_looking(), name="guest")
    try:
        while not leaving.is_set() and not (visit and visit.is_over):
            if guest.rest is None:
                visit = await _visit_once(guest, leaving, take_part)
            else:
                visit = await _rest_once(guest, leaving, rest) or visit
        return visit
    finally:
        looking.cancel()


async def _visit_once(guest: Guest, leaving: asyncio.Event, take_part: TakePart) -> Visit | None:
    departing = asyncio.Event()
    guest.is_here = True
    visiting = asyncio.ensure_future(take_part(departing))
    ending = asyncio.create_task(_end_visit(guest, leaving, departing, visiting))
    try:
        return await visiting
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None  # `_end_visit` has lost its patience
    finally:
        guest.is_here = False
        ending.cancel()


async def _end_visit(
    guest: Guest, leaving: asyncio.Event, departing: asyncio.Event, visiting: asyncio.Future[Visit]
) -> None:
    """End the visit when the node has to leave for good, or has to rest."""
    asked = asyncio.create_task(leaving.wait())
    resting = asyncio.create_task(guest.until(lambda rest: rest is not None))
    try:
        await asyncio.wait({asked, resting}, return_when=_FIRST)
        departing.set()
        if (rest := guest.rest) is None or leaving.is_set():
            return  # who asked the process to end also limits its time
        log.warning("this node leaves the run for now, because %s", rest.reason)
        await _wait_patiently(guest, visiting, rest)
        visiting.cancel()
    finally:
        asked.cancel()
        resting.cancel()


async def _wait_patiently(guest: Guest, visiting: asyncio.Future[Visit], rest: Rest) -> None:
    """Wait for the end of the visit as long as `rest` allows, or a later rest that is in a hurry."""

    def is_hurry(found: Rest | None) -> bool:
        return found is not None and found.patience < rest.patience

    while not visiting.done():
        hurry = asyncio.create_task(guest.until(is_hurry))
        try:
            tasks: set[asyncio.Future[Any]] = {visiting, hurry}
            done, _ = await asyncio.wait(tasks, timeout=rest.patience, return_when=_FIRST)
        finally:
            hurry.cancel()
        if not done:
            return
        rest = guest.rest or rest


async def _rest_once(
    guest: Guest, leaving: asyncio.Event, rest: Callable[[], Awaitable[Visit]]
) -> Visit | None:
    """Rest until the node may take part, or has to leave for good: then None. Or until the run is over."""
    assert guest.rest is not None
    log.info("this node rests, because %s", guest.rest.reason)
    resting = asyncio.ensure_future(rest())
    welcome = asyncio.create_task(guest.until(lambda found: found is None))
    asked = asyncio.create_task(leaving.wait())
    try:
        await asyncio.wait({resting, welcome, asked}, return_when=_FIRST)
        if resting.done():
            return resting.result()
    finally:
        for task in (resting, welcome, asked):
            task.cancel()
        await asyncio.gather(resting, return_exceptions=True)
    if not leaving.is_set():
        log.info("this node takes part again")
    return None
