"""What a node tells commands of its machine: its figures, its rates, and the newest lines of its log."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.monitoring.figures import Activity, NodeFigures
from node.monitoring.recent_log import RecentLog
from node.monitoring.report import NodeReport, RateMeter, Rates, report_from, report_of
from node.net.membership import RunView
from protocol.server.line import Line
from protocol.status import Measurement, Wait
from protocol.types import Capacity, Member, Plan, Replica, StageRange
from tests.builders import keyed, spec_of

PEER = keyed(0).peer


def membership(run_view: RunView) -> Any:
    estimates = SimpleNamespace(line=Line(), capacity=Capacity("cuda:0", 1, 1))
    return SimpleNamespace(run="run-1", progress=(3, 1), away=2.5, estimates=estimates, run_view=run_view)


def test_a_report_has_the_figures_of_the_node() -> None:
    figures, spec = NodeFigures(), spec_of(1, rounds=9)
    assert report_of(figures) == NodeReport(activity="starting")
    replica = Replica(0, (Member(PEER, StageRange(0, 1), ""),), (), microbatches=3)
    figures.spec, figures.activity, figures.inner_steps = spec, Activity.TRAINING, 7
    figures.joined(PEER, membership(RunView(plans={1: Plan(1, 1, 0, (replica,), "")})))
    figures.measured(Measurement(PEER, 2, 0, 0, 3.5, 3.25, 64, 4.0, complete=True, compute_seconds=1.0))
    with figures.waits.on(Wait.GROUP):
        report = report_of(figures)
    assert (report.activity, report.waits, report.away) == ("training", ("group",), 2.5)
    assert (report.round_number, report.rounds_total, report.steps_per_round) == (3, 9, spec.inner.steps)
    assert report.tokens_per_step == 3 * spec.inner.microbatch_size * spec.model.context
    assert (report.busy, report.train_loss, report.validation_loss) == (0.25, 3.5, 3.25)
    assert figures.membership is not None
    assert figures.membership.waits() == ()  # heartbeats tell them, too
    figures.measured(Measurement(PEER, 3, 0, 0, math.nan, math.inf, complete=True))
    report = report_of(figures)
    assert (report.train_loss, report.validation_loss) == (None, None)
    assert report_from(json.loads(json.dumps(asdict(report), allow_nan=False))) == report


def test_a_report_of_another_version_is_read_as_far_as_it_is_known() -> None:
    assert report_from({"peer": "P", "waits": ["tea"], "of a later version": 1}) == NodeReport(
        peer="P", waits=("tea",)
    )


def test_rates_are_those_of_the_last_seconds() -> None:
    meter, report = RateMeter(window=10), NodeReport()
    assert meter.note(0, report) == Rates()
    for second in range(1, 31):
        per_second = 100 if second <= 15 else 300
        report = replace(
            report,
            sent_bytes=report.sent_bytes + per_second,
            received_bytes=report.received_bytes + 10,
            inner_steps=report.inner_steps + 2,
        )
        rates = meter.note(second, report)
    assert rates == Rates(300.0, 10.0, 2.0)
    # Another process of the node counts anew.
    assert meter.note(31, NodeReport()) == Rates()


def test_the_newest_lines_of_the_log_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = logging.getLogger("node.test")
    log.info("before")
    with RecentLog(most=3) as recent:
        for number in range(5):
            log.info("line %d", number)
        log.warning("x" * 10_000)
        log.debug("a detail")
    log.info("after")
    assert len(recent.lines) == 3
    assert [line.partition("INFO ")[2] for line in recent.lines[:2]] == ["line 3", "line 4"]
    assert " xxx" in recent.lines[2]
    assert len(recent.lines[2]) == 500
