"""Whether the payloads of a round point the same way.

The cosine of a payload with the mean of the others depends on the model, the compression and the age of the
run, so it is judged relative to the median of its stage in the same round. That ratio is about 1 for every
honest payload and about 0 for noise. It is averaged over the last RECENT rounds, because one round of few
payloads tells little. A peer is named if its average is below HALF and by more than `sigmas` sigma below 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from coordinator.ops.health.records import RoundFigures, by_stage, named_stages, turnover
from coordinator.ops.health.robust import middle, sigmas, spread
from coordinator.run.state.text import short
from protocol.status import HealthFinding, Sign
from protocol.types import PeerId

RECENT = 5
"""Rounds over which a peer's ratios are averaged."""
HALF = 0.5
LEAST_SIGMA = 0.1
"""Of the ratios: the payloads of few replicas may happen to be more alike than this."""
LEAST_PAYLOADS = 3
"""With two, each is the mean of the others of the other: their cosines are equal."""
LEAST_ROUNDS = 3
MOST_NAMED = 5
COLLAPSE = 0.25
"""The part of its former median below which the agreement of a stage has collapsed."""
ERROR_STEP = 0.2
MOST_COSINE = 2.0
"""Sums of greater figures, or of infinite ones, could raise."""


def judge_agreement(
    window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """Findings about the payloads of round `now` after the rounds of `window`, in ascending order."""
    yield from _outliers([*window, now][-RECENT:], now, most_sigmas)
    yield from _collapse(window, now, most_sigmas)
    yield from _error_feedback(window, now, most_sigmas)
    yield from _kinds([*window, now], now)


def _outliers(
    rounds: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """Peers whose payloads agree with the others far less than those of other peers do."""
    ratios: dict[tuple[int, PeerId], list[float]] = defaultdict(list)
    of_stage: dict[int, list[float]] = defaultdict(list)
    for each in rounds:
        for stage, payloads in by_stage(each).items():
            cosines = [(payload.owner, payload.cosine) for payload in payloads if payload.cosine is not None]
            center = middle([cosine for _, cosine in cosines])
            if center is None or center <= 0 or len(cosines) < LEAST_PAYLOADS:
                continue
            for owner, cosine in cosines:
                ratio = max(-1.0, min(3.0, cosine / center))
                ratios[stage, owner].append(ratio)
                of_stage[stage].append(ratio)
    owners = {(payload.stage, payload.owner): payload for payload in now.payloads}
    named = 0
    for (stage, owner), found in sorted(ratios.items()):
        if (stage, owner) not in owners or len(found) < LEAST_ROUNDS or named >= MOST_NAMED:
            continue
        mean = math.fsum(found) / len(found)
        sigma = max(spread(of_stage[stage], 1.0), LEAST_SIGMA) / math.sqrt(len(found))
        far = sigmas(1.0 - mean, sigma)
        if mean < HALF and far > most_sigmas:
            named += 1
            yield HealthFinding(
                Sign.AGREEMENT,
                f"Round {now.round_number}, stage {stage}: the payloads of {short(owner)} agree with the "
                f"others {mean:.2f} times as much as is usual ({far:.0f} sigma below, over "
                f"{len(found)} rounds).",
                peers=(owner,),
            )


def _collapse(
    window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """Stages whose median cosine has fallen to a small part of what it was, in this round and the last.

    The cosines of a stage fall by themselves as a run goes on, so a number of sigma alone is no measure. They
    also grow with the number of payloads: among other contributors, less may be left of them.
    """
    if not window:
        return
    *earlier, last = window
    stages = sorted(by_stage(now))
    part = COLLAPSE / (1 + turnover(window, now))
    fallen = []
    for stage in stages:
        known = [found for each in earlier if (found := _center(each, stage)) is not None]
        before, current = _center(last, stage), _center(now, stage)
        usual = middle(known[-RECENT:])
        if len(known) < LEAST_ROUNDS or usual is None or usual <= 0 or before is None or current is None:
            continue
        sigma = spread([next_one - one for one, next_one in pairwise(known)], 0.0)
        remains = max(before, current)
        # Two rounds in a row, each half as far as one round would have to be.
        if remains < part * usual and 2 * sigmas(usual - remains, sigma) > most_sigmas:
            fallen.append((stage, usual, current))
    if not fallen:
        return
    stage, usual, current = fallen[0]
    of_run = 2 * len(fallen) > len(stages)
    yield HealthFinding(
        Sign.AGREEMENT,
        f"Round {now.round_number}: at {named_stages([stage for stage, *_ in fallen], stages)} the payloads "
        f"hardly agree any more, for two rounds: their median cosine fell to {current:.3f} from {usual:.3f}.",
        of_run,
        raises_alarm=of_run,
    )


def _error_feedback(
    window: Sequence[RoundFigures], now: RoundFigures, most_sigmas: float
) -> Iterator[HealthFinding]:
    """A jump of the part of error feedback in what is proposed."""
    history = [found for each in window if (found := middle(each.error_shares)) is not None]
    share, usual = middle(now.error_shares), middle(history)
    if share is None or usual is None or len(history) <= LEAST_ROUNDS:
        return
    sigma = spread([after - before for before, after in pairwise(history)], 0.0)
    far = share - max(history[-1], usual)
    if far > ERROR_STEP and sigmas(far, sigma) > most_sigmas:
        yield HealthFinding(
            Sign.ERROR_FEEDBACK,
            f"Round {now.round_number}: error feedback makes up {share:.0%} of what the replicas propose, "
            f"before it was {max(history[-1], usual):.0%}: much of what is learned is not sent.",
            of_run=True,
        )


def _kinds(rounds: Sequence[RoundFigures], now: RoundFigures) -> Iterator[HealthFinding]:
    """Stages at which full and pipeline replicas pull against each other, although each kind agrees."""
    for stage in sorted(by_stage(now)):
        means = [kind_means(each, stage) for each in rounds]
        pairs = [(alike, unlike) for alike, unlike in means if alike is not None and unlike is not None]
        if len(pairs) <= LEAST_ROUNDS:
            continue
        alike = middle([alike for alike, _ in pairs])
        unlike = middle([unlike for _, unlike in pairs])
        if alike is None or unlike is None or alike <= 0 or unlike > -LEAST_SIGMA * alike:
            continue
        yield HealthFinding(
            Sign.KINDS,
            f"Round {now.round_number}, stage {stage}: full and pipeline replicas pull against each other: "
            f"their cosine is {unlike:.3f}, within each kind it is {alike:.3f}, over {len(pairs)} rounds.",
            of_run=True,
        )


def kind_means(figures: RoundFigures, stage: int) -> tuple[float | None, float | None]:
    """The mean cosine of single payloads of one kind of replica, and of both kinds, with one another."""
    payloads = [each for each in figures.payloads if each.stage == stage]
    alike = [each.alike for each in payloads if each.alike is not None]
    unlike = [each.unlike for each in payloads if each.unlike is not None]
    return mean(alike), mean(unlike)


def mean(cosines: Sequence[float]) -> float | None:
    """The mean of those that can be cosines; None without any."""
    possible = [each for each in cosines if abs(each) <= MOST_COSINE]
    return math.fsum(possible) / len(possible) if possible else None


def _center(figures: RoundFigures, stage: int) -> float | None:
    """The median cosine of a stage; None with fewer than three payloads."""
    payloads = (each for each in figures.payloads if each.stage == stage)
    cosines = [each.cosine for each in payloads if each.cosine is not None]
    return middle(cosines) if len(cosines) >= LEAST_PAYLOADS else None
