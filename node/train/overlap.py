"""What an exchange and the inner steps that run beside it must know of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Overlap:
    """The overlap of one round's exchange on this member with inner steps of the next round.

    The exchange waits in :meth:`wait_trained` before it applies a decision to any parameter. The training
    waits in :meth:`wait_proposed` before it changes any parameter from which a payload is made.

    Args:
        stages: those of this member.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self._unproposed = set(stages)
        self._proposed, self._trained = asyncio.Event(), asyncio.Event()

    def mark_proposed(self, stage: int) -> None:
        """The payload of `stage` is made, or the stage has none in this round."""
        self._unproposed.discard(stage)
        if not self._unproposed:
            self._proposed.set()

    async def wait_proposed(self) -> None:
        """Return once every stage has proposed."""
        await self._proposed.wait()

    def mark_trained(self) -> None:
        """The overlapping steps are over: from now on a decision may be applied between steps."""
        self._trained.set()

    @property
    def is_trained(self) -> bool:
        return self._trained.is_set()

    async def wait_trained(self) -> None:
        """Return once the overlapping steps are over."""
        await self._trained.wait()
