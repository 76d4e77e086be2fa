"""The files in docs/monitoring name metrics that are really exported, and Prometheus can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from coordinator.ops.monitoring import run_metrics
from coordinator.store.metrics import PEER_CHANGES
from node.monitoring import node_metrics
from node.monitoring.figures import Activity, NodeFigures
from protocol.server.metrics import SHARED
from protocol.server.metrics_page import MetricsPage
from protocol.status import RunPhase, Wait
from protocol.types import Lifecycle
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "monitoring"
DECLARED = [*run_metrics.METRICS, *node_metrics.METRICS, *SHARED]
OTHERS = ("up", "process_")
"""Prometheus' own, and those that prometheus-client adds."""
LABELS = {
    "phase": {*RunPhase, "inner", "outer", "compute"},
    "lifecycle": set(Lifecycle),
    "activity": set(Activity),
    "cause": set(Wait),
    "change": set(PEER_CHANGES),
    "statistic": {"median", "min"},
    "kinds": {"same", "different"},
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)


@cache
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return found


def expressions() -> Iterator[str]:
    """Of the dashboard, with values in place of Grafana's own variables."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*")


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bhetnode_\w+", text))


def promtool(*arguments: str, folder: Path = ROOT, given: str | None = None) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_files_name_only_metrics_and_labels_that_are_exported(file: str) -> None:
    text = (FOLDER / file).read_text()
    labels_of = {metric.name: metric.labels for metric in DECLARED}
    assert names_in(text)
    assert names_in(text) <= labels_of.keys()
    for name, matchers in re.findall(r"\b(hetnode_\w+)\{([^}]*)\}", text.replace('\\"', '"')):
        for label, value in re.findall(r'(\w+)!?=~?"([^"]*)"', matchers):
            if label != "job":
                assert label in labels_of[name], (name, label)
                assert set(value.split("|")) <= LABELS.get(label, {value}), (name, value)


def test_the_dashboard_shows_every_metric_but_those_that_only_name_things() -> None:
    shown = {name for expression in expressions() for name in names_in(expression)}
    left_out = {
        *(run_metrics.RUN, run_metrics.EPOCH, run_metrics.MEMBERS, run_metrics.MEASURED_ROUND),
        *(node_metrics.NODE, node_metrics.ROUND, node_metrics.INNER_STEP, node_metrics.ROUNDS),
        *(node_metrics.TOKENS, node_metrics.WAITING, node_metrics.PAYLOADS, node_metrics.VALIDATION_LOSS),
        node_metrics.TRAIN_LOSS,
    }
    assert {metric.name for metric in DECLARED} - shown == {metric.name for metric in left_out}


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(names) == len(set(names))
    for metric in DECLARED:
        assert re.fullmatch(r"hetnode(_[a-z]+)+", metric.name)
        assert metric.help.endswith(".")
        assert not re.search(r"_(ms|milliseconds|minutes|mb|kb|count|sum|bucket)(_|$)", metric.name)


@needs_promtool
def test_the_alerts_fire_when_they_should() -> None:
    promtool("check", "rules", str(FOLDER / "alerts.yml"))
    promtool("test", "rules", "tests/monitoring/alerts.test.yml")


@needs_promtool
def test_the_configuration_can_be_read() -> None:
    promtool("check", "config", "prometheus.yml", folder=FOLDER)


@needs_promtool
def test_prometheus_can_read_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"shown:{i}", "expr": each} for i, each in enumerate(expressions())]
    file = tmp_path / "rules.json"  # every JSON file is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


@needs_promtool
def test_promtool_has_nothing_to_say_about_a_page(tmp_path: Path) -> None:
    figures = [(metric, {tuple("x" for _ in metric.labels): 1.0}) for metric in DECLARED]
    page = MetricsPage(lambda: figures).text().decode()
    assert promtool_lint(page) == ""
    node = MetricsPage(node_metrics.NodeMetrics(NodeFigures(), tmp_path).read).text().decode()
    assert promtool_lint(node) == ""


def promtool_lint(page: str) -> str:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr
