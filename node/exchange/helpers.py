"""The helpers of one exchange, as one member sees them: whom it asks first, and for whom it waits.

See protocol.group.gathering. Without lines of the members nobody helps.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from protocol.group.gathering import schedule_of
from protocol.types import ExchangeGroup, MemberLine, PayloadDescriptor, PeerId

_HELP_SHARE = 0.5
"""Of the time to gather. What no helper has sent by then is fetched from its owner, in the other half."""
_HELP_TIMES, _LEAST_HELP_SECONDS = 4.0, 5.0
"""If that is shorter: this multiple of what the schedule takes, at these least.

The time to gather follows from former rounds. So helpers that use half of it would lengthen the next one.
"""
_LATEST = 1.5
"""Times that time, a payload has arrived that a helper has begun to send."""
_MOST_ASKED, _ASKED_IN_ALL = 16, 256
"""Requests of one member that are open at one helper, and of all members together."""
_REMEMBERED_ROUNDS, _MOST_OWNERS = 16, 2


class HelpFailures:
    """The helpers that failed in the last rounds of a stage, as one member has seen it.

    An owner that sends nothing makes its helpers fail. So a helper is left out for the payload with which it
    failed, and after failures with the payloads of two owners for all.
    """

    def __init__(self) -> None:
        self._rounds: dict[PeerId, dict[PeerId, int]] = {}  # of the last failure, by helper and owner

    def note(self, round_number: int, failures: Iterable[tuple[PeerId, PeerId]]) -> None:
        """Note the (helper, owner) of payloads that this member has from others than the helper."""
        oldest = round_number - _REMEMBERED_ROUNDS
        for owners in self._rounds.values():
            for owner in [owner for owner, last in owners.items() if last < oldest]:
                del owners[owner]
        self._rounds = {helper: owners for helper, owners in self._rounds.items() if owners}
        for helper, owner in failures:
            self._rounds.setdefault(helper, {})[owner] = round_number

    def leave_out(self, helper: PeerId, owner: PeerId) -> bool:
        owners = self._rounds.get(helper, {})
        return owner in owners or len(owners) >= _MOST_OWNERS


class Helpers:
    """Who helps member `me` in an exchange that lasts `seconds` from now on. Belongs to one event loop.

    Args:
        seed: the id of the group.
        lines: of its members; empty if nobody helps.
        nbytes: of the largest payload.
        failures: of former rounds.
        later: seconds until the first request; helpers have as long as without them.

    Attributes:
        failed: (helper, owner) of the payloads that a helper did not send in this exchange.
    """

    def __init__(
        self,
        me: PeerId,
        seed: str,
        lines: Mapping[PeerId, MemberLine],
        seconds: float,
        nbytes: int,
        failures: HelpFailures,
        later: float = 0.0,
    ) -> None:
        self._me, self._schedule, self._failures = me, schedule_of(seed, lines), failures
        self._clock = asyncio.get_running_loop().time
        helps = _HELP_SHARE * seconds
        if self._schedule is not None:
            # A downlink that is not measured is hardly slower than the uplink.
            slowest = min(rate for line in lines.values() if (rate := line.downlink or line.uplink))
            takes = max(self._schedule.seconds(nbytes), nbytes * (len(lines) - 1) / slowest)
            helps = min(helps, max(_HELP_TIMES * takes, _LEAST_HELP_SECONDS))
        self._helps_until = self._clock() + later + helps
        self._ends = self._clock() + later + _LATEST * helps
        self._unusable: set[PeerId] = set()
        self.failed: set[tuple[PeerId, PeerId]] = set()
        most = max(1, min(_MOST_ASKED, _ASKED_IN_ALL // max(1, len(lines))))
        self._places: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(most))

    def to_ask(self, owner: PeerId) -> Sequence[PeerId]:
        """Who is asked for the payload of `owner` before its owner, in this order."""
        sources = () if self._schedule is None else self._schedule.sources(owner, self._me)[:-1]
        return [helper for helper in sources if not self._failures.leave_out(helper, owner)]

    def to_supply(self) -> Sequence[PeerId]:
        """Who gets the payload of this member first."""
        helpers = () if self._schedule is None else self._schedule.helpers(self._me)
        return [helper for helper in helpers if not self._failures.leave_out(helper, self._me)]

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
        return helper not in self._unusable and self.seconds_left > 0

    def give_up(self, helper: PeerId) -> None:
        """Ask `helper` for nothing more in this exchange."""
        self._unusable.add(helper)

    @property
    def seconds_left(self) -> float:
        """For requests to helpers."""
        return self._helps_until - self._clock()

    @property
    def seconds_to_finish(self) -> float:
        """For payloads on their way from helpers."""
        return self._ends - self._clock()


def helpers_of(
    me: PeerId,
    group: ExchangeGroup | None,
    members: Sequence[PayloadDescriptor],
    seconds: float,
    failures: HelpFailures,
    later: float = 0.0,
) -> Helpers:
    """Of the members whose payloads count at this peer, in the group of the coordinator if there is one.

    All members of the group take part in the schedule, so that it is the same for everybody.
    """
    lines: dict[PeerId, MemberLine] = {}
    if group is not None and group.lines:
        owners = [descriptor.owner for descriptor in group.descriptors]
        if me in owners and {descriptor.owner for descriptor in members} <= set(owners):
            lines = dict(zip(owners, group.lines, strict=True))
    nbytes = max(descriptor.nbytes for descriptor in members)
    return Helpers(me, group.group_id if group else "", lines, seconds, nbytes, failures, later)
