"""Which payloads of a round each host of a stage measures (protocol.math.agreement), and the results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from protocol.types import PeerId

MOST_MEASURED = 16
"""Payloads of one (stage, round) that a peer measures: a median needs no more measurements of each."""


@dataclass(frozen=True)
class Comparison:
    """What to measure: the payloads at `positions` of a manifest, or of those that follow it without weight.

    `alike` and `unlike` are the positions of single payloads to compare the first of them with, too, or None.
    """

    positions: tuple[int, ...]
    alike: int | None = None
    unlike: int | None = None


@dataclass(frozen=True)
class MeasuredAgreement:
    """The figures of one payload, see protocol.math.agreement; a cosine of None cannot be told.

    `alike` and `unlike` are the cosines with the single payloads of the comparison.
    """

    cosine: float | None
    norm: float
    mean_norm: float
    alike: float | None = None
    unlike: float | None = None


def measured_position(owners: Sequence[PeerId], peer: PeerId) -> int | None:
    """The position of the payload that `peer` measures: that of the next owner, after the last the first.

    So each payload that counts is measured by one peer, and not by its owner unless it is alone. None for a
    peer without a payload in the round.

    Args:
        owners: of the payloads of a manifest, in canonical order.
    """
    return (owners.index(peer) + 1) % len(owners) if peer in owners else None


def measured_owners(
    owners: Collection[PeerId], peer: PeerId, stage: int, round_number: int
) -> tuple[PeerId, ...]:
    """The owners of the payloads that `peer` measures for the scores: those that follow it in a circle.

    So several peers measure each payload. The circle is another one in each round and stage, so that no peer
    can choose whom it measures. Empty for a peer that is not among `owners`.
    """
    if peer not in owners:
        return ()
    circle = _circle(frozenset(owners), stage, round_number)
    own = circle.index(peer)
    return tuple(circle[(own + step) % len(circle)] for step in range(1, min(len(circle), MOST_MEASURED + 1)))


@lru_cache(maxsize=16)  # the coordinator asks for every member of a round
def _circle(owners: frozenset[PeerId], stage: int, round_number: int) -> tuple[PeerId, ...]:
    return tuple(sorted(owners, key=lambda each: sha256(f"{round_number}/{stage}/{each}".encode()).digest()))


def next_of_kind(is_full: Sequence[bool | None], position: int, alike: bool) -> int | None:
    """The position of the next payload of the same kind of replica, or of the other kind; None without one.

    Args:
        is_full: of the payloads of a manifest: whether its replica is full; None if that is not known.
    """
    kind = is_full[position]
    later = [*range(position + 1, len(is_full)), *range(position)]
    known = [each for each in later if kind is not None and is_full[each] is not None]
    return next((each for each in known if (is_full[each] == kind) == alike), None)
