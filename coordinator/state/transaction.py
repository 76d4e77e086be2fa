"""The events that one command leads to, and the state after them."""

from __future__ import annotations

from coordinator.state.apply import apply
from coordinator.state.events import Event
from coordinator.state.state import State


class Transaction:
    """Collects events at time `now` on a state. Each rule sees the state after the rules before it."""

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now = state, now
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)
