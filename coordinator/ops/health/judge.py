"""Judges a round by the rounds before it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.ops.health.agreement import judge_agreement
from coordinator.ops.health.losses import judge_losses, last_calm
from coordinator.ops.health.norms import judge_norms
from coordinator.ops.health.records import Judgement, RoundFigures, same_turn

WINDOW = 16
"""Rounds with which a round is compared."""
SIGMAS = 6.0
"""A figure so many robust standard deviations from what is usual is unusual."""


def judge(rounds: Sequence[RoundFigures], most_sigmas: float = SIGMAS) -> Judgement:
    """The health of the last of `rounds`, in ascending order. Never raises, whatever the figures are."""
    *before, now = rounds
    window = before[-WINDOW:]
    of_payloads = same_turn([*window, now])[:-1]
    findings = (
        *judge_losses(window, now, most_sigmas),
        *judge_agreement(of_payloads, now, most_sigmas),
        *judge_norms(of_payloads, now, most_sigmas),
    )
    is_alarm = any(each.raises_alarm for each in findings)
    last_healthy = last_calm(window, now, most_sigmas) if is_alarm else now.round_number
    return Judgement(now.round_number, findings, last_healthy)
