"""The events that one command leads to, and the state after them."""

from __future__ import annotations

from typing import NamedTuple

from coordinator.run.state.apply import apply
from coordinator.run.state.events import Event
from coordinator.run.state.state import State


class Step(NamedTuple):
    """An event, and the states before and after it."""

    event: Event
    before: State
    after: State


class Transaction:
    """Collects events at time `now` on a state. Each rule sees the state after the rules before it."""

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now = state, now
        self.steps: list[Step] = []

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(step.event for step in self.steps)

    def add(self, event: Event) -> None:
        before, self.state = self.state, apply(self.state, event)
        self.steps.append(Step(event, before, self.state))
