"""Which payloads of a round each host of a stage measures: members and coordinator find the same ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import sha256

from protocol.types import PeerId

MOST_MEASURED = 16
"""Payloads of one (stage, round) that a peer measures: a median needs no more measurements of each."""


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
