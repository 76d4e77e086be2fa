"""Whether the payloads of a round point the same way, and have norms like one another and like those before.

The cosine of a payload with the mean of the others depends on the model, the compression and the age of the
run, so it is judged relative to the median of its stage in the same round. That ratio is about 1 for every
honest payload and about 0 for noise. It is averaged over the last RECENT rounds, because one round of few
payloads tells little. A peer is named if its average is below HALF and by more than SIGMAS sigma below
1. Norms are compared by their logarithms: what matters is by which factor they differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median_low

from coordinator.ops.health.figures import (
    SIGMAS,
    MeasuredRound,
    middle,
    sigmas,
    spread,
    steps_spread,
    turnover,
)
from protocol.status import HealthFinding, Sign
from protocol.types import PeerId

RECENT = 5
"""Rounds over which a peer's ratios are averaged."""
HALF = 0.5
LEAST_SIGMA = 0.1
"""Of ratios and of logarithms: the payloads of few replicas may happen to be more alike than this."""
LEAST_PAYLOADS = 3
"""With two, each is the mean of the others of the other: their cosines are equal."""
LEAST_ROUNDS = 3
MOST_NAMED = 5
COLLAPSE = 0.25
"""The part of its former median below which the agreement of a stage has collapsed."""
ERROR_STEP = 0.2
FACTOR = math.log(4.0)
"""Norms differ by less between honest replicas, and from round to round."""
_LEAST_NORM = 1e-30


