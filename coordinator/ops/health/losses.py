"""Spikes of the validation loss.

The loss of a replica is compared with its own earlier losses. Its level is the lowest median of three losses
in a row, and sigma comes from the differences between neighbouring losses, which do not contain the trend. A
loss is a spike if it is above its level by more than `most_sigmas` sigma. Sigma has a floor: late in a run
losses are so steady that a rise without meaning, as after the loss of a replica, would be many sigma. Its
width depends on whether the contributors are those of the window (coordinator.ops.health.records.turnover).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from coordinator.ops.health.records import RoundFigures, turnover
from coordinator.ops.health.robust import sigmas, spread
from coordinator.run.state.text import counted, listed
from protocol.status import HealthFinding, Sign

LEAST_SIGMA = 0.05
"""Of the level. A spike is 30 % above it: noise of 5 % makes none, and a loss that doubles is 20 sigma."""
LEAST_SIGMA_NATS = 0.02
"""Near a loss of 0, a part of the level would be nothing."""
LEAST_ROUNDS = 5
"""With fewer earlier losses there is no level."""
MOST_LOSS = 1e4
"""Greater losses count as not finite: no model of a run has them, and their sums could overflow."""
MAJORITY = 0.5


@dataclass(frozen=True)
class _Level:
    """What is expected of one replica: `limit` is the greatest loss that is no spike."""

    level: float
    sigma: float
    limit: float


def judge_losses(
    window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """Findings about the losses of round `now` after the rounds of `window`, in ascending order."""
    broken = [index for index, loss in now.losses.items() if not _is_usable(loss)]
    levels = _levels(window, now, most_sigmas)
    spikes = [index for index, each in levels.items() if now.losses[index] > each.limit]
    suspects = sorted({*broken, *spikes})
    if not suspects:
        return
    of_run = is_majority(suspects, now.work)
    parts = []
    if broken:
        parts.append(f"the validation loss of {_named(broken)} is not a finite number")
    if spikes:
        found, level = (
            median(now.losses[each] for each in spikes),
            median(levels[each].level for each in spikes),
        )
        far = median(sigmas(now.losses[each] - levels[each].level, levels[each].sigma) for each in spikes)
        parts.append(
            f"the validation loss of {_named(spikes)} rose to {found:.3f} from a level of {level:.3f} "
            f"({_far(far)})"
        )
    sentence = f"Round {now.round_number}: {', and '.join(parts)}"
    share = f"{counted(len(suspects), 'replica')} of {len(now.work)}"
    yield HealthFinding(Sign.LOSS, f"{sentence}; {share}.", of_run, raises_alarm=of_run)


def last_calm(window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float) -> int:
    """The newest round of `window` before the loss began to rise: 0 if there is none.

    That is the newest in which the majority was not above half of what is permitted.
    """
    for index in range(len(window) - 1, -1, -1):
        then = window[index]
        broken = {index for index, loss in then.losses.items() if not _is_usable(loss)}
        levels = _levels(window[:index], then, most_sigmas)
        rising = {
            index for index, each in levels.items() if then.losses[index] > (each.level + each.limit) / 2
        }
        if not is_majority(sorted(broken | rising), then.work):
            return then.round_number
    return 0


def is_majority(indices: Sequence[int], work: Mapping[int, float]) -> bool:
    """Whether these replicas have most of the work of the plan, and are not one of several.

    Otherwise one replica with most of the work could stop a run by figures that only it measures.
    """
    total = math.fsum(work.values())
    part = math.fsum(work.get(index, 0.0) for index in indices)
    return part > MAJORITY * total and len(indices) >= min(2, len(work))


def _levels(window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float) -> dict[int, _Level]:
    """By replica, for those that have measured enough rounds and a usable loss now."""
    found = {}
    floor = LEAST_SIGMA * (1 + turnover(window, now))
    for index, loss in now.losses.items():
        history = [each.losses[index] for each in window if index in each.losses]
        usable = [each for each in history if _is_usable(each)]
        if not _is_usable(loss) or len(usable) < LEAST_ROUNDS:
            continue
        level = min(median(usable[start : start + 3]) for start in range(len(usable) - 2))
        measured = spread([after - before for before, after in pairwise(usable)], 0.0)
        sigma = max(measured, floor * abs(level), LEAST_SIGMA_NATS)
        found[index] = _Level(level, sigma, level + most_sigmas * sigma)
    return found


def _is_usable(loss: float) -> bool:
    return math.isfinite(loss) and abs(loss) <= MOST_LOSS


def _named(indices: Sequence[int]) -> str:
    return listed([f"replica-{index}" for index in sorted(indices)])


def _far(far: float) -> str:
    return f"{far:.0f} sigma" if far < 100 else "more than 100 sigma"
