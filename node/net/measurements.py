"""Tells the coordinator what this member has measured in a round, without holding its training up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node.net.spreading import random_pause
from protocol.status import Measurement

ANSWER_SECONDS = 1.0
"""Longest wait for the answer."""


class Measurements:
    """What the coordinator has to hear of this member's rounds. Belongs to one event loop.

    A round ends for all members of a swarm at once, so they tell their measurements one after the other. A
    member waits for the answer only in a swarm that is so small that it comes at once.

    Args:
        tell: tells one measurement, and may raise.
        peers: the members of the present plan.
    """

    def __init__(self, tell: Callable[[Measurement], Awaitable[None]], peers: Callable[[], int]) -> None:
        self._tell, self._peers = tell, peers
        self._telling: asyncio.Future[None] | None = None

    async def tell(self, measured: Measurement) -> None:
        """Tell it after the one before, and wait ANSWER_SECONDS at most. Raises what telling has raised."""
        await self.told()
        pause = random_pause(self._peers())
        telling = self._telling = asyncio.ensure_future(self._tell_after(pause, measured))
        if pause < ANSWER_SECONDS:
            await asyncio.wait({telling}, timeout=ANSWER_SECONDS)
        if telling.done():
            await self.told()

    async def _tell_after(self, pause: float, measured: Measurement) -> None:
        await asyncio.sleep(pause)
        await self._tell(measured)

    async def told(self) -> None:
        """Wait until the coordinator has heard of all rounds. Raises what telling has raised, once."""
        telling, self._telling = self._telling, None
        if telling is not None:
            await telling

    def drop(self) -> None:
        """Stop telling."""
        if self._telling is not None:
            self._telling.cancel()
        self._telling = None
