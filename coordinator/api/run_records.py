"""What a coordinator knows of its run beside the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.store.decision_log import DecisionLog
from coordinator.store.history import SqliteHistory
from coordinator.store.metrics import MetricsFile
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation, Measurement, TrainingHealth
from protocol.types import PeerId


class Health(Protocol):
    """Judges what members measure."""

    @property
    def latest(self) -> TrainingHealth | None:
        """The health of the newest round that was judged; None before any."""

    def record(self, measurement: Measurement) -> None:
        """Take in a measurement that is believed (coordinator.api.measuring)."""


Explain = Callable[[str, str], Coroutine[Any, Any, Explanation]]
"""Answers a question; the first argument is who asks."""


async def unexplained(caller: str, question: str) -> Explanation:
    """The answer of a coordinator without explanations: raises HetnodeError BAD_REQUEST."""
    raise HetnodeError(ErrorCode.BAD_REQUEST, "This coordinator answers no questions about its run.", "")


@dataclass(frozen=True)
class RunRecords:
    """The API fills and reads these; pages and metrics read them.

    Attributes:
        metrics: where measurements go.
        decisions: finds those of old rounds.
        health: judges what is measured.
        history: answers about the past.
        resting: the peers whose processes rest, with the number of their calls.
        explain: answers questions about the run.
    """

    metrics: MetricsFile
    decisions: DecisionLog
    health: Health
    history: SqliteHistory
    resting: Counter[PeerId]
    explain: Explain = unexplained
