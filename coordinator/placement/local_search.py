"""Better neighbours: which members of pipelines should change places with others that have the same stages.

Pure: the same peers in another order give the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from coordinator.placement.cost_model import Survey, compute_seconds, link_time, message_bytes
from coordinator.placement.eligibility import can_be_neighbours
from coordinator.placement.initial_placement import links_between
from coordinator.placement.schedule import step_seconds
from coordinator.state.text import short
from protocol.spec.run import RunSpec
from protocol.types import Member, Replica

MOST_COMPARED = 16
"""Chains are compared by a step of at most so many microbatches; beyond, its time grows in proportion."""
SECONDS = 1e-9, 1e9
"""Nothing is taken to be faster or slower, whatever a peer claims."""
_MOST_OPERATIONS = 40_000
"""So many operations of members are replayed at most in one search: about half a second. Who cannot be where
it is tried counts as one.
"""
_PROBED = 4
"""In a large swarm each member is tried against so many of the fastest, the slowest, and those between."""
_LEAST_GAIN = 0.01
"""An exchange must make the chains that it touches faster by this share."""


def seconds_per_microbatch(
    spec: RunSpec, survey: Survey, members: Sequence[Member], ks: Sequence[int]
) -> float:
    """As predicted for an inner step of a chain, within SECONDS; 0 where nothing is known."""
    microbatches = min(spec.inner.microbatches, MOST_COMPARED)
    compute = [compute_seconds(spec, survey, each.peer, each.stages) for each in members]
    links = [
        link_time(survey, one.peer, other.peer, message_bytes(spec, k))
        for (one, other), k in zip(pairwise(members), ks, strict=True)
    ]
    found = step_seconds(compute, links, microbatches) / microbatches
    return 0.0 if found == 0 else max(SECONDS[0], min(SECONDS[1], found))


class Search:
    """Local search: the slowest chains first, each member against others with the same stages.

    An exchange is made where the chains that it touches become faster: the slowest of them, or where
    `grouping.balance` shares out the work, all of them together. The effort is bounded, so in a large swarm
    the search ends before everything was tried.

    Args:
        replicas: all that train.
        movable: the indices of those whose members may change places.
        spares: who may come in.
        may_sit: whether a member's memory holds so many microbatches in flight.
    """

    def __init__(
        self,
        spec: RunSpec,
        survey: Survey,
        replicas: Sequence[Replica],
        movable: set[int],
        spares: Sequence[Member],
        may_sit: Callable[[Member, int], bool],
    ) -> None:
        self._spec, self._survey, self._may_sit = spec, survey, may_sit
        self._all = list(replicas)
        self._chains = {each.index: each.members for each in replicas}
        self._ks = {each.index: tuple(link.k for link in each.links) for each in replicas}
        self._movable, self._spares = movable, list(spares)
        self._known: dict[tuple[tuple[Member, ...], tuple[int, ...]], float] = {}
        self._speeds: dict[Member, float] = {}
        self._operations = _MOST_OPERATIONS
        self._times = {each.index: self._time(each.index, each.members) for each in replicas}
        self._times_before = dict(self._times)
        self.swaps: list[str] = []

    @property
    def before(self) -> float:
        """As `after`, without the exchanges."""
        return self._total(self._times_before)

    @property
    def after(self) -> float:
        """Seconds of the slowest step; of the changed chains' step where work is shared out by speed."""
        return self._total(self._times)

    @property
    def replicas(self) -> list[Replica]:
        return [
            replace(
                each,
                members=self._chains[each.index],
                links=links_between(self._chains[each.index], self._ks[each.index]),
            )
            if each.members != self._chains[each.index]
            else each
            for each in self._all
        ]

    def run(self) -> None:
        """Exchange until nothing gets better, or the work is done."""
        waiting = sorted(self._movable, key=lambda index: (-self._times[index], index))
        while waiting and self._operations > 0:
            index = waiting.pop(0)
            touched = self._improve(index)
            if touched:
                again = {*waiting, *touched}
                waiting = sorted(again, key=lambda each: (-self._times[each], each))

    def _total(self, times: Mapping[int, float]) -> float:
        changed = {each.index for each in self._all if each.members != self._chains[each.index]}
        counting = changed if self._spec.grouping.balance else times.keys()
        known = [times[index] * self._spec.inner.microbatches for index in counting if times[index] > 0]
        return self._cost(known) if known else 0.0

    def _cost(self, seconds: Sequence[float]) -> float:
        if self._spec.grouping.balance:
            return len(seconds) / sum(1 / each for each in seconds)
        return max(seconds)

    def _improve(self, index: int) -> list[int]:
        """Make the best exchange of one member of chain `index`. Returns the chains that it changes."""
        best: tuple[float, int, Member, int | None] | None = None
        for position, member in enumerate(self._chains[index]):
            for other, its_index in self._partners(index, member):
                if self._operations <= 0:
                    break
                ratio = self._ratio(index, position, member, other, its_index)
                if ratio < 1 - _LEAST_GAIN and (best is None or ratio < best[0]):
                    best = (ratio, position, other, its_index)
        if best is None:
            return []
        _, position, other, its_index = best
        member = self._chains[index][position]
        self._set(index, _with(self._chains[index], member, other))
        if its_index is None:
            self._spares[self._spares.index(other)] = member
            self.swaps.append(
                f"{short(other.peer)} takes the place of {short(member.peer)} in replica-{index}"
            )
            return [index]
        self._set(its_index, _with(self._chains[its_index], other, member))
        where = f"between replica-{index} and replica-{its_index}"
        self.swaps.append(f"{short(member.peer)} and {short(other.peer)} change places {where}")
        return [index, its_index]

    def _ratio(
        self, index: int, position: int, member: Member, other: Member, its_index: int | None
    ) -> float:
        """What the chains that this exchange touches cost after it, as a share of what they cost now."""
        self._operations -= 1
        now, then = [self._times[index]], []
        changed = [(index, _with(self._chains[index], member, other), other)]
        if its_index is not None:
            now.append(self._times[its_index])
            changed.append((its_index, _with(self._chains[its_index], other, member), member))
        for each, members, newcomer in changed:
            if not self._can_be(members, newcomer):
                return 1.0
            then.append(self._time(each, members))
        return self._cost(then) / self._cost(now)

    def _can_be(self, members: Sequence[Member], newcomer: Member) -> bool:
        """Whether `newcomer` can sit among them: the others sat there before, whatever their memory is."""
        if not self._may_sit(newcomer, len(members) - members.index(newcomer)):
            return False
        return all(can_be_neighbours(one, other) for one, other in pairwise(members))

    def _partners(self, index: int, member: Member) -> list[tuple[Member, int | None]]:
        """Whom to try in place of `member`, with the chain that each is in: all of them in a small swarm."""
        found: list[tuple[Member, int | None]] = [
            (other, its_index)
            for its_index in sorted(self._movable - {index})
            for other in self._chains[its_index]
            if other.stages == member.stages
        ]
        found += [(spare, None) for spare in self._spares if spare.stages == member.stages]
        if len(found) <= 3 * _PROBED:
            return found
        found.sort(key=lambda pair: (self._alone(pair[0]), pair[0].peer))
        between = found[_PROBED:-_PROBED]
        return [*found[:_PROBED], *between[:: -(-len(between) // _PROBED)], *found[-_PROBED:]]

    def _alone(self, member: Member) -> float:
        """Seconds per microbatch that `member` takes by itself: to compute, or to send it both ways."""
        if member not in self._speeds:
            uplink = self._survey.capacities[member.peer].uplink
            width = sum(message_bytes(self._spec, self._spec.link.k))
            compute = compute_seconds(self._spec, self._survey, member.peer, member.stages)
            self._speeds[member] = max(compute, width / uplink if uplink > 0 else 0.0)
        return self._speeds[member]

    def _set(self, index: int, members: tuple[Member, ...]) -> None:
        self._chains[index] = members
        self._times[index] = self._time(index, members)

    def _time(self, index: int, members: tuple[Member, ...]) -> float:
        key = (members, self._ks[index])
        if key not in self._known:
            self._operations -= len(members) * min(self._spec.inner.microbatches, MOST_COMPARED)
            self._known[key] = seconds_per_microbatch(self._spec, self._survey, *key)
        return self._known[key]


def _with(members: tuple[Member, ...], former: Member, other: Member) -> tuple[Member, ...]:
    return tuple(other if each == former else each for each in members)
