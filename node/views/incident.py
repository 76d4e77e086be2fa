"""A recorded incident as lines of text: what happened, and how this version decides."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.incident.file import Incident
from coordinator.incident.replay import MOST_DIFFERENCES, Difference, Replay
from coordinator.state import events
from coordinator.state.events import Event
from coordinator.state.text import counted, short
from coordinator.status.messages import event_message
from protocol.types import PeerId

_DETAILS = (
    events.PayloadOffered,
    events.PayloadWithheld,
    events.GroupClosed,
    events.HoldingsReported,
    events.ResultReported,
    events.DigestAttested,
    events.PeerMeasured,
    events.RoundCommitted,
    events.InviteCreated,
    events.InviteUsed,
)
"""Events of every round, of which only the number of rounds is shown, and of enrollment."""
_SHOWN_EVENTS = 5
_PEER = re.compile(r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_MOST_CHARACTERS = 300


def timeline_lines(incident: Incident, log: Sequence[Event]) -> Iterator[str]:
    """What the incident is, and the events of `log` but for those of every round.

    `log`: the events of the incident as they were played, with sentences. Times count from its start.
    """
    first, last = incident.span
    stages = incident.spec.swarm.stages
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(_bounded(first)))
    size = f"{counted(len(incident.events), 'event')} in {last - first:.0f} s, {counted(stages, 'stage')}"
    yield f"{size}, from {begun} on, hetnode {_plain(incident.version) or 'of an unknown version'}"
    if incident.why:
        yield _plain(incident.why)
    committed = _Committed(stages)
    for event in log:
        if isinstance(event, events.RoundCommitted):
            committed.add(event)
            continue
        if isinstance(event, _DETAILS):
            continue
        yield from committed.lines(first)
        yield _line(event, first)
    yield from committed.lines(first)


def verdict_lines(replay: Replay) -> Iterator[str]:
    """How this version decides, with the first differences."""
    yield f"{replay.decided} of {counted(len(replay.log), 'event')}: this version decides the same"
    if replay.given:
        yield f"{replay.given}: taken from the log, which does not contain what led to them"
    for difference in replay.differences[:_SHOWN_EVENTS]:
        yield from _difference_lines(difference)
    left = len(replay.differences) - _SHOWN_EVENTS
    if left > 0:
        most = " or more" if len(replay.differences) == MOST_DIFFERENCES else ""
        yield f"and {left}{most} further differences"
    yield f"broken: {replay.broken}" if replay.broken else "all invariants hold"


@dataclass
class _Committed:
    """Rounds that were committed one after the other, for one line."""

    stages: int
    first: events.RoundCommitted | None = None
    last: events.RoundCommitted | None = None
    count: int = 0

    def add(self, event: events.RoundCommitted) -> None:
        self.first, self.last, self.count = self.first or event, event, self.count + 1

    def lines(self, start: float) -> Iterator[str]:
        """The line, if there are any; afterwards there are none."""
        if self.first is not None and self.last is not None:
            one, other = self.first.decision.round_number, self.last.decision.round_number
            rounds = f"round {one}" if one == other else f"rounds {one}-{other}"
            yield f"{_at(self.last, start)} {rounds} committed, {counted(self.count, 'decision')}"
        self.first, self.last, self.count = None, None, 0


def _difference_lines(difference: Difference) -> Iterator[str]:
    command = re.sub(r"(?<!^)(?=[A-Z])", " ", type(difference.command).__name__).lower()
    yield f"event {difference.number}: after the {command} at {difference.at:.3f}"
    yield from _some("  the log has     ", difference.recorded)
    yield from _some("  this version has", difference.decided)
    if difference.refusal:
        yield f"  it refuses: {_plain(difference.refusal)}"


def _some(title: str, found: Sequence[Event]) -> Iterator[str]:
    for event in found[:_SHOWN_EVENTS]:
        yield f"{title} {_plain(event_message(event))}"
    if len(found) > _SHOWN_EVENTS:
        yield f"{title} and {counted(len(found) - _SHOWN_EVENTS, 'further event')}"
    if not found:
        yield f"{title} nothing yet" if "log" in title else f"{title} nothing"


def _line(event: Event, start: float) -> str:
    return f"{_at(event, start)} {_plain(event_message(event))}"


def _at(event: Event, start: float) -> str:
    return f"{event.at - start:9.1f} s "


def _plain(text: str) -> str:
    """`text` on one line, with short peer ids, and with nothing that a terminal acts on."""
    shown = _PEER.sub(lambda found: short(PeerId(found[0])), _CONTROL.sub("?", text))
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}..."


def _bounded(at: float) -> float:
    """`at` as a time that a calendar has."""
    return at if 0 <= at < 1e11 else 0.0
