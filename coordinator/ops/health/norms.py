"""Whether the payloads of a round have similar norms, and norms like those of the rounds before.

Norms are compared by their logarithms: what matters is by which factor they differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median_low

from coordinator.ops.health.records import (
    PayloadFigures,
    RoundFigures,
    by_stage,
    named_stages,
    turnover,
)
from coordinator.ops.health.robust import middle, sigmas, spread
from coordinator.run.state.text import short
from protocol.status import HealthFinding, Sign

FACTOR = 4.0
"""Norms differ by less between honest replicas, and from round to round."""
LEAST_SIGMA = 0.1
LEAST_PAYLOADS = 3
LEAST_ROUNDS = 4
MOST_NAMED = 5


def judge_norms(
    window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """Findings about the norms of round `now` after the rounds of `window`, in ascending order."""
    for stage, payloads in sorted(by_stage(now).items()):
        yield from _outliers(now.round_number, stage, payloads, most_sigmas)
    yield from _jumps(window, now, most_sigmas)


def _outliers(
    round_number: int, stage: int, payloads: Sequence[PayloadFigures], most_sigmas: float
) -> Iterator[HealthFinding]:
    """Payloads whose norm is far from the median of their stage in this round."""
    logs = [(each.owner, _log(each.norm)) for each in payloads]
    center = middle([log for _, log in logs])
    if center is None or len(logs) < LEAST_PAYLOADS:
        return
    sigma = max(spread([log for _, log in logs], center), LEAST_SIGMA)
    unusual = [
        (owner, log)
        for owner, log in logs
        if abs(log - center) > math.log(FACTOR) and sigmas(abs(log - center), sigma) > most_sigmas
    ]
    for owner, log in unusual[:MOST_NAMED]:
        yield HealthFinding(
            Sign.NORM,
            f"Round {round_number}, stage {stage}: the payload of {short(owner)} has a norm of "
            f"{math.exp(log):.3g}, the median is {math.exp(center):.3g}.",
            peers=(owner,),
        )


def _jumps(window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float) -> Iterator[HealthFinding]:
    """Stages whose median norm is far from that of the window; an alarm if most stages rose, for two rounds.

    A fall is no alarm: norms fall with the learning rate.
    """
    stages = sorted(by_stage(now))
    widened = 1 + turnover(window, now)
    jumps: dict[str, list[tuple[int, float, float]]] = {"rose": [], "fell": []}
    lasting = 0
    for stage in stages:
        history = [found for each in window if (found := _center(each, stage)) is not None]
        center, usual = _center(now, stage), middle(history)
        if center is None or usual is None or len(history) < LEAST_ROUNDS:
            continue
        sigma = max(spread(history, usual), LEAST_SIGMA)
        limit = widened * max(math.log(FACTOR), most_sigmas * sigma)
        if abs(center - usual) > limit:
            jumps["rose" if center > usual else "fell"].append((stage, center, usual))
        low, lows = _low(now, stage), [found for each in window if (found := _low(each, stage)) is not None]
        lasting += low is not None and lows != [] and min(low, lows[-1]) - usual > limit
    for how, unusual in jumps.items():
        if not unusual:
            continue
        _, center, usual = unusual[0]
        is_alarm = how == "rose" and 2 * lasting > len(stages)
        yield HealthFinding(
            Sign.NORM,
            f"Round {now.round_number}: at {named_stages([each for each, *_ in unusual], stages)} the median "
            f"norm of the payloads {how} to {math.exp(center):.3g} from {math.exp(usual):.3g}"
            f"{', for two rounds' if is_alarm else ''}.",
            of_run=True,
            raises_alarm=is_alarm,
        )


def _center(figures: RoundFigures, stage: int) -> float | None:
    """The median of the logarithms of the norms of a stage; None without payloads."""
    return middle([_log(each.norm) for each in figures.payloads if each.stage == stage])


def _low(figures: RoundFigures, stage: int) -> float | None:
    """As :func:`_center`, of two values in the middle the lower one: one of two payloads cannot raise it.

    None if one payload is known of several.
    """
    logs = [_log(each.norm) for each in figures.payloads if each.stage == stage]
    finite = [log for log in logs if math.isfinite(log)]
    return median_low(finite) if len(finite) >= max(1, min(2, len(figures.contributors))) else None


def _log(norm: float) -> float:
    """The logarithm of a norm; that of the least norm told for 0."""
    return math.log(max(norm, _LEAST_NORM)) if norm >= 0 else math.nan


_LEAST_NORM = 1e-30
