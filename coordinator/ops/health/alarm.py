"""What the operator wants of alarms, and the step from a judgement to the alarm of the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coordinator.ops.health.judge import SIGMAS
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.commands import RaiseAlarm
from protocol.status import AlarmMode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlarmOptions:
    """What an alarm does, and how far from what is usual (robust standard deviations) a figure must be."""

    mode: AlarmMode = AlarmMode.WARN
    most_sigmas: float = SIGMAS


async def judge_health(command_loop: CommandLoop, health: HealthMonitor, mode: AlarmMode) -> None:
    """Judge the rounds that can be judged now: log what is unusual, and tell the command loop of an alarm."""
    for judgement in health.judge(command_loop.state):
        for finding in judgement.news:
            log.warning("%s", finding.sentence)
        if judgement.alarm and mode is not AlarmMode.OFF:
            healthy, pauses = judgement.last_healthy, mode is AlarmMode.PAUSE
            await command_loop.execute(RaiseAlarm(judgement.round_number, healthy, judgement.alarm, pauses))
