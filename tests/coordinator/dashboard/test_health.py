"""What the pages say of the training's health, of alarms, pauses and rollbacks."""

from __future__ import annotations

import json

from coordinator.dashboard.health_record import MOST_STAGES, health_record
from coordinator.dashboard.view import RunView
from coordinator.state.commands import PauseRun, RaiseAlarm
from coordinator.status.run_status import run_status
from protocol.status import StageHealth, TrainingHealth
from protocol.types import PausedBy
from tests.support.coordinator_run import Run, play_rounds, started_and_attested

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m" + "x" * 100_000


def view_of(run: Run, health: TrainingHealth | None = None) -> RunView:
    return RunView(run.state, run_status(run.state, (), run.now, run.now, (), health))


def stage_of(stage: int, least: float | None) -> StageHealth:
    return StageHealth(stage, 3, 0.5, least, None, None, None, None, 1.0, 0.5)


def test_before_anything_is_judged_there_is_nothing() -> None:
    record = health_record(view_of(started_and_attested(2)))
    assert record == {"judged": None, "alarm": None, "pause": None, "rollbacks": []}


def test_the_stages_that_agree_least_are_shown_and_texts_are_cut() -> None:
    stages = tuple(stage_of(i, None if i == 3 else 1 - i / 100) for i in range(50))
    health = TrainingHealth(4, stages, 0.5, (HOSTILE,) * 100)
    record = health_record(view_of(started_and_attested(2), health))
    judged = record["judged"]
    assert [each["stage"] for each in judged["stages"]] == list(range(50 - MOST_STAGES, 50))
    assert judged["stage_count"] == 50
    assert len(judged["findings"]) <= 20
    assert all(len(each) <= 400 and each.isprintable() for each in judged["findings"])
    json.dumps(record, allow_nan=False)


def test_an_alarm_a_pause_and_a_rollback_are_said() -> None:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 2)
    run.accept(RaiseAlarm(2, 1, HOSTILE, True))
    record = health_record(view_of(run))
    assert record["alarm"]["round"] == 2
    assert len(record["alarm"]["text"]) <= 1000
    assert (record["pause"]["by"], record["pause"]["holds"]) == ("alarm", False)


def test_a_pause_of_the_operator() -> None:
    run = started_and_attested(2, rounds=9)
    run.accept(PauseRun(PausedBy.OPERATOR, "the loss has risen"))
    pause = health_record(view_of(run))["pause"]
    assert (pause["by"], pause["reason"], pause["from_round"]) == ("operator", "the loss has risen", 2)