def judge_payloads(window: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Findings about the payloads of round `now` after the rounds of `window`, in ascending order."""
    yield from islice(_unlike_peers([*window, now][-RECENT:], now), MOST_NAMED)
    yield from _collapse(window, now)
    yield from _error_feedback(window, now)
    yield from _kinds([*window, now], now)
    for stage in now.by_stage:
        yield from islice(_great_norms(now, stage), MOST_NAMED)
    yield from _norm_jumps(window, now)


def _unlike_peers(rounds: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Peers whose payloads agree with the others far less than those of other peers do."""
    ratios: dict[tuple[int, PeerId], list[float]] = defaultdict(list)
    of_stage: dict[int, list[float]] = defaultdict(list)
    for each in rounds:
        for stage, payloads in each.by_stage.items():
            center = _center(each, stage)
            if center is None or center <= 0:
                continue
            for payload in payloads:
                if payload.cosine is not None:
                    ratio = max(-1.0, min(3.0, payload.cosine / center))
                    ratios[stage, payload.owner].append(ratio)
                    of_stage[stage].append(ratio)
    here = {(payload.stage, payload.owner) for payload in now.payloads}
    for (stage, owner), found in sorted(ratios.items()):
        if (stage, owner) not in here or len(found) < LEAST_ROUNDS:
            continue
        ratio = math.fsum(found) / len(found)
        sigma = max(spread(of_stage[stage], 1.0), LEAST_SIGMA) / math.sqrt(len(found))
        far = sigmas(1.0 - ratio, sigma)
        if ratio < HALF and far > SIGMAS:
            yield HealthFinding(Sign.AGREEMENT, stages=(stage,), peers=(owner,), value=ratio, sigmas=far)


def _collapse(window: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Stages whose median cosine has fallen to a small part of what it was, in this round and the last.

    The cosines of a stage fall by themselves as a run goes on, so a number of sigma alone is no measure. They
    also grow with the number of payloads: among other contributors, less may be left of them.
    """
    part, fallen = COLLAPSE / (1 + turnover(window, now)), []
    for stage in now.by_stage if window else ():
        known = [found for each in window[:-1] if (found := _center(each, stage)) is not None]
        before, current = _center(window[-1], stage), _center(now, stage)
        usual = middle(known[-RECENT:])
        if len(known) < LEAST_ROUNDS or usual is None or usual <= 0 or before is None or current is None:
            continue
        remains = max(before, current)
        # Two rounds in a row, each half as far as one round would have to be.
        if remains < part * usual and 2 * sigmas(usual - remains, steps_spread(known)) > SIGMAS:
            fallen.append((stage, current, usual))
    yield from _of_stages(Sign.AGREEMENT, now, fallen, 2 * len(fallen) > len(now.by_stage))


def _of_stages(
    sign: Sign, now: MeasuredRound, found: Sequence[tuple[int, float, float]], is_alarm: bool
) -> Iterator[HealthFinding]:
    """A finding about some stages, with the value and what is usual at the first of them."""
    if found:
        stages, (_, value, usual) = tuple(stage for stage, *_ in found), found[0]
        of_run = is_alarm or sign is not Sign.AGREEMENT
        yield HealthFinding(
            sign, stages=stages, value=value, usual=usual, of_run=of_run, raises_alarm=is_alarm
        )


def _error_feedback(window: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """A jump of the part of error feedback in what is proposed."""
    history = [found for each in window if (found := middle(each.error_shares)) is not None]
    share, usual = middle(now.error_shares), middle(history)
    if share is None or usual is None or len(history) <= LEAST_ROUNDS:
        return
    before = max(history[-1], usual)
    if share - before > ERROR_STEP and sigmas(share - before, steps_spread(history)) > SIGMAS:
        yield HealthFinding(Sign.ERROR_FEEDBACK, value=share, usual=before, of_run=True)


def _kinds(rounds: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Stages at which full and pipeline replicas pull against each other, although each kind agrees."""
    for stage in now.by_stage:
        means = [each.kind_means(stage) for each in rounds]
        pairs = [(alike, unlike) for alike, unlike in means if alike is not None and unlike is not None]
        alike, unlike = middle([alike for alike, _ in pairs]), middle([unlike for _, unlike in pairs])
        if len(pairs) <= LEAST_ROUNDS or alike is None or unlike is None:
            continue
        if alike > 0 and unlike <= -LEAST_SIGMA * alike:
            yield HealthFinding(Sign.KINDS, stages=(stage,), value=unlike, usual=alike, of_run=True)


def _great_norms(now: MeasuredRound, stage: int) -> Iterator[HealthFinding]:
    """Payloads whose norm is far from the median of their stage in this round."""
    logs = [(each.owner, _log(each.norm)) for each in now.by_stage[stage]]
    center = middle([log for _, log in logs])
    if center is None or len(logs) < LEAST_PAYLOADS:
        return
    sigma = max(spread([log for _, log in logs], center), LEAST_SIGMA)
    for owner, log in logs:
        if abs(log - center) > FACTOR and sigmas(abs(log - center), sigma) > SIGMAS:
            value, usual = math.exp(log), math.exp(center)
            yield HealthFinding(Sign.NORM, stages=(stage,), peers=(owner,), value=value, usual=usual)


def _norm_jumps(window: Sequence[MeasuredRound], now: MeasuredRound) -> Iterator[HealthFinding]:
    """Stages whose median norm is far from that of the window; an alarm if most stages rose, for two rounds.

    A fall is no alarm: norms fall with the learning rate.
    """
    widened, lasting = 1 + turnover(window, now), 0
    rose, fell = list[tuple[int, float, float]](), list[tuple[int, float, float]]()
    for stage in now.by_stage:
        history = [found for each in window if (found := middle(_logs(each, stage))) is not None]
        center, usual = middle(_logs(now, stage)), middle(history)
        if center is None or usual is None or len(history) <= LEAST_ROUNDS:
            continue
        limit = widened * max(FACTOR, SIGMAS * max(spread(history, usual), LEAST_SIGMA))
        if abs(center - usual) > limit:
            (rose if center > usual else fell).append((stage, math.exp(center), math.exp(usual)))
        low, lows = _low(now, stage), [found for each in window if (found := _low(each, stage)) is not None]
        lasting += low is not None and lows != [] and min(low, lows[-1]) - usual > limit
    yield from _of_stages(Sign.NORM, now, rose, 2 * lasting > len(now.by_stage))
    yield from _of_stages(Sign.NORM, now, fell, is_alarm=False)


def _center(figures: MeasuredRound, stage: int) -> float | None:
    """The median cosine of a stage; None with fewer than three payloads."""
    cosines = figures.cosines(stage)
    return middle(cosines) if len(cosines) >= LEAST_PAYLOADS else None


def _low(figures: MeasuredRound, stage: int) -> float | None:
    """The median of the logarithms of a stage's norms, of two in the middle the lower one.

    So one of two payloads cannot raise it. None if one payload is known of several.
    """
    finite = [log for log in _logs(figures, stage) if math.isfinite(log)]
    return median_low(finite) if len(finite) >= max(1, min(2, len(figures.contributors))) else None


def _logs(figures: MeasuredRound, stage: int) -> list[float]:
    return [_log(each.norm) for each in figures.by_stage.get(stage, ())]


def _log(norm: float) -> float:
    """The logarithm of a norm; that of the least norm told for 0."""
    return math.log(max(norm, _LEAST_NORM)) if norm >= 0 else math.nan
