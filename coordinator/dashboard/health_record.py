"""The record of the training's health, and of what stops the run or sends it back."""

from __future__ import annotations

from typing import Any

from coordinator.dashboard.text import shown
from coordinator.dashboard.view import RunView
from coordinator.state.state import ALARM_ROUNDS
from protocol.status import StageHealth, TrainingHealth

MOST_STAGES = 8
"""Of more stages those that agree least are shown, as in the terminal."""
_MOST_FINDINGS = 20
_MOST_ROLLBACKS = 5
_LONG = 1000

Record = dict[str, Any]


def health_record(view: RunView) -> Record:
    """JSON: the newest judgement (null before any), the open alarm, the pause, the last rollbacks."""
    state, status = view.state, view.status
    pause, alarm, oldest = status.pause, state.open_alarm, state.current_round - ALARM_ROUNDS
    recent = ((number, each) for number, each in state.restored.items() if number > oldest)
    newest = sorted(recent, reverse=True)[:_MOST_ROLLBACKS]
    return {
        "judged": _judged(status.health) if status.health else None,
        "alarm": {"round": alarm.round_number, "text": shown(status.alarm, _LONG)} if alarm else None,
        "pause": {
            "from_round": pause.from_round,
            "by": pause.by.value,
            "reason": shown(pause.reason, _LONG),
            "holds": state.is_held,
        }
        if pause
        else None,
        "rollbacks": [{"round": number, "restores": restored} for number, restored in newest],
    }


def _judged(health: TrainingHealth) -> Record:
    least = sorted(health.stages, key=lambda each: 1.0 if each.least_cosine is None else each.least_cosine)
    return {
        "round": health.round_number,
        "error_share": health.error_share,
        "findings": [shown(each) for each in health.findings[:_MOST_FINDINGS]],
        "stages": [_stage(each) for each in sorted(least[:MOST_STAGES], key=lambda each: each.stage)],
        "stage_count": len(health.stages),
    }


def _stage(stage: StageHealth) -> Record:
    return {
        "stage": stage.stage,
        "payloads": stage.payloads,
        "cosine": stage.cosine,
        "least": stage.least_cosine,
        "full": stage.full_cosine,
        "pipeline": stage.pipeline_cosine,
        "alike": stage.alike,
        "unlike": stage.unlike,
        "norm": stage.norm,
        "mean_norm": stage.mean_norm,
    }
