"""Stored events as JSON, and back: one schema for each kind, derived from the annotations of its class.

Logs outlive versions of this program, so kinds and fields keep the names that they were first stored with.
Two tables below map classes and fields that have another name now.
"""

from __future__ import annotations

from typing import get_args

from coordinator.run.state.events import AssignmentReserved, Event, PeerSeen
from protocol.wire.record_codec import UNBOUNDED, RecordCodec

STORED_KINDS: dict[type[Event], str] = {
    kind: kind.__name__ for kind in get_args(Event) if kind is not PeerSeen
} | {AssignmentReserved: "PlaceGiven"}
"""The name of each kind in the log. The heartbeat, PeerSeen, is not stored."""

_STORED_FIELDS = {"round_number": "round", "reservation": "place"}
_CODECS: dict[str, RecordCodec[Event]] = {
    # Neither bounded nor checked: the log is the coordinator's own. Other versions store more fields.
    name: RecordCodec(kind, UNBOUNDED, names=_STORED_FIELDS, ignores_unknown=True, checks=False)
    for kind, name in STORED_KINDS.items()
}


def encode(event: Event) -> tuple[str, str]:
    """Kind and JSON object of `event`. Raises KeyError for PeerSeen, which is not stored."""
    name = STORED_KINDS[type(event)]
    return name, _CODECS[name].encode(event).decode()


def decode(kind: str, text: str) -> Event:
    """The event that :func:`encode` wrote. Raises ValueError for all other input."""
    codec = _CODECS.get(kind)
    if codec is None:
        raise ValueError(f"unknown kind of event '{kind}'")
    return codec.read(text)
