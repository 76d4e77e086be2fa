"""The metrics of a node: its figures over all visits, its waits, and what it shows before it has joined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.monitoring.figures import Activity, NodeFigures, Waits
from node.monitoring.node_metrics import METRICS, NodeMetrics
from protocol.server.line import Line
from protocol.server.metrics import SHARED
from protocol.server.metrics_endpoint import MetricsEndpoint
from protocol.status import Measurement, Wait
from protocol.types import Capacity
from tests.builders import keyed
from tests.support.scrape import scrape

PEER = keyed(0).peer


@pytest.fixture
def figures() -> NodeFigures:
    return NodeFigures()


@pytest.fixture
async def endpoint(figures: NodeFigures, tmp_path: Path) -> AsyncIterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("127.0.0.1:0")
    await endpoint.start(NodeMetrics(figures, tmp_path).read)
    yield endpoint
    await endpoint.close()


def measured(number: int, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "tokens": 100,
        "inner_seconds": 2.0,
        "outer_seconds": 1.0,
        "compute_seconds": 0.5,
        "payload_bytes": 7,
        "validation_loss": 5.5,
        "train_loss": 5.25,
        "complete": True,
    }
    return Measurement(PEER, number, 0, 0, **(fields | changes))


def membership(line: Line, away: float = 0.0) -> Any:
    estimates = SimpleNamespace(line=line, capacity=Capacity("cpu", 1, 1))
    return SimpleNamespace(run="run-1", progress=(3, 4), away=away, estimates=estimates)


async def test_every_declared_metric_is_shown_with_its_value(
    figures: NodeFigures, endpoint: MetricsEndpoint
) -> None:
    line = Line()
    figures.joined(PEER, membership(line))
    figures.activity, figures.inner_steps, figures.memory_bytes = Activity.TRAINING, 9, 10**9
    for number in range(3):
        figures.measured(measured(number))
    await line.up.take(11)
    await line.down.take(22)
    with figures.waits.on(Wait.GROUP):
        found = await scrape(endpoint.address)
    assert {metric.name for metric in (*METRICS, *SHARED)} <= found.names
    info = found.labels_of("hetnode_node_info")[0]
    assert (info["run"], info["peer"], info["device"]) == ("run-1", PEER, "cpu")
    assert found("hetnode_node_activity", activity="training") == 1
    assert found("hetnode_node_activity", activity="resting") == 0
    assert found("hetnode_node_coordinator_connected") == 1
    assert (found("hetnode_node_round"), found("hetnode_node_inner_step")) == (3, 4)
    assert found("hetnode_node_inner_steps_total") == 9
    # Round 0 is the model before the first round.
    assert found("hetnode_node_rounds_total") == 2
    assert found("hetnode_node_tokens_total") == 200
    assert found("hetnode_node_payload_bytes_total") == 14
    assert found("hetnode_node_phase_seconds_total", phase="inner") == 4
    assert found("hetnode_node_phase_seconds_total", phase="compute") == 1
    assert found("hetnode_node_link_sent_bytes_total") == 11
    assert found("hetnode_node_link_received_bytes_total") == 22
    assert found("hetnode_node_device_memory_bytes") == 1e9
    assert found("hetnode_node_validation_loss") == 5.5
    assert found("hetnode_node_train_loss") == 5.25
    assert found("hetnode_node_waiting", cause="group") == 1
    assert found("hetnode_node_waiting", cause="plan") == 0
    assert {each["cause"] for each in found.labels_of("hetnode_node_waiting_seconds_total")} == set(Wait)


async def test_a_node_that_has_not_joined_shows_so(endpoint: MetricsEndpoint) -> None:
    found = await scrape(endpoint.address)
    assert found("hetnode_node_activity", activity="starting") == 1
    assert found("hetnode_node_coordinator_connected") == 0
    assert not {"hetnode_node_round", "hetnode_node_validation_loss"} & found.names


async def test_a_node_whose_coordinator_is_away_shows_so(
    figures: NodeFigures, endpoint: MetricsEndpoint
) -> None:
    figures.joined(PEER, membership(Line(), away=2.0))
    assert (await scrape(endpoint.address))("hetnode_node_coordinator_connected") == 0


async def test_a_resting_node_says_nothing_of_its_coordinator(
    figures: NodeFigures, endpoint: MetricsEndpoint
) -> None:
    figures.joined(PEER, membership(Line()))
    figures.activity, figures.membership = Activity.RESTING, None
    found = await scrape(endpoint.address)
    assert found("hetnode_node_activity", activity="resting") == 1
    assert "hetnode_node_coordinator_connected" not in found.names


async def test_bytes_are_counted_over_all_visits(figures: NodeFigures) -> None:
    for _ in range(3):
        line = Line()
        figures.joined(PEER, membership(line))
        await line.up.take(5)
        await line.down.take(6)
        figures.membership = None
    assert (figures.sent_bytes, figures.received_bytes) == (15, 18)


def test_tasks_that_wait_at_the_same_time_count_once() -> None:
    now = 0.0
    waits = Waits(lambda: now)
    with waits.on(Wait.GROUP):
        now = 1.0
        with waits.on(Wait.GROUP), waits.on(Wait.PLAN):
            now = 3.0
            assert waits.seconds(Wait.GROUP) == 3.0
        assert waits.is_waiting(Wait.GROUP)
        now = 4.0
    assert waits.seconds(Wait.GROUP) == 4.0
    assert waits.seconds(Wait.PLAN) == 2.0
    now = 9.0
    assert not waits.is_waiting(Wait.GROUP)
    assert waits.seconds(Wait.GROUP) == 4.0


async def test_a_wait_that_is_cancelled_is_over() -> None:
    waits, begun = Waits(), asyncio.Event()

    async def wait() -> None:
        with waits.on(Wait.LINKS):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await begun.wait()
    assert waits.is_waiting(Wait.LINKS)
    task.cancel()
    await asyncio.wait({task})
    assert not waits.is_waiting(Wait.LINKS)


def test_only_the_last_member_shows_a_loss(figures: NodeFigures, tmp_path: Path) -> None:
    figures.measured(measured(1, complete=False))
    shown = {metric.name for metric, _ in NodeMetrics(figures, tmp_path).read()}
    assert not {"hetnode_node_validation_loss", "hetnode_node_train_loss"} & shown


def test_a_folder_that_is_gone_costs_one_figure(figures: NodeFigures, tmp_path: Path) -> None:
    shown = {metric.name for metric, _ in NodeMetrics(figures, tmp_path / "gone").read()}
    assert "hetnode_disk_free_bytes" not in shown
    assert "hetnode_node_rounds_total" in shown
