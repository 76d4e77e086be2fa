"""What the dashboard shows, made at most once for all readers.

It is read in the dashboard's own thread: the state of the run is immutable, and replaced as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from coordinator.api.run_records import RunRecords
from coordinator.command_loop import CommandLoop
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.prediction import Predictions
from coordinator.dashboard.run_record import Record, run_record
from coordinator.dashboard.swarm_record import network_record, peer_record, swarm_record
from coordinator.dashboard.view import RunView
from coordinator.status.run_status import run_status
from protocol.types import PeerId

T = TypeVar("T")
_VIEW_SECONDS = 0.9


class Source:
    """The records of one run, as they are now. Only one thread uses it."""

    def __init__(self, command_loop: CommandLoop, records: RunRecords, feed: Feed) -> None:
        self._command_loop, self._records, self._feed = command_loop, records, feed
        self._predictions = Predictions()
        self._view: RunView | None = None
        self._viewed_at = 0.0

    @property
    def run(self) -> str:
        return self._command_loop.state.run

    @property
    def stages(self) -> int:
        return self._command_loop.state.stages

    def view(self) -> RunView:
        """The run at this moment, or up to a second before."""
        if self._view is None or time.monotonic() - self._viewed_at >= _VIEW_SECONDS:
            self._view, self._viewed_at = self._viewed(), time.monotonic()
        return self._view

    def _viewed(self) -> RunView:
        state, now = self._command_loop.state, self._command_loop.now()
        measurements = _copied(self._records.metrics.newest.values)
        resting = frozenset(_copied(lambda: self._records.resting))
        health = self._records.health.latest
        return RunView(state, run_status(state, measurements, now, time.time(), resting, health))

    def run_record(self) -> Record:
        """The run as a whole, with its newest events."""
        return {**run_record(self.view()), "events": self._feed.lines()}

    def swarm_record(self) -> Record:
        view = self.view()
        return swarm_record(view, self._predictions.of(view))

    def peer_record(self, peer: str) -> Record:
        """One peer as it is now, null for one that is not known, and its part in the run."""
        view = self.view()
        known = view.peers.get(PeerId(peer))
        return {
            "peer": peer_record(view, known) if known else None,
            "round": view.round_number,
            "steps": view.status.spec.inner.steps,
        }

    def network_record(self) -> Record:
        view = self.view()
        return network_record(view, self._predictions.of(view))


def _copied(read: Callable[[], Collection[T]]) -> tuple[T, ...]:
    """A copy of a collection that another thread may change meanwhile."""
    while True:
        try:
            return tuple(read())
        except RuntimeError:  # it has changed its size
            continue
