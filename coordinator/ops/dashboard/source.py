"""What the dashboard shows, made at most once for all readers.

It is read in the dashboard's own thread: the state of the run is immutable, and replaced as a whole.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from coordinator.api.dashboard import Entrance
from coordinator.api.run_records import RunRecords
from coordinator.ops.dashboard.about import About, read_about, samples_text
from coordinator.ops.dashboard.queries import Record, shown
from coordinator.placement.cost_model import Survey, survey_of
from coordinator.placement.predict import ReplicaPrediction, predict
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.document import document, plain
from coordinator.status.event_levels import log_level
from coordinator.status.messages import event_message, event_peers
from coordinator.status.run_status import run_status
from protocol.status import RunPhase, RunStatus
from protocol.types import Committed, Lifecycle, Replica, Role
from protocol.wire.run_page import MOST_CONTACT, RunPage

T = TypeVar("T")
MOST_REPLICAS = 64
"""Replicas in the event that every reader gets; the whole status has all."""
MOST_PEERS = 2000
"""Peers in the whole status; of more, those that are gone are left out first."""
_LARGE = ("time", "peers", "measurements", "plan", "evaluations")
"""Fields that the event leaves out: the time that always changes, and what grows with the swarm."""
_STATUS_SECONDS = 0.9
_MOST_LETTERS = 1000
_MOST_LINES = 60
_OF_EVERY_ROUND = (events.GroupClosed, events.PeerMeasured)


@dataclass(frozen=True)
class _Noted:
    event: Event
    is_warning: bool


class Feed:
    """Keeps the newest events. :meth:`note` is for the coordinator's thread, :meth:`lines` for others."""

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque(maxlen=_MOST_LINES)

    def note(self, event: Event) -> None:
        """Keep `event` if people should see it: if the log shows it, and every round has not several."""
        level = log_level(event)
        is_commit = isinstance(event, events.RoundDecided) and isinstance(event.decision, Committed)
        if level >= logging.INFO and not is_commit and not isinstance(event, _OF_EVERY_ROUND):
            self._noted.append(_Noted(event, level >= logging.WARNING))

    def lines(self) -> list[dict[str, Any]]:
        """The newest first: Unix time, sentence, the peers that it names, and whether it is a warning."""
        return [
            {
                "at": each.event.at,
                "text": shown(event_message(each.event)),
                "peers": list(event_peers(each.event)),
                "warning": each.is_warning,
            }
            for each in reversed(tuple(self._noted))
        ]


class Records:
    """The records of one run. Only one thread uses them.

    Args:
        state: of the run.
        status: of the run.
        lines: the newest events (:meth:`Feed.lines`).
        folder: of the coordinator.
    """

    def __init__(
        self,
        state: Callable[[], State],
        status: Callable[[], RunStatus],
        lines: Callable[[], list[dict[str, Any]]],
        folder: Path,
    ) -> None:
        self._state, self.status, self._lines, self._folder = state, status, lines, folder
        self._predictions = Predictions()

    @property
    def run(self) -> str:
        return self._state().run

    def event(self) -> Record:
        """The status document but for its large fields, with the newest events: for every reader."""
        status = self.status()
        first = [each for each in status.replicas if each.is_planned][:MOST_REPLICAS]
        is_over = status.phase is RunPhase.FINISHED
        first += [
            each
            for each in status.replicas
            if not each.is_planned and (each.cause or (is_over and each.figures))
        ][:MOST_REPLICAS]
        found = document(status, _text, without=_LARGE)
        return {**found, "replicas": plain(first, _text), "events": self._lines()}

    def whole(self) -> Record:
        """The status document."""
        status = self.status()
        peers = sorted(
            status.peers, key=lambda each: (each.lifecycle is Lifecycle.GONE, each.assignment, each.peer)
        )
        return document(replace(status, peers=tuple(peers[:MOST_PEERS])), _text)

    def peer(self, peer: str) -> Record:
        """One peer as it is now, null for one that is not known, and what it has measured last."""
        status = self.status()
        known = next((each for each in status.peers if each.peer == peer), None)
        measured = next((each for each in status.measurements if each.peer == peer), None)
        return {"peer": plain(known, _text), "measurement": plain(measured, _text), "time": status.time}

    def about(self) -> About:
        """What the operator tells readers of the run."""
        return read_about(self._folder)

    def front(self) -> About:
        """As :meth:`about`, where the newest samples that were told take the place of a missing file."""
        about = self.about()
        return about if about.samples else replace(about, samples=samples_text(self.status().evaluations))

    def page(self) -> RunPage | None:
        """What the operator tells everyone; None where the run is not published."""
        return None

    def predictions(self) -> Record:
        """By index of the replica: what the cost model predicts of the plan of the open round."""
        return self._predictions.of(self._state())


