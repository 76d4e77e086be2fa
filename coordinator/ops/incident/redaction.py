"""Takes out of an event log what names people, machines and places.

Numbers, times, enumerations and the structure stay, and so does what follows from them. A peer id becomes a
pseudonym, in the same order, because the rules of a round sort peers by their ids. Each other text becomes a
label with a number, so a field that is new gives nothing away. Equal texts stay equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from coordinator.membership.presence import FINISHED
from coordinator.run.state.events import Event
from protocol.run_files.presets import PRESETS
from protocol.spec.change import CHANGEABLE
from protocol.spec.data import DataSpec
from protocol.spec.run import RunSpec
from protocol.types import Part

PRESET = "incident"
"""Takes the place of the name of a specification that is no preset."""
PHRASES = (
    "takes the place of",
    "starts anew",
    "the first plan",
    "joins",
    "comes back",
    "is gone",
    "are held by at least",
    "which too few of the group hold",
    "payloads is held by",
    "and more than half must",
    "no replica had a payload to offer",
    "no peer offered a payload before the round closed",
    "it has answered in none of the last",
    "it has no turn in this round",
    "already offered another payload",
    "it signed two payloads",
    "its payload is not valid",
    "is not signed by it",
    "asked to leave",
    "interrupted",
    "banned",
    "timed out",
    "refused",
)
"""Parts of sentences that stay behind the label, because they help readers and come from this program."""
DATA_TEXTS = ("source", "validation", "past", "text_field", "tokenizer", "tokenizer_sha256", "end_token")
"""Settings of the data that get their defaults: they may be paths, or say which model it is."""

_PEER = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_DEVICE = re.compile(r"(cpu|mps|(cuda|xpu|hip)(:[0-9]{1,3})?)")
_SETTING = re.compile(r"[a-z_.]{1,40}=[-+.0-9e]{1,40}")
_TOLD = {"data.source": 'data.source="builtin"', "data.validation": 'data.validation=""'}
"""What a change of such a setting becomes: a run can still have it."""
_KEPT = frozenset(("", FINISHED, *Part))


def redacted_log(log: Sequence[Event]) -> tuple[Event, ...]:
    """All events of a log, redacted."""
    names = {peer: f"peer-{number:05}" for number, peer in enumerate(sorted(peers_in(log)), start=1)}
    return tuple(_redacted(event, names) for event in log)


def redacted_spec(spec: RunSpec) -> RunSpec:
    """`spec` without the names of files, data sets and digests of models; its hash is another one."""
    data = {name: DataSpec.model_fields[name].default for name in DATA_TEXTS}
    preset = spec.preset if spec.preset in PRESETS else PRESET
    changes = {"data": spec.data.model_copy(update=data), "preset": preset, "initial": None}
    return RunSpec.model_validate(spec.model_copy(update=changes).model_dump())


def peers_in(value: Any) -> set[str]:
    """All ids of peers that a record has."""
    return {text for text in texts_in(value) if _PEER.fullmatch(text)}


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a record, but for the names of enumerations."""
    if isinstance(value, str):
        if not isinstance(value, Enum):
            yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from texts_in(tuple(value.items()))
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            yield from texts_in(each)


def _redacted(value: Any, names: dict[str, str]) -> Any:
    """`value` with the names of its texts; a text without a name gets the next one."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return value if _is_kept(value) else _TOLD.get(value.partition("=")[0]) or _name(value, names)
    if isinstance(value, bytes):
        return b""  # a signature, which fits no other content
    if is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: _redacted(getattr(value, field.name), names) for field in fields(value)}
        return replace(value, **changes)
    if isinstance(value, Mapping):
        return {_redacted(key, names): _redacted(each, names) for key, each in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return type(value)(_redacted(each, names) for each in value)
    if value is None or isinstance(value, Enum | bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} of an event, of which nothing says that it is harmless")


def _is_kept(text: str) -> bool:
    """Whether a text says nothing of people: a device, or a number that a setting was changed to."""
    is_setting = text.partition("=")[0] in CHANGEABLE and _SETTING.fullmatch(text)
    return bool(text in _KEPT or is_setting or _DEVICE.fullmatch(text))


def _name(text: str, names: dict[str, str]) -> str:
    if text not in names:
        known = ", ".join(phrase for phrase in PHRASES if phrase in text)
        names[text] = f"text-{len(names) + 1}" + f" ({known})" * bool(known)
    return names[text]
