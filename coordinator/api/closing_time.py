"""When the open round closes, as heartbeats ask for it: each does, and few events change it."""

from __future__ import annotations

from operator import is_not

from coordinator.run.rounds.deadlines import closes_at
from coordinator.run.state.state import State


class ClosingTime:
    """:func:`closes_at` of the newest state, calculated once for the states in which it is the same."""

    def __init__(self) -> None:
        self._basis: tuple[object, ...] = ()
        self._closes_at: float | None = None

    def of(self, state: State) -> float | None:
        basis = (
            state.answered,
            state.opened_at,
            state.absent,
            state.plans,
            state.started_at,
            state.estimates,
        )
        # By identity: an event that changes a mapping makes another one.
        if not self._basis or any(map(is_not, basis, self._basis)):
            self._basis, self._closes_at = basis, closes_at(state)
        return self._closes_at
