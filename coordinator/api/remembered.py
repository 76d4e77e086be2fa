"""Queries of the state that every heartbeat asks for, and whose answers few events change."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Generic, TypeVar

from coordinator.run.rounds.deadlines import closes_at
from coordinator.run.state.state import State

T = TypeVar("T")


class Remembered(Generic[T]):
    """The answer of `query` about the newest state; `basis` gives all on which that depends."""

    def __init__(self, query: Callable[[State], T], basis: Callable[[State], tuple[object, ...]]) -> None:
        self._query, self._basis = query, basis
        self._known: tuple[tuple[object, ...], T] | None = None

    def of(self, state: State) -> T:
        basis = self._basis(state)
        # By identity: an event that changes a mapping makes another one.
        if self._known is None or any(map(is_not, basis, self._known[0])):
            self._known = basis, self._query(state)
        return self._known[1]


def closing_time() -> Remembered[float | None]:
    """The time of the open round that :func:`closes_at` tells."""
    return Remembered(
        closes_at, lambda s: (s.answered, s.opened_at, s.absent, s.plans, s.started_at, s.estimates)
    )


def heartbeat_interval() -> Remembered[float]:
    """Seconds between two heartbeats of a peer, by the number of live peers."""
    return Remembered(lambda s: s.spec.timing.heartbeat_of(s.live), lambda s: (s.peers, s.spec))
