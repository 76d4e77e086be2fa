"""The status document: the run status as plain data, for ``hetnode status --json`` and the dashboard.

It has the fields of the records by their names. Beside them stand the sentences of causes and what records
derive from their fields, so that a reader of the document needs none of this program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from coordinator.status.cause_text import cause_text, status_text
from coordinator.status.facts import facts_of
from protocol.spec.run import RunSpec
from protocol.status import Cause, PeerStatus, RunStatus
from protocol.types import Member, StageRange

SCHEMA = 2
"""Grows when a field is renamed, is removed or changes its meaning. New fields do not change it."""


def document(
    status: RunStatus, text: Callable[[str], str] = str, without: Collection[str] = ()
) -> dict[str, Any]:
    """`status` as dictionaries, lists, strings, finite numbers, booleans and None.

    Numbers that are not finite become None. Of the members of the plan, the addresses are left out. `text`
    changes each string. The fields in `without` are left out. docs/operate.md names them.
    """
    values = {field.name: getattr(status, field.name) for field in fields(status)} | _derived(status)
    for name in without:
        del values[name]
    return {"schema": SCHEMA, **plain(values, text)}


def plain(value: Any, text: Callable[[str], str] = str) -> Any:  # noqa: PLR0911
    """Any record as plain data, as :func:`document` says."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Enum():
            return value.value
        case str():
            return text(value)
        case RunSpec():
            return {"name": value.name, "hash": value.hash, **value.tree}
        case StageRange():
            return list(value)
        case dict():
            return {key: plain(each, text) for key, each in value.items()}
        case list() | tuple():
            return [plain(each, text) for each in value]
    assert is_dataclass(value), f"{type(value).__name__} has no plain form"
    found = {field.name: getattr(value, field.name) for field in fields(value)} | _derived(value)
    if isinstance(value, Member):
        del found["endpoint"]
    return plain(found, text)


def _derived(value: Any) -> dict[str, Any]:
    """What the document says of a record beside its fields."""
    match value:
        case Cause():
            return {"text": cause_text(value)}
        case PeerStatus():
            message = "" if value.cause is None else cause_text(value.cause)
            return {"message": message, "activity": value.activity}
        case RunStatus():
            return {
                "message": status_text(value),
                "is_stalled": value.is_stalled,
                "is_held": value.is_held,
                "replicas_planned": value.replicas_planned,
                "replicas_broken": value.replicas_broken,
                "activities": value.activities,
                "steps_done": value.steps_done,
                "tokens_per_second": value.tokens_per_second,
                "validation_loss": value.validation_loss,
                "facts": facts_of(value),
            }
        case _:
            return {}
