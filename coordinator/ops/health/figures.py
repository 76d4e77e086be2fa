"""What is judged: the figures of one round, as far as members have measured them, and robust statistics.

No single value moves these statistics far, and none raises on any values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

from coordinator.run.state.state import State
from protocol.group.batch import work_of
from protocol.spec.data import DataSource
from protocol.status import Measurement
from protocol.types import PeerId, entries_of

_NORMAL = 1.4826
"""A normal distribution has a standard deviation of this many median absolute deviations."""
SIGMAS = 6.0
"""A figure that lies further from the usual one, in robust standard deviations, is unusual."""
_MOST_SIGMAS = 999.0
_MOST_COSINE = 2.0
"""Sums of greater figures, or of infinite ones, could raise."""


@dataclass(frozen=True)
class PayloadFigures:
    """One payload of a (stage, round), measured by a peer that does not own it (PayloadAgreement).

    `is_full` tells the kind of its replica; None if it is not known.
    """

    stage: int
    owner: PeerId
    is_full: bool | None
    cosine: float | None
    norm: float
    mean_norm: float
    alike: float | None = None
    unlike: float | None = None


@dataclass(frozen=True)
class MeasuredRound:
    """All figures of one round.

    Attributes:
        work: of the replicas of the plan, by index (protocol.group.batch).
        turn: which stages exchange, where they do so in turn.
        untrained_loss: of a model that knows nothing, the logarithm of its vocabulary; in nats.
        contributors: the owners of the payloads that count, at any stage; empty if the round has none.
        losses: validation loss of each replica that has measured it; any float.
        payloads: those that were measured.
        error_shares: of each member (Measurement.error_share).
        changes: how many changes of the run hold; other rates or steps make other payloads.
        measured_on: the text on which the losses are; on another one they are not comparable.
    """

    round_number: int
    work: Mapping[int, float] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    payloads: tuple[PayloadFigures, ...] = ()
    error_shares: tuple[float, ...] = ()
    contributors: frozenset[PeerId] = frozenset()
    turn: int = 0
    untrained_loss: float = math.inf
    changes: int = 0
    measured_on: tuple[DataSource, ...] = ()

    @cached_property
    def by_stage(self) -> dict[int, list[PayloadFigures]]:
        """The payloads by stage, in ascending order."""
        stages = sorted({each.stage for each in self.payloads})
        return {stage: [each for each in self.payloads if each.stage == stage] for stage in stages}

    def cosines(self, stage: int, is_full: bool | None = None) -> list[float]:
        """Those of a stage that are known; of one kind of replica, if that is given."""
        payloads = self.by_stage.get(stage, ())
        kind = (each for each in payloads if is_full is None or each.is_full is is_full)
        return [each.cosine for each in kind if each.cosine is not None]

    def kind_means(self, stage: int) -> tuple[float | None, float | None]:
        """The mean cosine of single payloads of one kind of replica, and of both kinds, with one another."""
        payloads = self.by_stage.get(stage, ())
        alike = [each.alike for each in payloads if each.alike is not None]
        unlike = [each.unlike for each in payloads if each.unlike is not None]
        return mean(alike), mean(unlike)


def measured_round(
    state: State, round_number: int, measurements: Mapping[PeerId, Measurement]
) -> MeasuredRound:
    """The figures of a round from what its members have measured."""
    plan = state.plan_for(round_number)
    work = {replica.index: work_of(state.spec, replica) for replica in plan.replicas}
    payloads = []
    for measured in measurements.values():
        for each in measured.agreements:
            assignment = state.assignment(each.owner, round_number)
            is_full = None if assignment is None else assignment.replica.is_full
            cosines = each.cosine, each.norm, each.mean_norm, each.alike, each.unlike
            payloads.append(PayloadFigures(each.stage, each.owner, is_full, *cosines))
    decisions = (state.decisions.get((stage, round_number)) for stage in range(state.stages))
    last = (each for each in measurements.values() if each.complete and each.replica in work)
    shares = (each.error_share for each in measurements.values())
    return MeasuredRound(
        round_number,
        work,
        {each.replica: each.validation_loss for each in last},
        tuple(sorted(payloads, key=lambda each: (each.stage, each.owner))),
        tuple(share for share in shares if share is not None),
        frozenset(entry.descriptor.owner for each in decisions if each for entry in entries_of(each)),
        round_number % state.spec.outer.turns,
        math.log(state.spec.model.vocabulary),
        len(plan.changes),
        state.spec_under(plan).data.measured,
    )


def turnover(window: Sequence[MeasuredRound], now: MeasuredRound) -> float:
    """How much the contributors of `now` are others than those of the rounds of `window`: 0 to 1.

    It is the mean Jaccard distance to the rounds with contributors; 0 if there is nothing to compare.
    """
    # The members of a pipeline contribute in different turns.
    former = [each.contributors for each in window if each.contributors and each.turn == now.turn]
    if not former or not now.contributors:
        return 0.0
    shares = [len(each & now.contributors) / len(each | now.contributors) for each in former]
    return 1.0 - math.fsum(shares) / len(shares)


def middle(values: Sequence[float]) -> float | None:
    """The median of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def mean(cosines: Sequence[float]) -> float | None:
    """The mean of those that can be cosines; None without any."""
    possible = [each for each in cosines if abs(each) <= _MOST_COSINE]
    return math.fsum(possible) / len(possible) if possible else None


def spread(values: Sequence[float], center: float) -> float:
    """The robust standard deviation around `center`: from the median absolute deviation; 0 without values."""
    return _NORMAL * (middle([abs(value - center) for value in values]) or 0.0)


def steps_spread(values: Sequence[float]) -> float:
    """The robust standard deviation of the steps between neighbouring values, which have no trend."""
    return spread([after - before for before, after in pairwise(values)], 0.0)


def sigmas(distance: float, sigma: float) -> float:
    """`distance` in units of `sigma`, at most 999: a sigma of 0 would tell nothing in a sentence."""
    if not distance > 0:
        return 0.0
    return min(distance / sigma, _MOST_SIGMAS) if sigma > 0 else _MOST_SIGMAS
