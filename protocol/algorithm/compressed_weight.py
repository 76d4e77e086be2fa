"""How much compressed replicas weigh beside full ones where grouping.weights is "measured".

The links of a compressed replica project activations and their gradients, so its payloads have a bias that
all compressed replicas share: more of them do not average it away. Full replicas have none, so they are the
measure. Members tell cosines of pairs of payloads (protocol.algorithm.comparison), and of each stage

    agreement = (cosine of a compressed payload with a full one) / (cosine of two full payloads)

which is about 1 without bias, however noisy the payloads are. Payloads of equal norm with independent errors
have the least error in their mean if each weighs as its cosine with what all of them estimate (maximal ratio
combining: Brennan, "Linear Diversity Combining Techniques", 1959). So that ratio is the weight, in bounds.

A member can lie about one payload of each of its stages. Per owner the median of RECENT rounds counts; of a
stage the lower median of the cosines of full payloads and the higher one of the compressed; of the stages the
higher median. Of an even number the value counts that makes the weights more equal: so one liar of two, or
half of the stages, cannot lower a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, fsum
from statistics import median, median_high, median_low

from protocol.algorithm.batch import work_of
from protocol.spec.link import UNCOMPRESSED
from protocol.spec.run import RunSpec
from protocol.types import PeerId, Replica

LEAST_WEIGHT = 0.25
"""Compressed replicas see data that no other sees, so they always count."""
STEP = 0.125
"""Weights are multiples of it, and one changes only if what is measured is a whole step away."""
RECENT = 5
"""Rounds that are measured for a change, and the least number between two changes."""
_MOST_CHANGE = 2
_LEAST_TO_COMPARE = 2
_LEAST_ROUNDS = 3
"""A payload of a newcomer has a part of a phase behind it."""
_LEAST_COSINE = 0.01
"""If two full payloads of a stage agree less, nothing can be told there."""


@dataclass(frozen=True)
class PairCosine:
    """The cosine of the payload of `owner` at `stage` with one other payload of the same round."""

    stage: int
    owner: PeerId
    cosine: float


def is_compressed(replica: Replica) -> bool:
    """Whether a link of `replica` carries less than whole activations."""
    return any(link.k != UNCOMPRESSED for link in replica.links)


def weighed(spec: RunSpec, replicas: Sequence[Replica], measured: float) -> list[Replica]:
    """`replicas` of a plan, weighed by their work; compressed ones by :func:`factor_in` times it."""
    factor = factor_in(spec, replicas, measured)
    return [
        replace(each, weight=work_of(spec, each) * (factor if is_compressed(each) else 1.0))
        for each in replicas
    ]


def factor_in(spec: RunSpec, replicas: Sequence[Replica], measured: float) -> float:
    """The factor of the weights of compressed replicas in a plan of `replicas`: `measured`, or more.

    It is 1 with fewer than two replicas that are not compressed, since none can be compared with another one.
    It is so high that none of these weighs half of all, if shares allow that: a round is committed with more
    than half of the weight, so one member that is late would abort it.
    """
    others = [work_of(spec, each) for each in replicas if not is_compressed(each)]
    compressed = fsum(work_of(spec, each) for each in replicas if is_compressed(each))
    if len(others) < _LEAST_TO_COMPARE or not compressed:
        return 1.0
    at_half = (2 * max(others) - fsum(others)) / compressed
    return max(measured, min(1.0, STEP * (floor(at_half / STEP) + 1)))


def relative_agreement(full: Iterable[PairCosine], compressed: Iterable[PairCosine]) -> float | None:
    """How far compressed payloads agree with full ones, relative to these with each other.

    None if fewer than half of the stages, or none, tell it: without two full replicas, for example.

    Args:
        full: of the last rounds, cosines of full payloads with other full ones, all finite.
        compressed: of compressed payloads with full ones.
    """
    with_full, with_compressed = _by_stage(full), _by_stage(compressed)
    ratios = [
        median_high(with_compressed[stage]) / usual
        for stage, cosines in with_full.items()
        if stage in with_compressed and (usual := median_low(cosines)) >= _LEAST_COSINE
    ]
    stages = len(with_full.keys() | with_compressed.keys())
    return median_high(ratios) if ratios and 2 * len(ratios) >= stages else None


def next_weight(present: float, agreement: float) -> float:
    """The weight of compressed replicas after `agreement` was measured: a multiple of STEP up to 1.

    About twice or half of `present` at most; `present` itself while the difference is less than a step.
    """
    wanted = max(LEAST_WEIGHT, min(1.0, agreement))
    if abs(wanted - present) < STEP:
        return present
    near = max(present / _MOST_CHANGE, min(present * _MOST_CHANGE, wanted))
    return STEP * round(near / STEP)


def _by_stage(cosines: Iterable[PairCosine]) -> Mapping[int, Sequence[float]]:
    """Of each stage the medians of its owners, without those that were measured too seldom."""
    found: dict[int, dict[PeerId, list[float]]] = {}
    for each in cosines:
        found.setdefault(each.stage, {}).setdefault(each.owner, []).append(each.cosine)
    medians = {
        stage: [median(each) for each in owners.values() if len(each) >= _LEAST_ROUNDS]
        for stage, owners in sorted(found.items())
    }
    return {stage: each for stage, each in medians.items() if each}
