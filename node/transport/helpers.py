"""The helpers of one exchange, as one member sees them: whom it asks first, and for whom it waits.

See protocol.algorithm.gathering. Without lines of the members nobody helps.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from protocol.algorithm.gathering import schedule_of
from protocol.types import ExchangeGroup, MemberLine, PayloadDescriptor, PeerId

_HELP_SHARE = 0.5
"""Of the time to gather. What no helper has sent by then is fetched from its owner, in the other half."""
_MOST_ASKED, _ASKED_IN_ALL = 16, 256
"""Requests of one member that are open at one helper, and of all members together."""


class Helpers:
    """Who helps member `me` in an exchange that lasts `seconds` from now on. Belongs to one event loop.

    Args:
        seed: the id of the group.
        lines: of its members; empty if nobody helps.
    """

    def __init__(self, me: PeerId, seed: str, lines: Mapping[PeerId, MemberLine], seconds: float) -> None:
        self._me, self._schedule = me, schedule_of(seed, lines)
        self._clock = asyncio.get_running_loop().time
        self._ends = self._clock() + seconds
        self._helps_until = self._clock() + _HELP_SHARE * seconds
        self._failed: set[PeerId] = set()
        most = max(1, min(_MOST_ASKED, _ASKED_IN_ALL // max(1, len(lines))))
        self._places: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(most))

    def to_ask(self, owner: PeerId) -> Sequence[PeerId]:
        """Who is asked for the payload of `owner` before its owner, in this order."""
        return () if self._schedule is None else self._schedule.sources(owner, self._me)[:-1]

    def to_supply(self) -> Sequence[PeerId]:
        """Who gets the payload of this member first."""
        return () if self._schedule is None else self._schedule.helpers(self._me)

    def serves(self, member: PeerId, owner: PeerId) -> bool:
        """Whether this member may have to send the payload of `owner` to `member`."""
        schedule = self._schedule
        if schedule is None or owner == member or not {owner, member} <= set(schedule.members):
            return False
        return self._me in schedule.sources(owner, member)[:-1]

    def place_at(self, helper: PeerId) -> asyncio.Semaphore:
        """Hold it while a request is open at `helper`."""
        return self._places[helper]

    def is_usable(self, helper: PeerId) -> bool:
        return helper not in self._failed and self.seconds_left > 0

    def fail(self, helper: PeerId) -> None:
        """Ask `helper` for nothing more in this exchange."""
        self._failed.add(helper)

    @property
    def seconds_left(self) -> float:
        """For requests to helpers."""
        return self._helps_until - self._clock()

    def is_too_slow(self, seconds: float) -> bool:
        """Whether a payload that takes `seconds` more comes too late."""
        return self._clock() + seconds > self._ends


def helpers_of(
    me: PeerId, group: ExchangeGroup | None, members: Sequence[PayloadDescriptor], seconds: float
) -> Helpers:
    """Of the members whose payloads count at this peer, in the group of the coordinator if there is one.

    All members of the group take part in the schedule, so that it is the same for everybody.
    """
    if group is None or not group.lines:
        return Helpers(me, "", {}, seconds)
    owners = [descriptor.owner for descriptor in group.descriptors]
    is_complete = {descriptor.owner for descriptor in members} <= set(owners)
    lines = dict(zip(owners, group.lines, strict=True)) if is_complete and me in owners else {}
    return Helpers(me, group.group_id, lines, seconds)
