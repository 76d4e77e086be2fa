"""The page that Prometheus reads. Only processes that serve one import this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from protocol.server.metrics import Figure


class MetricsPage:
    """The figures of `read`, and memory, CPU time and open files of this process, in the text format."""

    def __init__(self, read: Callable[[], Iterable[Figure]]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        collector: Any = self  # the method `collect` is all that a registry needs
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The page as it is now."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry."""
        for metric, values in self._read():
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
