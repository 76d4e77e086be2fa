"""Tells the coordinator what this member has measured in a round, without holding its training up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.status import Measurement

ANSWER_SECONDS = 1.0
"""Longest wait for the answer. The coordinator of a large swarm may need longer when a round ends for all."""


class Measurements:
    """What the coordinator has to hear of this member's rounds. Belongs to one event loop.

    Args:
        tell: tells one measurement, and may raise.
    """

    def __init__(self, tell: Callable[[Measurement], Awaitable[None]]) -> None:
        self._tell = tell
        self._telling: asyncio.Future[None] | None = None

    async def tell(self, measured: Measurement) -> None:
        """Tell it after the one before, and wait ANSWER_SECONDS at most. Raises what telling has raised."""
        await self.told()
        telling = self._telling = asyncio.ensure_future(self._tell(measured))
        await asyncio.wait({telling}, timeout=ANSWER_SECONDS)
        if telling.done():
            await self.told()

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
