"""The order between the exchange of a round and the inner steps that overlap with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class RoundGates:
    """The gates of one round on a member that proposes for `stages`.

    Attributes:
        proposed: set once each of the stages has its payload, or has none in this round. Only then may the
            training change the parameters from which payloads are made.
        trained: set once the overlapping steps are over. Only then may a decision be applied.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self._unproposed = set(stages)
        self.proposed, self.trained = asyncio.Event(), asyncio.Event()

    def mark_proposed(self, stage: int) -> None:
        self._unproposed.discard(stage)
        if not self._unproposed:
            self.proposed.set()
