"""The bytes that the members of a group send and receive when they reduce their payloads in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.group.payload_bits import bits_per_parameter
from protocol.reduction.partition import checkers_of, group_shares
from protocol.spec.outer import OuterSpec
from protocol.types import MemberLine, PeerId


class PartTraffic(NamedTuple):
    """What a member sends and receives, in payloads."""

    sent: float
    received: float


class ReducedTraffic:
    """The coordinator.ops.forecast.exchange_traffic.ExchangeTraffic of members that reduce."""

    def payloads(
        self, outer: OuterSpec, stage: int, lines: Mapping[PeerId, MemberLine]
    ) -> dict[PeerId, PartTraffic]:
        peers = sorted(lines)
        return dict(
            zip(peers, reduction_of([lines[peer] for peer in peers], result_ratio(outer)), strict=True)
        )

    def download(self, outer: OuterSpec, uplinks: Mapping[PeerId, float]) -> tuple[tuple[PeerId, ...], float]:
        """All members send the one result."""
        return tuple(uplinks), result_ratio(outer)


def reduction_of(lines: Sequence[MemberLine], ratio: float) -> list[PartTraffic]:
    """Traffic of each member of a group that reduces, in payloads.

    M members have payloads of P bytes; a result has Q = `ratio` P bytes. A member that reduces the share w
    and checks the share v sends and receives

        sends       (1 - w) P     its payload, to the reducers
                  + (1 - v) P     the same again, to the checkers
                  + M w Q         its sums: to M - 1 members, and to its checker to be signed
        receives    (M - 1) (w + v) P + (1 - w + v) Q

    If others can dial only one member, nobody checks it: there are no copies for checkers, and it sends its
    sums M - 1 times. If others can dial nobody, a real run reduces nothing; the forecast then presumes that
    all can be dialled.
    """
    others = len(lines) - 1
    if not others:
        return [PartTraffic(0.0, 0.0)]
    are_open = [line.is_open for line in lines]
    able = are_open if any(are_open) else [True] * len(lines)
    exact = group_shares(able, [line.uplink for line in lines], ratio)
    checkers, shares = checkers_of(exact, able, 0), [float(each) for each in exact]
    checked = [0.0] * len(lines)
    for share, checker in zip(shares, checkers, strict=True):
        if checker is not None:
            checked[checker] += share
    has_checkers = any(each is not None for each in checkers)
    return [
        PartTraffic(
            1 - own + (1 - other) * has_checkers + (others + has_checkers) * own * ratio,
            others * (own + other) + (1 - own + other) * ratio,
        )
        for own, other in zip(shares, checked, strict=True)
    ]


def result_ratio(outer: OuterSpec) -> float:
    """About the bytes of a result of the reducers for each byte of a payload."""
    return bits_per_parameter(outer.of_result) / bits_per_parameter(outer)
