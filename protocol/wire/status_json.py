"""A run status as plain data for JSON: what ``hetnode status --json`` prints and the web page reads."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.types import Member, StageRange

SCHEMA = 1
"""Grows when a field is renamed, is removed or changes its meaning. New fields do not change it."""


def status_data(status: RunStatus) -> dict[str, Any]:
    """`status` as dictionaries, lists, strings, finite numbers, booleans and None.

    It has the fields of RunStatus by their names, and also `schema`, `replicas`, `tokens_per_second` and
    `steps_done`. Numbers that are not finite become None. Of the members of the plan, the addresses are left
    out. docs/terminal.md describes the fields.
    """
    derived = {
        "replicas": status.replicas,
        "tokens_per_second": status.tokens_per_second,
        "steps_done": status.steps_done,
    }
    return {"schema": SCHEMA, **_plain(status), **_plain(derived)}


def _plain(value: Any) -> Any:  # noqa: PLR0911
    match value:
        case RunSpec():
            return {"name": value.name, "hash": value.hash, **value.model_dump(mode="json")}
        case StageRange():
            return list(value)
        case Member():
            return {"peer": value.peer, "stages": list(value.stages), "relayed": value.relayed}
        case float():
            return value if math.isfinite(value) else None
        case str():  # also of an enum, whose text is not its representation
            return str(value)
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _ if is_dataclass(value):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value
