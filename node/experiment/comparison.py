"""What results say about each other: deltas, and whether what the paper found shows in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from node.experiment.matrix import Row, Table, fraction_of
from node.experiment.results import Result
from node.experiment.trial import Mode

MEAN = "mean"
"""Stands for the mean over seeds, where a verdict has one answer per seed."""


@dataclass(frozen=True)
class Answer:
    """Whether a claim holds, and the numbers that say so."""

    holds: bool
    numbers: str


@dataclass(frozen=True)
class Verdict:
    """A claim, and its answer for every seed, and for the mean over seeds where all were measured.

    What was not measured, or has no finite loss, has no answer.
    """

    claim: str
    answers: Mapping[int | str, Answer]

    @property
    def is_known(self) -> bool:
        return MEAN in self.answers

    @property
    def holds(self) -> bool:
        """For all seeds and on the mean."""
        return self.is_known and all(answer.holds for answer in self.answers.values())


def losses_of(row: Row, results: Mapping[str, Result]) -> dict[int | str, float]:
    """Finite losses by seed, and the mean where all seeds have one."""
    found: dict[int | str, float] = {}
    for seed, planned in row.trials.items():
        result = results.get(planned.trial.key)
        if result is not None and not result.diverged:
            found[seed] = result.loss
    if len(found) == len(row.trials):
        found[MEAN] = sum(found.values()) / len(found)
    return found


def deltas_of(
    table: Table, row: Row, seeds: Sequence[int], results: Mapping[str, Result]
) -> dict[int, float]:
    """Percent over the baseline of the row, by seed: of those seeds where both are known and finite."""
    if not row.baseline or row.baseline == row.name:
        return {}
    other, found = table.row(row.baseline), {}
    for seed in seeds:
        mine, base = (results.get(each.trials[seed].trial.key) for each in (row, other))
        if mine and base and not mine.diverged and not base.diverged:
            found[seed] = 100 * (mine.loss / base.loss - 1)
    return found


def verdicts_of(table: Table, results: Mapping[str, Result]) -> list[Verdict]:
    """On base < heterogeneous < uniform at every k/d, and on where heterogeneous replicas gain the most."""
    base = next((row for row in table.rows if row.mode is Mode.SPARSELOCO), None)
    pairs = _pairs(table)
    found = []
    for k, (heterogeneous, uniform) in pairs.items():
        at = fraction_of(k, uniform.width)
        if base is not None:
            found.append(_ordering(f"base < heterogeneous < uniform at k/d {at}", results,
                                   (base, heterogeneous, uniform)))  # fmt: skip
        else:
            found.append(_ordering(f"heterogeneous < uniform at k/d {at}", results, (heterogeneous, uniform)))
    if len(pairs) > 1:
        found.append(_advantage(pairs, results))
    return found


def _pairs(table: Table) -> dict[int, tuple[Row, Row]]:
    """Heterogeneous and uniform rows of equal k, the widest first."""
    by_k: dict[int, dict[Mode, Row]] = {}
    for row in table.rows:
        if row.k is not None and row.mode in (Mode.HETEROGENEOUS, Mode.UNIFORM):
            by_k.setdefault(row.k, {}).setdefault(row.mode, row)
    return {
        k: (rows[Mode.HETEROGENEOUS], rows[Mode.UNIFORM])
        for k, rows in sorted(by_k.items(), reverse=True)
        if len(rows) == 2
    }


def _ordering(claim: str, results: Mapping[str, Result], rows: tuple[Row, ...]) -> Verdict:
    losses = [losses_of(row, results) for row in rows]
    answers: dict[int | str, Answer] = {}
    seeds: list[int | str] = [*rows[0].trials, MEAN]
    for seed in seeds:
        if all(seed in each for each in losses):
            values = [each[seed] for each in losses]
            holds = all(a < b for a, b in pairwise(values))
            answers[seed] = Answer(holds, ", ".join(f"{value:.4f}" for value in values))
    return Verdict(claim, answers)


def _advantage(pairs: Mapping[int, tuple[Row, Row]], results: Mapping[str, Result]) -> Verdict:
    wide, narrow = max(pairs), min(pairs)
    width = pairs[wide][0].width
    gains = []
    for k in (wide, narrow):
        heterogeneous, uniform = (losses_of(row, results) for row in pairs[k])
        gains.append(
            {seed: uniform[seed] - heterogeneous[seed] for seed in uniform.keys() & heterogeneous.keys()}
        )
    answers: dict[int | str, Answer] = {}
    seeds: list[int | str] = [*pairs[wide][0].trials, MEAN]
    for seed in seeds:
        if all(seed in each for each in gains):
            at_wide, at_narrow = (each[seed] for each in gains)
            answers[seed] = Answer(at_narrow > at_wide, f"{at_narrow:.4f} against {at_wide:.4f}")
    claim = (
        f"heterogeneous gains more on uniform at k/d {fraction_of(narrow, width)} "
        f"than at {fraction_of(wide, width)}"
    )
    return Verdict(claim, answers)
