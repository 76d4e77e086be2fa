"""Runs of the chunks of a stage, one for each reducer. The main process of a node uses it, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

LEAST_SHARE = Fraction(1, 4)
"""Of an equal share."""


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


def reducer_shares(uplinks: Sequence[int], ratio: float = 1.0) -> list[Fraction]:
    """The part of a stage that each member reduces, so that the slowest upload ends as early as possible.

    Of R members with a payload of 1 each, member i with the share w_i uploads the rest of its own payload and
    the sums for the others:

        1 - w_i + (R - 1) ratio w_i

    For ratio 1 this is what the load balancing of the usual all-reduce minimizes. That solves a linear
    program; this is its solution in exact numbers, so that all members find the same shares by themselves.

    Args:
        uplinks: of each member, in any unit; 0 for one that reduces nothing.
        ratio: bytes of a result for each byte of a payload, at least 1.

    Raises:
        ValueError: no uplink is positive, or one is negative, or the ratio is below 1.
    """
    if not any(uplinks) or min(uplinks) < 0 or not ratio >= 1:
        raise ValueError(f"no shares for the uplinks {list(uplinks)} and a ratio of {ratio:g}")
    # An upload of 1 + slope w_i takes `time` with the share (time * uplink_i - 1) / slope.
    slope = (len(uplinks) - 1) * Fraction(ratio) - 1
    if slope <= 0:  # one member, or two for which all shares take the same time
        return [Fraction(uplink, sum(uplinks)) for uplink in uplinks]
    time, reached = Fraction(0), 0
    for count, uplink in enumerate(sorted(filter(None, uplinks), reverse=True), 1):
        if count > 1 and time * uplink <= 1:
            break  # its own payload alone takes as long
        reached += uplink
        time = (slope + count) / reached
    return [max(Fraction(0), (time * uplink - 1) / slope) for uplink in uplinks]


def group_shares(is_open: Sequence[bool], uplinks: Sequence[int], ratio: float) -> list[Fraction]:
    """The part of a stage that each member of a group reduces: :func:`reducer_shares` without small ones.

    Each reducer may fail, which costs the round. So a member whose share would be below LEAST_SHARE of an
    equal one reduces nothing. If no uplink is known, all that others can dial reduce equal parts.

    Raises ValueError if nobody can be dialled.
    """
    usable = [uplink if each else 0 for each, uplink in zip(is_open, uplinks, strict=True)]
    if not any(usable):
        usable = [int(each) for each in is_open]
    while True:
        shares = reducer_shares(usable, max(1.0, ratio))
        kept = [
            uplink if share * len(shares) >= LEAST_SHARE else 0
            for uplink, share in zip(usable, shares, strict=True)
        ]
        if kept == usable:
            return shares
        usable = kept


def checkers_of(shares: Sequence[Fraction], is_open: Sequence[bool], turn: int) -> tuple[int | None, ...]:
    """By member, the position of the one that checks what it reduces; None for nobody.

    Each reducer checks one other, and in each turn another one. If there is one alone, one of the others that
    can be dialled checks it.
    """
    reducers = [position for position, share in enumerate(shares) if share]
    found: list[int | None] = [None] * len(shares)
    if len(reducers) > 1:
        step = 1 + turn % (len(reducers) - 1)
        for number, position in enumerate(reducers):
            found[position] = reducers[(number + step) % len(reducers)]
    elif others := [position for position, each in enumerate(is_open) if each and position not in reducers]:
        found[reducers[0]] = others[turn % len(others)]
    return tuple(found)


def partition(chunks: int, fractions: Sequence[float | Fraction]) -> list[PartRange]:
    """Cut `chunks` into one contiguous part for each reducer, in the order given.

    Exact arithmetic: the same fractions give the same parts on every machine. A fraction of 0 gives an empty
    part: such a member reduces nothing.

    Args:
        fractions: share of each reducer in any unit, as of :func:`group_shares`.

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
