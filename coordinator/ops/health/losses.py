"""Spikes of the validation loss.

The loss of a replica is compared with its own earlier losses. Its level is the lowest median of three losses
in a row, and sigma comes from the differences between neighbouring losses, which do not contain the trend. A
loss is a spike if it is above its level by more than SIGMAS sigma. Sigma has a floor: late in a run
losses are so steady that a rise without meaning, as after the loss of a replica, would be many sigma. No
level is above the loss of a model that knows nothing, with which also the first rounds are compared. Sigma's
width depends on whether the contributors are those of the window (coordinator.ops.health.figures.turnover).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from coordinator.ops.health.figures import SIGMAS, MeasuredRound, sigmas, steps_spread, turnover
from protocol.status import HealthFinding, Sign

LEAST_SIGMA = 0.05
"""Of the level. A spike is 30 % above it: noise of 5 % makes none, and a loss that doubles is 20 sigma."""
LEAST_SIGMA_NATS = 0.02
"""Near a loss of 0, a part of the level would be nothing."""
LEAST_ROUNDS = 5
"""With fewer earlier losses the level is that of a model that knows nothing."""
MOST_LOSS = 1e4
"""Greater losses count as not finite: no model of a run has them, and their sums could overflow."""
MAJORITY = 0.5


@dataclass(frozen=True)
class _Level:
    """What is expected of one replica: `limit` is the greatest loss that is no spike."""

    level: float
    sigma: float
    limit: float


def judge_losses(window: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Findings about the losses of round `now` after the rounds of `window`, in ascending order."""
    levels = _levels(window, now)
    spikes = {index: each for index, each in levels.items() if now.losses[index] > each.limit}
    broken = _broken(now)
    of_run = _is_majority({*broken, *spikes}, now.work)
    about = HealthFinding(Sign.LOSS, of_run=of_run, raises_alarm=of_run)
    if broken:
        yield replace(about, replicas=tuple(sorted(broken)))
    if spikes:
        far = median(sigmas(now.losses[at] - each.level, each.sigma) for at, each in spikes.items())
        loss, level = median(now.losses[at] for at in spikes), median(it.level for it in spikes.values())
        yield replace(about, replicas=tuple(sorted(spikes)), value=loss, usual=level, sigmas=far)


def last_calm(window: Sequence[MeasuredRound], now: MeasuredRound) -> int:
    """The newest round of `window` before the loss began to rise: 0 if there is none.

    That is the newest in which the majority was not above half of what is permitted.
    """
    for i, then in reversed([*enumerate(window)]):
        levels = _levels(window[:i], then)
        rising = {at for at, each in levels.items() if then.losses[at] > (each.level + each.limit) / 2}
        if not _is_majority({*_broken(then), *rising}, then.work):
            return then.round_number
    return 0


def _broken(figures: MeasuredRound) -> list[int]:
    """The replicas whose loss is no number that a model can have."""
    return [index for index, loss in figures.losses.items() if not _is_usable(loss)]


def _is_majority(indices: Collection[int], work: Mapping[int, float]) -> bool:
    """Whether these replicas have most of the work of the plan, and are not one of several.

    Otherwise one replica with most of the work could stop a run by figures that only it measures.
    """
    total = math.fsum(work.values())
    part = math.fsum(work.get(index, 0.0) for index in sorted(indices))
    return part > MAJORITY * total and len(indices) >= min(2, len(work))


def _levels(window: Sequence[MeasuredRound], now: MeasuredRound) -> dict[int, _Level]:
    """By replica, for those that have measured a usable loss now, and have something to compare with."""
    found = {}
    floor = LEAST_SIGMA * (1 + turnover(window, now))
    for index, loss in now.losses.items():
        history = [each.losses[index] for each in window if index in each.losses]
        usable = [each for each in history if _is_usable(each)]
        levels, steps = [now.untrained_loss], 0.0
        if len(usable) >= LEAST_ROUNDS:
            levels += [median(usable[start : start + 3]) for start in range(len(usable) - 2)]
            steps = steps_spread(usable)
        level = min(levels)
        if not _is_usable(loss) or not math.isfinite(level):
            continue
        sigma = max(steps, floor * abs(level), LEAST_SIGMA_NATS)
        found[index] = _Level(level, sigma, level + SIGMAS * sigma)
    return found


def _is_usable(loss: float) -> bool:
    return math.isfinite(loss) and abs(loss) <= MOST_LOSS
