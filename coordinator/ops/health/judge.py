"""Judges a round by the rounds before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.ops.health.figures import MeasuredRound, mean, middle
from coordinator.ops.health.losses import judge_losses, last_calm
from coordinator.ops.health.payloads import judge_payloads
from coordinator.ops.health.sentences import sentence
from protocol.status import HealthFinding, StageHealth, TrainingHealth

WINDOW = 16
"""Rounds with which a round is compared."""
MOST_FINDINGS = 20
"""In one status; a round with more of them is wholly unusual."""


@dataclass(frozen=True)
class Judgement:
    """The health of the run in one round.

    Attributes:
        last_healthy: the newest earlier round in which nothing pointed to the alarm yet; 0 without one.
        news: findings that the round before did not have.
    """

    round_number: int
    findings: tuple[HealthFinding, ...]
    last_healthy: int
    news: tuple[HealthFinding, ...] = ()

    @property
    def alarm(self) -> str:
        """The sentences that raise the alarm; "" without one."""
        return " ".join(each.sentence for each in self.findings if each.raises_alarm)


def judge(rounds: Sequence[MeasuredRound]) -> Judgement:
    """The health of the last of `rounds`, in ascending order. Never raises, whatever the figures are."""
    *before, now = rounds
    window = before[-WINDOW:]
    comparable = [each for each in window if each.measured_on == now.measured_on]
    found = (
        *judge_losses(comparable, now),
        *judge_payloads(
            [each for each in window if (each.turn, each.changes) == (now.turn, now.changes)], now
        ),
    )
    sizes = len(now.work), len(now.by_stage)
    findings = tuple(replace(each, sentence=sentence(now.round_number, each, *sizes)) for each in found)
    is_alarm = any(each.raises_alarm for each in findings)
    last_healthy = last_calm(comparable, now) if is_alarm else now.round_number
    return Judgement(now.round_number, findings, last_healthy)


def summary(figures: MeasuredRound, judgement: Judgement) -> TrainingHealth:
    """The health as the status shows it: medians and means of each stage, and what is unusual."""
    return TrainingHealth(
        round_number=figures.round_number,
        stages=tuple(_stage(figures, stage) for stage in figures.by_stage),
        error_share=middle(figures.error_shares),
        findings=judgement.findings[:MOST_FINDINGS],
    )


def _stage(figures: MeasuredRound, stage: int) -> StageHealth:
    payloads, cosines = figures.by_stage[stage], figures.cosines(stage)
    alike, unlike = figures.kind_means(stage)
    return StageHealth(
        stage=stage,
        payloads=len(payloads),
        cosine=middle(cosines),
        least_cosine=min(cosines, default=None),
        full_cosine=mean(figures.cosines(stage, is_full=True)),
        pipeline_cosine=mean(figures.cosines(stage, is_full=False)),
        alike=alike,
        unlike=unlike,
        norm=middle([each.norm for each in payloads]) or 0.0,
        mean_norm=middle([each.mean_norm for each in payloads]) or 0.0,
    )
