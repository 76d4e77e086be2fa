"""What an exchange and the training that goes on beside it must know of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Overlap:
    """The overlap of one round's exchange on this member with inner steps of the next round.

    The exchange waits in :meth:`until_trained` before it moves any parameter to the decision; the training
    waits in :meth:`until_proposed` before it changes any that a payload is made from.

    Args:
        stages: those of this member.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self._awaited = set(stages)
        self._proposed, self._trained = asyncio.Event(), asyncio.Event()

    def has_proposed(self, stage: int) -> None:
        """The payload of `stage` is made, or there will be none in this round."""
        self._awaited.discard(stage)
        if not self._awaited:
            self._proposed.set()

    async def until_proposed(self) -> None:
        """Return once every stage has proposed."""
        await self._proposed.wait()

    def has_trained(self) -> None:
        """The steps that overlap are over: from now on what is decided may be applied between steps."""
        self._trained.set()

    @property
    def is_over(self) -> bool:
        return self._trained.is_set()

    async def until_trained(self) -> None:
        """Return once the steps that overlap are over."""
        await self._trained.wait()
