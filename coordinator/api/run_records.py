"""What a coordinator knows of its run beside the state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coordinator.api.explaining import Explainer
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.store.decision_log import DecisionLog
from coordinator.store.history import SqliteHistory
from coordinator.store.metrics import MetricsFile
from coordinator.store.receipts import Receipts
from protocol.types import PeerId


@dataclass(frozen=True)
class RunRecords:
    """The API fills and reads these; pages and metrics read them.

    Attributes:
        metrics: where measurements go.
        decisions: finds those of old rounds.
        receipts: makes them.
        health: judges what is measured.
        explainer: answers questions about the run.
        history: answers about the past.
        resting: the peers whose processes rest, with the number of their calls.
    """

    metrics: MetricsFile
    decisions: DecisionLog
    receipts: Receipts
    health: HealthMonitor
    explainer: Explainer
    history: SqliteHistory
    resting: Counter[PeerId]
