"""The decisions of old rounds, which the state does not keep: read from the event log, for late peers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from coordinator.store.store import Store
from protocol.types import Decision

_KEPT = 8
"""Decisions in memory: peers that catch up together ask for the same ones."""


class DecisionLog:
    """Finds the decision of any (stage, round) that is decided."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept = OrderedDict[tuple[int, int], Decision]()
        self._turn = asyncio.Lock()

    async def of(self, stage: int, round_number: int) -> Decision:
        """The decision of (`stage`, `round_number`). KeyError if it is not made; STORE_CORRUPT."""
        key = stage, round_number
        async with self._turn:
            if key not in self._kept:
                if self._store.blocks:
                    found = await asyncio.to_thread(self._store.decision, *key)
                else:
                    found = self._store.decision(*key)
                if found is None:
                    raise KeyError(key)
                self._kept[key] = found
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]
