"""Comparison of results: differences from a baseline, and whether the findings of the paper hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from node.experiment.matrix import MatrixRow, Table, fraction_of
from node.experiment.results import Result, mean
from node.experiment.trial import Mode

MEAN = "mean"
"""Stands for the mean over seeds, next to the seeds."""
LEAST_SEEDS = 3
"""For a confidence interval: that of two seeds would be 13 times as wide as they differ."""
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedAnswer:
    """Whether a claim holds, and the numbers that prove it."""

    holds: bool
    numbers: str


@dataclass(frozen=True)
class Claim:
    """A claim and its answers by seed; MEAN is missing unless all seeds have a finite loss."""

    claim: str
    answers: Mapping[int | str, SeedAnswer]

    @property
    def is_known(self) -> bool:
        return MEAN in self.answers

    @property
    def holds(self) -> bool:
        """For all seeds and for the mean."""
        return self.is_known and all(answer.holds for answer in self.answers.values())


def losses_of(row: MatrixRow, results: Mapping[str, Result]) -> dict[int | str, float]:
    """Finite losses by seed, and the mean if all seeds have one."""
    found: dict[int | str, float] = {}
    for seed, planned in row.trials.items():
        result = results.get(planned.trial.key)
        if result is not None and not result.diverged:
            found[seed] = result.loss
    if len(found) == len(row.trials):
        found[MEAN] = sum(found.values()) / len(found)
    return found


def deltas_of(
    table: Table, row: MatrixRow, seeds: Sequence[int], results: Mapping[str, Result]
) -> dict[int, float]:
    """Loss above that of the row's baseline in percent, for each seed with two finite losses."""
    if not row.baseline or row.baseline == row.name:
        return {}
    mine, base = losses_of(row, results), losses_of(table.row(row.baseline), results)
    return {seed: 100 * (mine[seed] / base[seed] - 1) for seed in seeds if seed in mine and seed in base}


@dataclass(frozen=True)
class Behind:
    """How far a row is behind its baseline in one seed.

    Attributes:
        rounds: of the baseline, before its end, at which it had the row's final loss. Negative where the row
            ends lower: so much earlier the row had what its baseline ends with.
        is_bound: the lower of the two had it before it was first measured: they are apart by more.
    """

    rounds: float
    is_bound: bool


def behind_of(
    table: Table, row: MatrixRow, seeds: Sequence[int], results: Mapping[str, Result]
) -> dict[int, Behind]:
    """How far the row is behind its baseline, by seed. Between measured rounds the loss is taken as linear.

    Trials that have a loss that is not finite, and pairs without a measured round before the end, are left
    out.
    """
    if not row.baseline or row.baseline == row.name:
        return {}
    found = {}
    for seed in seeds:
        mine, base = (results.get(each.trials[seed].trial.key) for each in (row, table.row(row.baseline)))
        if mine is None or base is None:
            continue
        lower, higher, sign = (base, mine, 1.0) if mine.loss >= base.loss else (mine, base, -1.0)
        curve = sorted((number, mean(losses)) for number, losses in lower.validation.items())
        if len(curve) < 2 or not all(math.isfinite(each) for each in (higher.loss, *(y for _, y in curve))):
            continue
        share = _reached(curve, higher.loss) / lower.rounds
        found[seed] = Behind(sign * (1.0 - share) * base.rounds, curve[0][1] < higher.loss)
    return found


def _reached(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """The round at which a curve that ends at most at `loss` first had it, at least its first one."""
    for (first, before), (last, after) in pairwise(curve):
        if before <= loss:
            return first
        if after <= loss:
            return first + (before - loss) / (before - after) * (last - first)
    return curve[-1][0]


def interval_of(deltas: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean, by Student's t; None for less than LEAST_SEEDS values.

    It takes deltas of seeds as independent and normally distributed.
    """
    if len(deltas) < LEAST_SEEDS:
        return None
    from scipy.stats import t  # noqa: PLC0415 - a second, which most commands need not wait

    error = statistics.stdev(deltas) / math.sqrt(len(deltas))
    reach = error * float(t.ppf((1 + _CONFIDENCE) / 2, len(deltas) - 1))
    mean = statistics.fmean(deltas)
    return mean - reach, mean + reach


def verdicts_of(table: Table, results: Mapping[str, Result]) -> list[Claim]:
    """Whether base < heterogeneous < uniform, and at which k/d heterogeneous replicas gain the most."""
    base = [row for row in table.rows if row.mode is Mode.SPARSELOCO][:1]
    pairs = _pairs(table)
    found = []
    for k, pair in pairs.items():
        names = "base < heterogeneous < uniform" if base else "heterogeneous < uniform"
        losses = [losses_of(row, results) for row in (*base, *pair)]
        found.append(
            _verdict(f"{names} at k/d {fraction_of(k, pair[0].width)}", pair[0].trials, losses, _ascend)
        )
    if len(pairs) > 1:
        found.append(_advantage(pairs, results))
    return found


def _pairs(table: Table) -> dict[int, tuple[MatrixRow, MatrixRow]]:
    """Heterogeneous and uniform rows of equal k, the largest k first."""
    by_k: dict[int, dict[Mode, MatrixRow]] = {}
    for row in table.rows:
        if row.k is not None and row.mode in (Mode.HETEROGENEOUS, Mode.UNIFORM):
            by_k.setdefault(row.k, {}).setdefault(row.mode, row)
    return {
        k: (rows[Mode.HETEROGENEOUS], rows[Mode.UNIFORM])
        for k, rows in sorted(by_k.items(), reverse=True)
        if len(rows) == 2
    }


def _verdict(
    claim: str,
    seeds: Iterable[int],
    columns: Sequence[Mapping[int | str, float]],
    judge: Callable[[Sequence[float]], SeedAnswer],
) -> Claim:
    """`judge` answers for each seed, and for the mean, for which all `columns` have a value."""
    keys: list[int | str] = [*seeds, MEAN]
    known = [seed for seed in keys if all(seed in each for each in columns)]
    return Claim(claim, {seed: judge([each[seed] for each in columns]) for seed in known})


def _ascend(losses: Sequence[float]) -> SeedAnswer:
    holds = all(a < b for a, b in pairwise(losses))
    return SeedAnswer(holds, ", ".join(f"{loss:.4f}" for loss in losses))


def _advantage(pairs: Mapping[int, tuple[MatrixRow, MatrixRow]], results: Mapping[str, Result]) -> Claim:
    wide, narrow = max(pairs), min(pairs)
    gains = []
    for k in (wide, narrow):
        heterogeneous, uniform = (losses_of(row, results) for row in pairs[k])
        gains.append(
            {seed: uniform[seed] - heterogeneous[seed] for seed in uniform.keys() & heterogeneous.keys()}
        )

    def judge(gains: Sequence[float]) -> SeedAnswer:
        at_wide, at_narrow = gains
        return SeedAnswer(at_narrow > at_wide, f"{at_narrow:.4f} against {at_wide:.4f}")

    few, many = (fraction_of(k, pairs[k][0].width) for k in (narrow, wide))
    claim = f"heterogeneous gains more on uniform at k/d {few} than at {many}"
    return _verdict(claim, pairs[wide][0].trials, gains, judge)
