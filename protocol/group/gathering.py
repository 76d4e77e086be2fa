"""Who sends which payload to whom when the members of a group gather all payloads of each other.

Every member needs the payloads of all n - 1 others. If each owner sent its own to everybody, the slowest
uplink would set the time. So a payload leaves a slow uplink about once: a **helper** gets it, and passes it
on with the uplink that it has to spare. No exchange is faster than

    max( payload / uplink of its owner,  (n - 1) payloads / downlink,  n (n - 1) payloads / sum of uplinks )

The schedule is a pure function of the lines of the members, so all members find the same one:

1. **Quotas.** The fastest uplinks that suffice for that time share the n (n - 1) copies in proportion to
   their rates; the other members send one copy of their own payload. If need be, all uplinks share.
2. **Fans.** A member sends its own payload as often as its quota allows. The copies that a slow owner cannot
   send are taken over by members with a larger quota, in an order that the seed determines.
3. **Trees.** The first helper of a payload gets it from the owner, each further one from a helper before it,
   every other member from the sender whose turn its position gives. So no two members wait for each other.

Members that others cannot dial help nobody. All payloads of a group have the same size.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median_low

from protocol.types import MemberLine, PeerId

_WORTH = 0.9
"""Of the time without helpers that an exchange with helpers may take; otherwise nobody helps."""
_HALVINGS = 60
"""Of an interval, until nothing of it is left in float64."""


@dataclass(frozen=True)
class Sender:
    """A member sends `copies` of one payload."""

    member: int
    copies: int


class Schedule:
    """The order in which each member asks others for each payload.

    Args:
        seed: the same for all members, such as the id of the group.
        lines: of all members. Rates that are not measured count as the lowest measured ones.

    Attributes:
        members: in the order of their ids.
        copies: the number of payloads that each member sends, in that order.
    """

    def __init__(self, seed: str, lines: Mapping[PeerId, MemberLine]) -> None:
        self.members = tuple(sorted(lines))
        self._index = {peer: i for i, peer in enumerate(self.members)}
        self._lines = [lines[peer] for peer in self.members]
        self._uplinks = _known([float(line.uplink) for line in self._lines])
        self.copies = _quotas(self._uplinks, self._lines)
        self._turns = sorted(
            range(len(self.members)),
            key=lambda i: hashlib.sha256(f"{seed}{self.members[i]}".encode()).digest(),
        )
        self._fans = _fans(self.copies, self._turns)

    @cached_property
    def _reserves(self) -> tuple[int, ...]:
        """The members that may help, in the order of the seed: first those that help anyway."""
        helping = {sender.member for fan in self._fans for sender in fan[1:]}
        able = [i for i in self._turns if self._lines[i].is_open]
        return tuple([i for i in able if i in helping] or able)

    def sources(self, owner: PeerId, member: PeerId) -> tuple[PeerId, ...]:
        """Whom `member` asks for the payload of `owner`, in this order. The last one is the owner.

        The first one is to send it. After it come at most one other helper, and the owner.
        """
        of, to = self._index[owner], self._index[member]
        assigned = self._sender(of, to)
        if assigned == of:
            return (owner,)
        found = [assigned]
        helpers = [sender.member for sender in self._fans[of][1:]]
        if to not in helpers:  # a helper turns to the owner at once, so helpers never wait for each other
            reserve = self._reserve(of, helpers, assigned)
            found += [] if reserve in (None, to) else [reserve]
        return (*(self.members[i] for i in found), owner)

    def helpers(self, owner: PeerId) -> tuple[PeerId, ...]:
        """Those that get the payload first, if its owner does not send it to everybody; then the reserve."""
        of = self._index[owner]
        helpers = [sender.member for sender in self._fans[of][1:]]
        reserve = self._reserve(of, helpers, helpers[0]) if helpers else None
        found = helpers if reserve is None or reserve in helpers else [*helpers, reserve]
        return tuple(self.members[i] for i in found)

    def seconds(self, nbytes: int) -> float:
        """Until all members have all payloads of `nbytes`, at the rates of their lines."""
        return nbytes * max(*self.sending_seconds, *_receiving_seconds(self._lines))

    @property
    def sending_seconds(self) -> list[float]:
        """How long each member sends, in the order of :attr:`members`, with payloads of one byte."""
        return [count / rate for count, rate in zip(self.copies, self._uplinks, strict=True)]

    @property
    def is_worthwhile(self) -> bool:
        """Whether most members have all payloads sooner than if they asked each owner."""
        receiving = median_low(_receiving_seconds(self._lines))  # a very slow downlink may be the longest
        direct = max((len(self.members) - 1) / min(self._uplinks), receiving)
        return max(*self.sending_seconds, receiving) < _WORTH * direct

    def _reserve(self, owner: int, helpers: Sequence[int], assigned: int) -> int | None:
        """Who is asked after `assigned`: another helper of this payload, else a member that helps others."""
        others = [*helpers, *_after(self._reserves, assigned)]
        return next((i for i in others if i not in (owner, assigned)), None)

    def _sender(self, owner: int, member: int) -> int:
        fan = self._fans[owner]
        helpers: list[int] = [sender.member for sender in fan[1:]]
        left = [sender.copies for sender in fan]
        for place, helper in enumerate(helpers):
            # The owner supplies the first helper, the first one with copies left the next one.
            source: int = next(i for i in (*range(1, place + 1), 0) if left[i])
            left[source] -= 1
            if helper == member:
                return fan[source].member
        # The others in a circle that begins after the owner: each member has its turn with each sender.
        n = len(self.members)
        place = (member - owner) % n
        turn = place - 1 - sum((each - owner) % n < place for each in helpers)
        for sender, count in zip(fan, left, strict=True):
            if turn < count:
                return sender.member
            turn -= count
        raise AssertionError("a fan has a copy for every other member")


def schedule_of(seed: str, lines: Mapping[PeerId, MemberLine]) -> Schedule | None:
    """The schedule of a group; None if every member can as well ask each owner.

    That is so where no uplink is known, where no member can be dialled, and where helpers save little time.
    """
    if len(lines) < 3 or not any(line.is_open and line.uplink for line in lines.values()):
        return None
    schedule = Schedule(seed, lines)
    return schedule if schedule.is_worthwhile else None


def _receiving_seconds(lines: Sequence[MemberLine]) -> list[float]:
    """How long each member receives the payloads of all others, of one byte each."""
    return [(len(lines) - 1) / line.downlink if line.downlink else 0.0 for line in lines]


def _known(rates: Sequence[float]) -> list[float]:
    least = min((rate for rate in rates if rate), default=1.0)
    return [rate or least for rate in rates]


def _quotas(uplinks: Sequence[float], lines: Sequence[MemberLine]) -> tuple[int, ...]:
    """How many copies each member sends; see the module."""
    n = len(lines)
    total, copies = n * (n - 1), [1] * n
    # The lower medians instead of the largest: one very slow line must not leave the fast ones without help.
    seconds = max(median_low([1 / rate for rate in uplinks]), median_low(_receiving_seconds(lines)))
    able = sorted((i for i in range(n) if lines[i].is_open), key=lambda i: -uplinks[i])
    sharing: list[int] = []
    for _, alike in groupby(able, key=lambda i: uplinks[i]):
        sharing += alike
        if sum(uplinks[i] for i in sharing) * seconds + n - len(sharing) >= total:
            break
    # All that can be sent in this time, then one copy after the other where it ends first.
    level = _level([uplinks[i] for i in sharing], total - (n - len(sharing)))
    for i in sharing:
        copies[i] = max(1, int(uplinks[i] * level))
    heap = [((copies[i] + 1) / uplinks[i], i) for i in sharing]
    heapq.heapify(heap)
    for _ in range(total - sum(copies)):
        _, i = heap[0]
        copies[i] += 1
        heapq.heapreplace(heap, ((copies[i] + 1) / uplinks[i], i))
    return tuple(copies)


def _level(uplinks: Sequence[float], copies: int) -> float:
    """The longest time in which `uplinks` send at most `copies` whole copies, and each at least one."""
    low, high = 0.0, copies / max(uplinks)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = sum(max(1, int(rate * middle)) for rate in uplinks) <= copies
        low, high = (middle, high) if fits else (low, middle)
    return low


def _fans(copies: Sequence[int], turns: Sequence[int]) -> list[tuple[Sender, ...]]:
    """Who sends each payload how often: first its owner, then its helpers, those with more copies first."""
    others = len(copies) - 1
    spare = [Sender(i, copies[i] - others) for i in turns if copies[i] > others]
    fans: list[tuple[Sender, ...]] = [()] * len(copies)
    for i in turns:
        own = min(copies[i], others)
        helpers: list[Sender] = []
        lacking = others - own
        while lacking:
            helper = spare.pop()
            taken = min(lacking, helper.copies)
            lacking -= taken
            helpers.append(Sender(helper.member, taken))
            if taken < helper.copies:
                spare.append(Sender(helper.member, helper.copies - taken))
        fans[i] = (Sender(i, own), *sorted(helpers, key=lambda each: -each.copies))
    return fans


def _after(members: Sequence[int], one: int) -> Sequence[int]:
    """`members` in a circle, beginning after `one`."""
    start = members.index(one) + 1 if one in members else 0
    return (*members[start:], *members[:start])
