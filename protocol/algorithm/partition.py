"""Runs of the chunks of a stage, one for each reducer. The main process of a node uses it, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True)
class PartRange:
    """The chunks first_chunk..last_chunk - 1 of a stage, in canonical order; none where both are equal."""

    first_chunk: int
    last_chunk: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_chunk <= self.last_chunk:
            raise ValueError(f"no range of chunks: {self.first_chunk} to {self.last_chunk}")

    def __len__(self) -> int:
        return self.last_chunk - self.first_chunk


def partition(chunks: int, fractions: Sequence[float]) -> list[PartRange]:
    """Cut `chunks` into one contiguous part for each reducer, in the order given.

    Exact arithmetic: the same fractions give the same parts on every machine. A fraction of 0 gives an empty
    part: such a member reduces nothing.

    Args:
        fractions: share of each reducer in any unit, such as the part sizes of hivemind's load balancing.

    Raises:
        ValueError: a fraction is negative or not finite, or none is positive.
    """
    if not all(math.isfinite(each) and each >= 0 for each in fractions) or not any(fractions):
        raise ValueError(f"a partition needs finite fractions, one of them positive, not {list(fractions)}")
    shares = [Fraction(each) for each in fractions]
    total, reached, stops = sum(shares), Fraction(0), [0]
    for share in shares:
        reached += share
        stops.append(math.floor(reached * chunks / total + Fraction(1, 2)))
    return [PartRange(first, stop) for first, stop in pairwise(stops)]
