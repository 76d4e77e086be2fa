"""Says what is unusual in the training, raises the alarm, and tells how compressed payloads agree."""

from __future__ import annotations

import logging

from coordinator.command_loop import CommandLoop
from coordinator.health.monitor import HealthMonitor
from coordinator.state.commands import RaiseAlarm, WeighCompressed
from protocol.status import AlarmMode

log = logging.getLogger(__name__)


async def judge_health(command_loop: CommandLoop, health: HealthMonitor, mode: AlarmMode) -> None:
    """Judge the rounds that can be judged now: log what is unusual, and tell the command loop the rest.

    That is the alarm, and the agreement from which the weight of compressed replicas follows.
    """
    for judgement in health.judge(command_loop.state):
        for finding in judgement.news:
            log.warning("%s", finding.sentence)
        if judgement.alarm and mode is not AlarmMode.OFF:
            healthy, pauses = judgement.last_healthy, mode is AlarmMode.PAUSE
            await command_loop.execute(RaiseAlarm(judgement.round_number, healthy, judgement.alarm, pauses))
        if judgement.agreement is not None and command_loop.state.spec.grouping.weights == "measured":
            await command_loop.execute(WeighCompressed(judgement.round_number, judgement.agreement))
