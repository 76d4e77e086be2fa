"""Which payloads of a round each host of a stage measures (protocol.math.agreement), and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.types import PeerId

MOST_MEASURED = 16
"""Payloads of one (stage, round) that a peer measures: a median needs no more measurements of each."""


@dataclass(frozen=True)
class Comparison:
    """What to measure: the payload at `position` of a manifest.

    `alike` and `unlike` are the positions of single other payloads to compare it with; None compares nothing.
    `others` are the positions of payloads that are compared with the weighted sum alone.
    """

    position: int
    alike: int | None = None
    unlike: int | None = None
    others: tuple[int, ...] = ()

    @property
    def positions(self) -> tuple[int, ...]:
        return self.position, *self.others


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


def other_positions(count: int, own: int) -> tuple[int, ...]:
    """Further positions that the peer with the payload at `own` of `count` measures.

    So several peers measure each payload, and no single one of them decides what it is worth.
    """
    return tuple((own + step) % count for step in range(1, min(count, MOST_MEASURED + 1)))


def next_of_kind(is_full: Sequence[bool | None], position: int, alike: bool) -> int | None:
    """The position of the next payload of the same kind of replica, or of the other kind; None without one.

    Args:
        is_full: of the payloads of a manifest: whether its replica is full; None if that is not known.
    """
    kind = is_full[position]
    later = [*range(position + 1, len(is_full)), *range(position)]
    known = [each for each in later if kind is not None and is_full[each] is not None]
    return next((each for each in known if (is_full[each] == kind) == alike), None)
