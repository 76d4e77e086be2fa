"""Stored events as JSON, and back: one schema for each kind, derived from the annotations of its class.

Logs outlive versions of this program, so kinds and fields keep the names that they were first stored with.
Two tables below map classes and fields that have another name now.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from coordinator.state.events import AssignmentReserved, Event, PeerSeen

STORED_KINDS: dict[type[Event], str] = {
    kind: kind.__name__ for kind in get_args(Event) if kind is not PeerSeen
} | {AssignmentReserved: "PlaceGiven"}
"""The name of each kind in the log. The heartbeat, PeerSeen, is not stored."""

_STORED_FIELDS = {"round_number": "round", "reservation": "place"}

_CONFIG = ConfigDict(
    ser_json_bytes="base64",
    val_json_bytes="base64",
    strict=True,
    # Applies to nested records as well. pydantic maps the names as it reads and writes, without another pass.
    alias_generator=lambda name: _STORED_FIELDS.get(name, name),
)


def _adapter(kind: type[Event]) -> TypeAdapter[Any]:
    # pydantic takes a config only along with a type that cannot have its own, hence a tuple of one.
    alone: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter(alone, config=_CONFIG)


_ADAPTERS = {name: _adapter(kind) for kind, name in STORED_KINDS.items()}


def encode(event: Event) -> tuple[str, str]:
    """Kind and JSON object of `event`. Raises KeyError for PeerSeen, which is not stored."""
    name = STORED_KINDS[type(event)]
    return name, _ADAPTERS[name].dump_json((event,), by_alias=True).decode()[1:-1]


def decode(kind: str, text: str) -> Event:
    """The event that :func:`encode` wrote. Raises ValueError for all other input."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise ValueError(f"unknown kind of event '{kind}'")
    try:
        event: Event = adapter.validate_json(f"[{text}]")[0]
    except ValidationError as error:
        raise ValueError(f"{kind} with {error.error_count()} bad fields") from None
    return event
