"""Metrics for Prometheus: each is declared once. :mod:`protocol.server.metrics_page` writes them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """One metric, named by the conventions of Prometheus: in base units; ``_total`` if it only grows.

    Attributes:
        help: what it counts or measures, in one sentence.
        labels: names of its labels. Each has few values over the whole life of a run.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def of(self, value: float) -> Figure:
        """The figure of a metric without labels."""
        return self, {(): value}

    def one_of(self, choices: Iterable[str], chosen: str) -> Figure:
        """1 for the label `chosen` and 0 for all others, for a metric with one label."""
        return self, {(choice,): float(choice == chosen) for choice in choices}


Figure = tuple[Metric, Mapping[tuple[str, ...], float]]
"""A metric, and its values by the values of its labels."""

DISK_FREE = Metric("hetnode_disk_free_bytes", "Bytes that are free on the disk of this process's folder.")
LOOP_LAG = Metric(
    "hetnode_event_loop_lag_seconds", "The longest delay of the event loop within the last 30 seconds."
)
SHARED = (DISK_FREE, LOOP_LAG)
"""The metrics that coordinator and nodes have in common."""


def disk_free(folder: Path) -> Iterator[Figure]:
    """The figure of :data:`DISK_FREE`; none where the folder cannot be looked at."""
    try:
        yield DISK_FREE.of(shutil.disk_usage(folder).free)
    except OSError:
        return
