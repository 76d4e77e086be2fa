"""Stored events as JSON, and back: one schema for each kind, derived from the annotations of its class.

Logs outlive versions of this program, so kinds and fields keep the names that they were first stored with.
Two tables below map classes and fields that have another name now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from coordinator.run.state.events import AssignmentReserved, Event, PeerSeen, RoundDecided
from protocol.types import Aborted, Committed, RolledBack, Skipped
from protocol.wire.decisions import FlatDecision, decision_of, flat
from protocol.wire.record_codec import UNBOUNDED, RecordCodec

_SKIPPED = "StageSkipped"
_DECIDED = {
    Committed: "RoundCommitted",
    Aborted: "RoundAborted",
    RolledBack: "RoundAborted",
    Skipped: _SKIPPED,
}
STORED_KINDS: dict[type[Event], tuple[str, ...]] = {
    kind: (kind.__name__,) for kind in get_args(Event) if kind is not PeerSeen
} | {AssignmentReserved: ("PlaceGiven",), RoundDecided: tuple(dict.fromkeys(_DECIDED.values()))}
"""The names of each kind in the log. The heartbeat, PeerSeen, is not stored."""


@dataclass(frozen=True)
class _StoredDecision:
    """A decision as the log has it: the kind of the row tells what it is."""

    at: float
    decision: FlatDecision


_STORED_FIELDS = {"round_number": "round", "reservation": "place"}
_CODECS: dict[str, RecordCodec[Any]] = {
    # Neither bounded nor checked: the log is the coordinator's own. Other versions store more fields.
    name: RecordCodec(
        _StoredDecision if kind is RoundDecided else kind,
        UNBOUNDED,
        names=_STORED_FIELDS,
        ignores_unknown=True,
        checks=False,
    )
    for kind, names in STORED_KINDS.items()
    for name in names
}


def encode(event: Event) -> tuple[str, str]:
    """Kind and JSON object of `event`. Raises KeyError for PeerSeen, which is not stored."""
    if isinstance(event, RoundDecided):
        name, stored = _DECIDED[type(event.decision)], _StoredDecision(event.at, flat(event.decision))
        return name, _CODECS[name].encode(stored).decode()
    (name,) = STORED_KINDS[type(event)]
    return name, _CODECS[name].encode(event).decode()


def decode(kind: str, text: str) -> Event:
    """The event that :func:`encode` wrote. Raises ValueError for all other input."""
    codec = _CODECS.get(kind)
    if codec is None:
        raise ValueError(f"unknown kind of event '{kind}'")
    stored = codec.read(text)
    if isinstance(stored, _StoredDecision):
        decision = decision_of(stored.decision)
        if kind == _SKIPPED:
            decision = Skipped(decision.stage, decision.round_number, decision.next_epoch, decision.reason)
        return RoundDecided(stored.at, decision)
    event: Event = stored
    return event
