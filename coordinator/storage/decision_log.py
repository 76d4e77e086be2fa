"""The decisions of old rounds, which the state does not keep: read from the event log, for late peers."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict

from coordinator.state.events import DecisionEvent, Event
from coordinator.storage.store import Store
from protocol.types import Decision

_KEPT = 8
"""Decisions in memory: peers that catch up together ask for the same ones."""


class DecisionLog:
    """Finds the decision of any (stage, round) that is decided.

    Eight bytes for each decision are in memory: the number of its event.

    Args:
        store: of the run, whose events :meth:`note` gets in order, from the first one on.
        former: the numbers of the decisions so far, if the next event is number `length` + 1.
    """

    def __init__(self, store: Store, stages: int, former: bytes = b"", length: int = 0) -> None:
        self._store, self._stages = store, stages
        self._length = length
        self._numbers = array("Q", former)
        self._kept = OrderedDict[tuple[int, int], Decision]()
        self._turn = asyncio.Lock()

    @property
    def numbers(self) -> bytes:
        """The numbers of the decisions so far, eight bytes each, in the order of rounds and stages."""
        return self._numbers.tobytes()

    def note(self, event: Event) -> None:
        """Count `event`, the next one of the log."""
        self._length += 1
        if isinstance(event, DecisionEvent):
            place = self._place(event.decision.stage, event.decision.round_number)
            lacking = place + 1 - len(self._numbers)
            self._numbers.extend([0] * lacking)
            self._numbers[place] = self._length

    async def of(self, stage: int, round_number: int) -> Decision:
        """The decision of (`stage`, `round_number`). KeyError if it is not made; STORE_CORRUPT."""
        key = stage, round_number
        place = self._place(stage, round_number)
        number = self._numbers[place] if 0 <= stage < self._stages and 0 <= place < len(self._numbers) else 0
        if not number:
            raise KeyError(key)
        async with self._turn:
            if key not in self._kept:
                self._kept[key] = await self._read(number)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]

    async def _read(self, number: int) -> Decision:
        if self._store.blocks:
            found = await asyncio.to_thread(self._store.read, number, number)
        else:
            found = self._store.read(number, number)
        ((_, event),) = found
        assert isinstance(event, DecisionEvent), "the number of a decision"
        return event.decision

    def _place(self, stage: int, round_number: int) -> int:
        return (round_number - 1) * self._stages + stage
