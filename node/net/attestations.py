"""Tells the coordinator the digests of this member's anchors, while the next inner phase goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node.net.spreading import random_pause
from protocol.types import Part

Anchor = tuple[int, Part]
"""Stage and part."""


class Attestations:
    """The anchors of which the coordinator has to hear. Belongs to one event loop.

    All members of a large swarm apply a decision at the same time. So they tell their digests one after the
    other, and nobody waits for that before it trains.

    Args:
        tell: tells the coordinator the newest digest of an anchor, and may raise.
        peers: the members of the present plan.
    """

    def __init__(self, tell: Callable[[int, Part], Awaitable[None]], peers: Callable[[], int]) -> None:
        self._tell, self._peers = tell, peers
        self._untold: dict[Anchor, None] = {}  # in the order of their commits
        self._telling: asyncio.Task[Exception | None] | None = None
        self._failed = asyncio.Event()

    def add(self, stage: int, part: Part) -> None:
        """Tell the digest of this anchor soon. After a failure nothing is told until :meth:`drop`."""
        self._untold[stage, part] = None
        if not self._failed.is_set() and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell_all())

    async def told(self) -> None:
        """Wait until the coordinator has heard of all anchors. Raises what telling has raised, once."""
        if (telling := self._telling) is not None:
            await asyncio.wait({telling})
            error = None if telling.cancelled() else telling.result()
            if error is not None:
                self.drop()
                raise error

    async def failure(self) -> Exception:
        """Wait for a failure, drop it and return it."""
        await self._failed.wait()
        assert self._telling is not None, "no task, no failure"
        error = self._telling.result()
        assert error is not None, "it has failed"
        self.drop()
        return error

    def drop(self) -> None:
        """Forget what is untold, and a failure: there are other anchors now, or nobody needs to hear."""
        if self._telling is not None:
            self._telling.cancel()
        self._telling = None
        self._untold.clear()
        self._failed.clear()

    async def _tell_all(self) -> Exception | None:
        """Tell all anchors that are due. Returns what telling has raised."""
        try:
            await asyncio.sleep(random_pause(self._peers()))
            while self._untold:
                anchor = next(iter(self._untold))
                del self._untold[anchor]  # before the call: a newer digest may become due during it
                await self._tell(*anchor)
        except Exception as error:
            self._failed.set()
            return error
        return None
