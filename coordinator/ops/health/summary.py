"""The health of a round as the status shows it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.ops.health.agreement import kind_means, mean
from coordinator.ops.health.records import Judgement, RoundFigures
from coordinator.ops.health.robust import middle
from protocol.status import StageHealth, TrainingHealth

MOST_FINDINGS = 20
"""In one status; a round with more of them is wholly unusual."""


def summary(figures: RoundFigures, judgement: Judgement) -> TrainingHealth:
    """The medians and means of each stage, and what is unusual."""
    stages = sorted({each.stage for each in figures.payloads})
    return TrainingHealth(
        round_number=figures.round_number,
        stages=tuple(_stage(figures, stage) for stage in stages),
        error_share=middle(figures.error_shares),
        findings=judgement.findings[:MOST_FINDINGS],
    )


def _stage(figures: RoundFigures, stage: int) -> StageHealth:
    payloads = [each for each in figures.payloads if each.stage == stage]
    cosines = [each.cosine for each in payloads if each.cosine is not None]
    alike, unlike = kind_means(figures, stage)

    def of_kind(is_full: bool) -> Sequence[float]:
        kind = (each for each in payloads if each.is_full is is_full)
        return [each.cosine for each in kind if each.cosine is not None]

    return StageHealth(
        stage=stage,
        payloads=len(payloads),
        cosine=middle(cosines),
        least_cosine=min(cosines, default=None),
        full_cosine=mean(of_kind(is_full=True)),
        pipeline_cosine=mean(of_kind(is_full=False)),
        alike=alike,
        unlike=unlike,
        norm=middle([each.norm for each in payloads]) or 0.0,
        mean_norm=middle([each.mean_norm for each in payloads]) or 0.0,
    )
