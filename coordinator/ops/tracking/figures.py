"""What a line of ``metrics.jsonl`` says in figures. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PLACE = ("time", "event", "peer", "round", "replica", "position", "complete", "stage", "next_epoch")
_OF_REPLICA = ("train_loss", "validation_loss", "tokens")
"""Of a measurement: only that of the last member of a replica has them."""


@dataclass(frozen=True)
class TrackedFigures:
    """Finite figures of one round by name, such as "validation_loss/replica-0", at a Unix time."""

    at: float
    round_number: int
    values: Mapping[str, float]


def figures_of(line: bytes) -> TrackedFigures | None:
    """The figures of a line; None for a line without any, or that this version does not know."""
    try:
        fields = json.loads(line)
        values = {name: value for name, value in _values(fields).items() if _is_figure(value)}
        return TrackedFigures(float(fields["time"]), int(fields["round"]), values) if values else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _values(fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in fields.items() if name not in _PLACE}
    match fields["event"]:
        case "measurement":
            place = f"replica-{fields['replica']}"
            if not fields["complete"]:
                place = f"{place}.{fields['position']}"
                own = {name: value for name, value in own.items() if name not in _OF_REPLICA}
            if not fields["round"]:  # before its first round the model is only validated
                own = {name: value for name, value in own.items() if name == "validation_loss"}
            return {f"{name}/{place}": value for name, value in own.items()}
        case "decision":
            own["committed"] = int(fields["committed"])
            return {f"{name}/stage-{fields['stage']}": value for name, value in own.items()}
        case "evaluation":
            return {f"{fields['name']}/{metric}": value for metric, value in fields["figures"].items()}
        case _:
            return {}


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
