"""The best chain of given peers: in which order they stand, and how the stages are cut between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, factorial, inf

from coordinator.placement.cost_model import Survey, link_time, memory_needed, message_bytes
from coordinator.placement.schedule import LinkTime, step_seconds
from coordinator.state.state import Peer
from protocol.algorithm.flops import microbatch_flops
from protocol.algorithm.microbatch_order import most_in_flight
from protocol.spec.run import RunSpec
from protocol.types import Capacity, StageRange

_MOST_TRIED = 120
"""Chains of a few peers are all looked at if there are no more; of others only neighbouring ones."""
_HALVINGS = 10

Cuts = tuple[int, ...]
"""The first stage of each member, and behind the last one the number of stages."""


@dataclass(frozen=True)
class Arrangement:
    """A chain of peers, by their numbers, and how long its inner step is."""

    seconds: float
    order: tuple[int, ...]
    cuts: Cuts


class Arranger:
    """Arranges peers, which it knows by their position in `peers`, into chains.

    A chain respects memory, and of two neighbours one has an endpoint. k is the narrowest of the run's, since
    wider ones are chosen later, and cost next to nothing then.

    Args:
        anywhere: take every peer for one with an endpoint.
    """

    def __init__(self, spec: RunSpec, survey: Survey, peers: Sequence[Peer], anywhere: bool = False) -> None:
        self.stages = spec.swarm.stages
        self.looked_at = 0
        self.reachable = [anywhere or bool(peer.endpoint) for peer in peers]
        capacities = [survey.capacities.get(peer.peer, peer.capacity) for peer in peers]
        self.budgets = [_budget(spec, each) for each in capacities]
        self._spec, self._survey, self._peers = spec, survey, peers
        self._microbatches = spec.inner.microbatches
        flops = [survey.flops(peer.peer) for peer in peers]
        self._pace = [1 / each if each else 0.0 for each in flops]
        of_stages = [microbatch_flops(spec, StageRange(i, i + 1)) for i in range(self.stages)]
        self._work = [0.0, *accumulate(of_stages)]
        self._sizes = message_bytes(spec, spec.link.least_k or spec.link.k)
        self._devices = ["cpu" if each.device == "cpu" else "" for each in capacities]
        self._links: dict[tuple[int, int], LinkTime] = {}
        self._least: dict[str, list[int]] = {}
        self._memory: dict[tuple[int, int, int, str], int] = {}

    def burden(self, peer: int, share: float) -> float:
        """Seconds that a microbatch takes `peer` with `share` of the stages, or its messages its line."""
        capacity = self._survey.capacities.get(self._peers[peer].peer, self._peers[peer].capacity)
        compute = share * self._work[-1] * self._pace[peer]
        lines = [line for line in (capacity.uplink, capacity.downlink) if line > 0]
        return max(compute, sum(self._sizes) / min(lines, default=inf)) + capacity.round_trip

    def room(self, peer: int) -> int:
        """How many stages fit on `peer`, those that need least, at the end of a chain."""
        needs = self._least_needs(self._devices[peer])
        return sum(need <= self.budgets[peer] for need in needs)

    def chains_of(self, size: int) -> int:
        """In how many ways `size` peers can be arranged."""
        return factorial(size) * comb(self.stages - 1, size - 1)

    def best(self, group: Sequence[int], limit: float = inf) -> Arrangement | None:
        """A fast chain of `group` below `limit` seconds: of few peers the fastest, else a plausible one."""
        if self.chains_of(len(group)) <= _MOST_TRIED:
            return self.best_of_all(group, limit)
        order = self._plausible_order(group)
        found = self._cut(order) if order else None
        return found if found is not None and found.seconds < limit else None

    def improved(self, chain: Arrangement) -> Arrangement | None:
        """The first faster one with two members of `chain` exchanged."""
        for i, j in combinations(range(len(chain.order)), 2):
            swapped = list(chain.order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            other = self._cut(tuple(swapped))
            if other is not None and other.seconds < chain.seconds:
                return other
        return None

    def best_of_all(self, group: Sequence[int], limit: float = inf) -> Arrangement | None:
        """The fastest chain of `group` below `limit` seconds: none is left out."""
        promising = []
        for order in permutations(sorted(group)):
            links = self._links_of(order)
            if links is None:
                continue
            for cuts in _all_cuts(self.stages, len(order)):
                compute = self._compute(order, cuts)
                if compute is not None:
                    self.looked_at += 1
                    bound = least_seconds(compute, links, self._microbatches)
                    if bound < limit:
                        promising.append((bound, order, cuts, compute, links))
        promising.sort(key=lambda each: each[0])
        best = None
        for bound, order, cuts, compute, links in promising:
            if bound >= limit:
                break
            seconds = step_seconds(compute, links, self._microbatches)
            self.looked_at += 2
            if seconds < limit:
                limit, best = seconds, Arrangement(seconds, order, cuts)
        return best

    def _plausible_order(self, group: Sequence[int]) -> tuple[int, ...] | None:
        """Thin lines at the ends, which have one link only; those that only dial in every other place."""
        size = len(group)
        by_burden = sorted(group, key=lambda peer: (-self.burden(peer, 1 / size), peer))
        dialing = [peer for peer in by_burden if not self.reachable[peer]]
        outside_in = sorted(range(size), key=lambda place: (min(place, size - 1 - place), place))
        places = [place for place in outside_in if place % 2 == 0]
        if len(dialing) > len(places):
            return None
        order = dict(zip(places, dialing, strict=False))
        rest = [peer for peer in by_burden if self.reachable[peer]]
        order |= dict(zip([place for place in outside_in if place not in order], rest, strict=True))
        return tuple(order[place] for place in range(size))

    def _cut(self, order: tuple[int, ...]) -> Arrangement | None:
        """`order` with cuts that make its slowest member as fast as can be, then moved while that helps."""
        links = self._links_of(order)
        if links is None:
            return None
        size, total = len(order), self._work[-1]
        tried = [even_cuts(self.stages, size)]
        low, high = 0.0, total * max(self._pace[peer] for peer in order)
        slowest = self._greedy_cuts(order, inf)
        tried += [slowest] if slowest else []
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self._greedy_cuts(order, middle)
            low, high = (low, middle) if found else (middle, high)
            tried += [found] if found else []
        best: tuple[float, Cuts] | None = None
        for cuts in [tried[0], *reversed(tried[1:])]:
            best = self._better(order, cuts, links, best)
        before = None
        while best is not before:
            before = best
            for at in range(1, size):
                for by in (-1, 1):
                    best = self._moved(order, at, by, links, best)
        if best is None:
            return None
        compute = self._compute(order, best[1])
        assert compute is not None
        return Arrangement(step_seconds(compute, links, self._microbatches), order, best[1])

    def _moved(
        self,
        order: tuple[int, ...],
        at: int,
        by: int,
        links: Sequence[LinkTime],
        best: tuple[float, Cuts] | None,
    ) -> tuple[float, Cuts] | None:
        """`best`, or what it becomes with the cut number `at` moved `by` stages if that is better."""
        if best is None:
            return None
        cuts = (*best[1][:at], best[1][at] + by, *best[1][at + 1 :])
        is_sound = all(first < stop for first, stop in pairwise(cuts))
        return self._better(order, cuts, links, best) if is_sound else best

    def _better(
        self, order: tuple[int, ...], cuts: Cuts, links: Sequence[LinkTime], best: tuple[float, Cuts] | None
    ) -> tuple[float, Cuts] | None:
        self.looked_at += 1
        compute = self._compute(order, cuts)
        if compute is None:
            return best
        seconds = least_seconds(compute, links, self._microbatches)
        return (seconds, cuts) if best is None or seconds < best[0] else best

    def _greedy_cuts(self, order: tuple[int, ...], longest: float) -> Cuts | None:
        """Every member takes as many stages as fit and take it no longer than `longest` per microbatch."""
        self.looked_at += 1
        cuts = [0]
        for position, peer in enumerate(order):
            behind = len(order) - 1 - position
            first = stop = cuts[-1]
            while (
                stop < self.stages - behind
                and (self._work[stop + 1] - self._work[first]) * self._pace[peer] <= longest
                and self._fits(peer, first, stop + 1, behind + 1)
            ):
                stop += 1
            if stop == first:
                return None
            cuts.append(stop)
        return tuple(cuts) if cuts[-1] == self.stages else None

    def _compute(self, order: tuple[int, ...], cuts: Cuts) -> list[float] | None:
        """Seconds of a microbatch on each member; None where the memory of one does not suffice."""
        size = len(order)
        for position, peer in enumerate(order):
            if not self._fits(peer, cuts[position], cuts[position + 1], size - position):
                return None
        work = self._work
        return [(work[cuts[i + 1]] - work[cuts[i]]) * self._pace[peer] for i, peer in enumerate(order)]

    def _fits(self, peer: int, first: int, stop: int, members_left: int) -> bool:
        key = (first, stop, members_left, self._devices[peer])
        found = self._memory.get(key)
        if found is None:
            found = memory_needed(self._spec, StageRange(first, stop), members_left, key[3])
            self._memory[key] = found
        return found <= self.budgets[peer]

    def _least_needs(self, device: str) -> list[int]:
        """Bytes of the most frugal 1, 2, ... neighbouring stages."""
        found = self._least.get(device)
        if found is None:
            found = self._least[device] = [
                min(
                    memory_needed(self._spec, StageRange(first, first + count), 1, device)
                    for first in range(self.stages - count + 1)
                )
                for count in range(1, self.stages + 1)
            ]
        return found

    def _links_of(self, order: tuple[int, ...]) -> list[LinkTime] | None:
        """None where two neighbours have no endpoint."""
        links = []
        for pair in pairwise(order):
            if not (self.reachable[pair[0]] or self.reachable[pair[1]]):
                return None
            link = self._links.get(pair)
            if link is None:
                upstream, downstream = (self._peers[peer].peer for peer in pair)
                link = self._links[pair] = link_time(self._survey, upstream, downstream, self._sizes)
            links.append(link)
        return links


def least_seconds(compute: Sequence[float], links: Sequence[LinkTime], microbatches: int) -> float:
    """A bound below the step of a chain (:func:`coordinator.placement.schedule.step_seconds`), and rarely far below.

    With R_i, the time from a microbatch's arrival at member i until its gradient leaves it, a step lasts no
    less than one microbatch takes all along the chain, R_0, and the others take one of these:

    - member i, which computes all of them in turn, outside of which R_0 - R_i pass;
    - the window of member i: it has at most so many microbatches under way, so M microbatches are M divided
      by that number, rounded up, times R_i;
    - a wire, or the uplink of a member in the middle, which carries all messages in turn.
    """
    size = len(compute)
    rounds = [0.0] * size
    total = 0.0
    for i in range(size - 1, -1, -1):
        if i < size - 1:
            link = links[i]
            total += link.forward + link.backward + 2 * link.delay
        total += compute[i]
        rounds[i] = total
    most = total
    for i in range(size):
        own = rounds[i]
        windows = -(-microbatches // most_in_flight(size - i))
        most = max(most, total - own + max(microbatches * compute[i], windows * own))
        if i < size - 1:
            link = links[i]
            most = max(most, total + (microbatches - 1) * max(link.forward, link.backward))
            if i:
                above = links[i - 1]
                uplink = microbatches * (link.forward_uplink + above.backward_uplink)
                most = max(most, total - own - above.backward + uplink)
    return most


@lru_cache(maxsize=64)
def _all_cuts(stages: int, members: int) -> tuple[Cuts, ...]:
    """All ways to cut the stages into ranges, even ones first."""
    found: Iterator[Cuts] = ((0, *inner, stages) for inner in combinations(range(1, stages), members - 1))
    return tuple(sorted(found, key=lambda cuts: max(stop - first for first, stop in pairwise(cuts))))


def even_cuts(stages: int, members: int) -> Cuts:
    """Equal shares of the stages; where they are not even, the first members have one more."""
    size, extra = divmod(stages, members)
    return tuple(i * size + min(i, extra) for i in range(members + 1))


def _budget(spec: RunSpec, capacity: Capacity) -> float:
    """Bytes to plan with; a peer that has not measured its memory is not bounded by it."""
    return (1 - spec.grouping.reserve) * capacity.memory_bytes or inf