class LiveRecords(Records):
    """The records of a run that its coordinator serves, as they are now."""

    def __init__(
        self, command_loop: CommandLoop, records: RunRecords, feed: Feed, entrance: Entrance, folder: Path
    ) -> None:
        super().__init__(lambda: command_loop.state, self._newest, feed.lines, folder)
        self._command_loop, self._records, self._entrance = command_loop, records, entrance
        self._status: RunStatus | None = None
        self._made_at = 0.0

    def page(self) -> RunPage | None:
        entrance, status = self._entrance, self.status()
        if not (entrance.contact or entrance.invite):
            return None
        trainers = [each for each in status.peers if each.role is not Role.RELAY]
        here = sum(each.lifecycle is not Lifecycle.GONE for each in trainers)
        done, contact = (status.spec.rounds, status.rounds_decided), shown(entrance.contact, MOST_CONTACT)
        given = status.run, entrance.authority, status.parameters, *done, here, contact, entrance.invite
        return RunPage(*given, self.about().title)

    def _newest(self) -> RunStatus:
        """The run at this moment, or up to a second before."""
        if self._status is None or time.monotonic() - self._made_at >= _STATUS_SECONDS:
            state, now = self._command_loop.state, self._command_loop.now()
            measurements = _copied(self._records.metrics.newest.values)
            resting = frozenset(_copied(lambda: self._records.resting))
            health = self._records.health.latest
            hindrance = self._command_loop.hindrance
            self._status = run_status(state, measurements, now, time.time(), resting, health, hindrance)
            self._made_at = time.monotonic()
        return self._status


class KeptRecords(Records):
    """The records of a run that no coordinator serves, as they were at its newest event."""

    def event(self) -> Record:
        """As that of a run that is served, with the time at which it was so."""
        return {**super().event(), "live": False, "time": self.status().time}


class Predictions:
    """Keeps the predictions of a run: only a new plan or new measurements change them.

    Those of a large swarm take a second.
    """

    def __init__(self) -> None:
        self._of: tuple[object, object] | None = None
        self._found: Record = {}

    def of(self, state: State) -> Record:
        """As JSON: bytes and seconds of the inner phase, shares of 1; null where nothing is known."""
        number = min(state.current_round, state.spec.rounds)
        replicas: tuple[Replica, ...] = state.plan_for(number).replicas if state.plans else ()
        key = (replicas, state.estimates)
        # States are immutable, and share what has not changed.
        if self._of is None or any(one is not other for one, other in zip(key, self._of, strict=True)):
            survey, steps = survey_of(state), state.spec.inner.steps
            found = predict(state.spec, survey, replicas).replicas if replicas else ()
            self._found = {str(each.replica.index): _prediction(each, survey, steps) for each in found}
            self._of = key
        return self._found


def _prediction(predicted: ReplicaPrediction, survey: Survey, steps: int) -> Record:
    slowest, step = predicted.bottleneck, predicted.step
    ends = pairwise(member.peer for member in predicted.replica.members)
    links = [
        {
            "bytes": list(nbytes),
            "bandwidth": [survey.bandwidth(upper, lower), survey.bandwidth(lower, upper)],
            "delay": survey.delay(upper, lower) or None,
        }
        for (upper, lower), nbytes in zip(ends, predicted.link_bytes, strict=True)
    ]
    found: Record = plain(
        {
            "slowest": None if slowest is None else {"text": str(slowest), **plain(slowest)},
            "inner_seconds": steps * step.seconds or None,
            "utilization": [share or None for share in step.utilization],
            "links": links,
        },
        _text,
    )
    return found


def _text(text: str) -> str:
    return shown(text, _MOST_LETTERS)


def _copied(read: Callable[[], Collection[T]]) -> tuple[T, ...]:
    """A copy of a collection that another thread may change meanwhile."""
    while True:
        try:
            return tuple(read())
        except RuntimeError:  # it has changed its size
            continue
