"""The step from a judgement to the alarm of the run."""

from __future__ import annotations

import logging

from coordinator.ops.health.monitor import HealthMonitor
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.commands import RaiseAlarm
from protocol.status import AlarmMode

log = logging.getLogger(__name__)


async def judge_health(command_loop: CommandLoop, health: HealthMonitor, mode: AlarmMode) -> None:
    """Judge the rounds that can be judged now: log what is unusual, and tell the command loop of an alarm."""
    for judgement in health.judge(command_loop.state):
        for finding in judgement.news:
            log.warning("%s", finding.sentence)
        if judgement.alarm and mode is not AlarmMode.OFF:
            healthy, pauses = judgement.last_healthy, mode is AlarmMode.PAUSE
            await command_loop.execute(RaiseAlarm(judgement.round_number, healthy, judgement.alarm, pauses))
