"""The replicas of a plan as few bytes: peers by their numbers in the history, compressed.

A long run of many peers has thousands of plans with a thousand replicas each.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

from protocol.types import Dialer, Link, Member, PeerId, Replica, StageRange


def encode(replicas: Sequence[Replica], numbers: Mapping[PeerId, int]) -> bytes:
    """The replicas, without endpoints. Raises KeyError for a member without a number."""
    found = [
        [
            replica.index,
            replica.weight,
            replica.microbatches,
            [
                [numbers[each.peer], each.stages.first, each.stages.stop, int(each.relayed)]
                for each in replica.members
            ],
            [[link.k, link.dialer.value] for link in replica.links],
        ]
        for replica in replicas
    ]
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode())


def decode(body: bytes, names: Mapping[int, PeerId]) -> tuple[Replica, ...]:
    """What :func:`encode` wrote; the endpoints are "". Raises ValueError or KeyError for other bytes."""
    try:
        found = json.loads(zlib.decompress(body))
    except zlib.error as error:
        raise ValueError(f"the plan is unreadable ({error})") from None
    return tuple(
        Replica(
            index,
            tuple(
                Member(names[peer], StageRange(first, stop), "", bool(relayed))
                for peer, first, stop, relayed in members
            ),
            tuple(Link(k, Dialer(dialer)) for k, dialer in links),
            weight,
            microbatches,
        )
        for index, weight, microbatches, members, links in found
    )
