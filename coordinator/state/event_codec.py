"""Stored events as JSON, and back: one name and one schema for each kind, derived from its annotations."""

from __future__ import annotations

import json
from types import GenericAlias
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from coordinator.state.events import Event, PeerSeen

_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", strict=True)

STORED_KINDS: tuple[type[Event], ...] = tuple(kind for kind in get_args(Event) if kind is not PeerSeen)


def _adapter(kind: type[Event]) -> TypeAdapter[Any]:
    # pydantic takes a config only along with a type that cannot have its own, hence a tuple of one.
    alone: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter(alone, config=_CONFIG)


_ADAPTERS = {kind.__name__: _adapter(kind) for kind in STORED_KINDS}


def _renamed(value: Any, old: str, new: str) -> Any:
    """JSON `value` with the key `old` called `new`: the log and the wire say "round" for a round's number."""
    if isinstance(value, dict):
        return {new if key == old else key: _renamed(item, old, new) for key, item in value.items()}
    return [_renamed(item, old, new) for item in value] if isinstance(value, list) else value


def encode(event: Event) -> tuple[str, str]:
    """Kind and JSON object of `event`. KeyError for the one kind that is not stored."""
    kind = type(event).__name__
    (fields,) = _ADAPTERS[kind].dump_python((event,), mode="json")
    return kind, json.dumps(
        _renamed(fields, "round_number", "round"), separators=(",", ":"), ensure_ascii=False
    )


def decode(kind: str, text: str) -> Event:
    """The event that :func:`encode` was given. ValueError for anything that it cannot have written."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise ValueError(f"unknown kind of event '{kind}'")
    try:
        fields = _renamed(json.loads(text), "round", "round_number")
        event: Event = adapter.validate_json(json.dumps([fields]))[0]
    except ValidationError as error:
        raise ValueError(f"{kind} with {error.error_count()} bad fields") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{kind} with bad fields: not JSON") from None
    return event
