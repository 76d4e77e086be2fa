"""Plays a recorded log through this version's rules: does it decide the same at the same times?

Each event of the log is applied, so the state is always the recorded one. Before that, the command that the
event implies is decided on this state, and its events must be those that follow in the log. Sentences for
people may differ, since versions word them differently. So one difference does not cause others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from math import isclose
from pathlib import Path
from typing import Any

from coordinator.membership.joining import SPEED_SECONDS
from coordinator.ops.incident.file import Incident
from coordinator.ops.incident.pseudonyms import pseudonymous_keys
from coordinator.ops.incident.redaction import RULES, RUN, Rule, peers_in
from coordinator.run.decide import Outcome, decide
from coordinator.run.state import events
from coordinator.run.state.apply import apply
from coordinator.run.state.apply_rounds import owners_of
from coordinator.run.state.commands import Command, Tick
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.status import RunPhase
from tests.support.incident_commands import INPUTS, implied_commands, is_known, signed
from tests.support.incident_file import from_bytes
from tests.support.incident_heartbeats import Heartbeats
from tests.support.invariants import InvariantBroken, Invariants

MOST_DIFFERENCES = 20
"""After so many differences the replay ends."""
TICK_SLACK = 5.0
"""Seconds by which a tick may have been late: the machine was busy, or the disk."""
_MOST_OF_A_COMMAND = 5000
"""Events of one time that are compared at once."""
_SECONDS = 1e-5
"""Times on a clock of the size of Unix time are rounded."""


@dataclass(frozen=True)
class Difference:
    """This version decides otherwise.

    Attributes:
        number: of the event in the log, from 1 on.
        at: when, in seconds on the clock of the log.
        command: what was decided.
        recorded: the events of the log from `number` on that have this time.
        decided: those of this version.
        refusal: the reason why this version refuses the command, or "".
    """

    number: int
    at: float
    command: Command
    recorded: tuple[Event, ...]
    decided: tuple[Event, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Replay:
    """The result.

    Attributes:
        state: after the last event that was played.
        log: the events that were played, with the sentences of this version where it decides the same.
        decided: how many of them this version decides like the log.
        given: how many were taken from the log, because no stored event tells what led to them.
        differences: in order; at most MOST_DIFFERENCES.
        broken: the invariant that does not hold, with the number of the event, or "".
    """

    state: State
    log: tuple[Event, ...]
    decided: int
    given: int
    differences: tuple[Difference, ...]
    broken: str

    @property
    def is_equal(self) -> bool:
        """Whether this version decides like the log everywhere, and all invariants hold."""
        return not self.differences and not self.broken


def replay_incident(incident: Incident) -> Replay:
    """Play all events."""
    return _Player(incident).play()


def same_decision(recorded: Any, decided: Any) -> bool:
    """Whether two values say the same, but for sentences, signatures and the rounding of times."""
    if isinstance(recorded, float) and isinstance(decided, float):
        return isclose(recorded, decided, rel_tol=1e-9, abs_tol=_SECONDS)
    if isinstance(recorded, tuple) and isinstance(decided, tuple):
        return len(recorded) == len(decided) and all(map(same_decision, recorded, decided))
    if is_dataclass(recorded) and not isinstance(recorded, type) and type(recorded) is type(decided):
        return all(
            same_decision(getattr(recorded, field.name), getattr(decided, field.name))
            for field in fields(recorded)
            if RULES.get((type(recorded), field.name)) not in (Rule.REASON, Rule.SIGNATURE)
        )
    return bool(recorded == decided)


class _Player:
    def __init__(self, incident: Incident) -> None:
        keys = pseudonymous_keys(len(peers_in(incident.events)))
        self._signers = {peer: key.sign for peer, key in keys.items()}
        self._log = incident.events
        self._state = State(incident.spec, RUN)
        self._heartbeats = Heartbeats(self._log)
        self._invariants = Invariants(incident.spec)
        self._differences: list[Difference] = []
        self._decided = self._given = 0
        self._played: list[Event] = []
        self._broken = ""

    def play(self) -> Replay:
        start = 0
        while start < len(self._log) and len(self._differences) < MOST_DIFFERENCES and not self._broken:
            try:
                start += self._step(start)
            except InvariantBroken as error:
                self._broken = f"event {len(self._played)}: {error}"
        return Replay(
            self._state,
            tuple(self._played),
            self._decided,
            self._given,
            tuple(self._differences),
            self._broken,
        )

    def _step(self, start: int) -> int:
        """Play the events of one command. Returns their number."""
        first = self._log[start]
        self._check_ticks_before(start)
        upcoming = [signed(event, self._signers) for event in _same_time(self._log, start)]
        recorded = [_in_full(event, self._state) for event in upcoming]
        state = self._heartbeats.heard(self._state, first.at)
        best: tuple[int, Command, Outcome] | None = None
        for command in implied_commands(state, upcoming, self._signers):
            outcome = decide(state, command, first.at)
            decided = [event for event in outcome.events if not isinstance(event, events.PeerSeen)]
            common = _common(recorded, [_in_full(event, self._state) for event in decided])
            if common and common == len(decided):
                self._decided += common
                # With the sentences of this version: redaction has taken out those of the log.
                return self._apply([*map(_with_sentences, upcoming, decided)])
            if best is None or common > best[0]:
                best = common, command, outcome
        if isinstance(first, INPUTS) or not is_known(first):
            self._given += 1
            return self._apply(upcoming[:1])
        assert best is not None, "a tick is always tried"
        _, command, outcome = best
        shown = tuple(event for event in outcome.events if not isinstance(event, events.PeerSeen))
        refusal = outcome.refusal.cause if outcome.refusal else ""
        self._differences.append(Difference(start + 1, first.at, command, tuple(upcoming), shown, refusal))
        return self._apply(upcoming)

    def _apply(self, played: Sequence[Event]) -> int:
        for event in played:
            before = self._state
            self._state = apply(before, event)
            self._heartbeats.note(event)
            self._invariants.check_event(before, event, self._state)
            self._played.append(event)
        self._invariants.check_state(self._state)
        return len(played)

    def _check_ticks_before(self, start: int) -> None:
        """This version must decide nothing in the silence before the next event of the log."""
        for at in _quiet_ticks(self._state, self._log, start):
            outcome = decide(self._heartbeats.heard(self._state, at), Tick(), at)
            if outcome.events:
                # The state stays that of the log, so the next event shows what follows from it.
                self._differences.append(Difference(start + 1, at, Tick(), (), outcome.events))
                return


def _quiet_ticks(state: State, log: Sequence[Event], start: int) -> Iterator[float]:
    """Times before the next event at which a coordinator that ran has ticked, and decided nothing."""
    if start == 0:
        return
    last, next_at = log[start - 1].at, log[start].at
    end = next_at - TICK_SLACK
    if state.phase is RunPhase.GATHERING:  # only ticks within this time may start the run
        end = min(end, state.latest_at + 2 * SPEED_SECONDS - TICK_SLACK)
    if end <= last:
        return
    soon = (event for event in log[start : start + 100] if event.at <= next_at + TICK_SLACK)
    if not any(isinstance(event, events.CoordinatorStarted) for event in soon):  # else it was down
        yield end


def _same_time(log: Sequence[Event], start: int) -> Iterator[Event]:
    """The events from `start` on that have the time of the first of them."""
    for number in range(start, min(len(log), start + _MOST_OF_A_COMMAND)):
        if log[number].at != log[start].at:
            return
        yield log[number]


def _in_full(event: Event, state: State) -> Event:
    """`event` with all payloads that it names in few bytes: logs of former versions have the whole lists."""
    if not isinstance(event, events.HoldingsReported) or not event.of_group:
        return event
    owners = owners_of(state.round_of(event.stage, event.round_number), event)
    return replace(event, owners=tuple(sorted(owners)), of_group=0, lacking=())


def _common(recorded: Sequence[Event], decided: Sequence[Event]) -> int:
    """How many events both begin with."""
    count = 0
    for one, other in zip(recorded, decided, strict=False):
        if not same_decision(one, other):
            break
        count += 1
    return count


def _with_sentences(recorded: Any, decided: Any) -> Any:
    """`recorded` with the sentences for people of `decided`, which says the same."""
    if not is_dataclass(recorded) or isinstance(recorded, type | Enum):
        return recorded
    changes = {}
    for field in fields(recorded):
        one, other = getattr(recorded, field.name), getattr(decided, field.name)
        if RULES.get((type(recorded), field.name)) is Rule.REASON:
            changes[field.name] = other
        elif is_dataclass(one):
            changes[field.name] = _with_sentences(one, other)
    return replace(recorded, **changes) if changes else recorded


if __name__ == "__main__":
    found = replay_incident(from_bytes(Path(sys.argv[1]).read_bytes()))
    print(f"{found.decided} of {len(found.log)} events: this version decides the same")
    for each in found.differences[:5]:
        print(each)
    sys.exit(found.broken or (0 if found.is_equal else "this version decides otherwise"))
