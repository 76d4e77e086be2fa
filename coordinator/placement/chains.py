"""The fastest chain of given peers: the order of the peers and the cuts of the stages between them.

For a few peers all chains are compared. For more peers one plausible order is taken, and a local search moves
the cuts. A chain respects the memory of its members, and one of two neighbours accepts connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise, permutations, product
from math import comb, factorial, inf

from coordinator.placement.cost_model import Costs, Survey, memory_budget, memory_needed
from coordinator.placement.rules import member_of
from coordinator.placement.schedule import LinkTime, least_seconds, step_seconds
from coordinator.run.state.records import Peer
from protocol.math.flops import microbatch_flops
from protocol.memory.needs import shares_main
from protocol.spec.run import RunSpec
from protocol.types import Member, StageRange

_MOST_COMPARED = 120
"""All chains of a few peers are compared if there are at most this many."""
_BISECTIONS = 10

Cuts = tuple[int, ...]
"""The first stage of each member, and after the last member the number of stages."""


@dataclass(frozen=True)
class Chain:
    """Peers, by their numbers, in the order of their stages, and the seconds of their inner step.

    `seconds` is infinite, and `cuts` is empty, where these peers cannot form a chain.
    """

    seconds: float
    order: tuple[int, ...]
    cuts: Cuts = ()


class ChainSearch:
    """Finds chains of peers. A peer's number is its position in `peers`.

    The search takes the least k of the run. A wider k is chosen later, and makes a step hardly longer.

    Args:
        ignore_endpoints: treat each peer as one that accepts connections.

    Attributes:
        stages: of the run.
        compared: chains that were compared so far, a measure of the effort.
        reachable: by peer, whether it accepts connections.
        budgets: by peer, bytes of memory that may be planned with.
    """

    def __init__(
        self, spec: RunSpec, survey: Survey, peers: Sequence[Peer], ignore_endpoints: bool = False
    ) -> None:
        self.stages = spec.swarm.stages
        self.compared = 0
        self.reachable = [ignore_endpoints or bool(peer.endpoint) for peer in peers]
        self._capacities = [survey.capacities.get(peer.peer, peer.capacity) for peer in peers]
        self.budgets = [memory_budget(spec, each) for each in self._capacities]
        self._microbatches = spec.inner.microbatches
        flops = [survey.flops(peer.peer) for peer in peers]
        self._seconds_per_flop = [1 / each if each else 0.0 for each in flops]
        stage_flops = [microbatch_flops(spec, StageRange(i, i + 1)) for i in range(self.stages)]
        self._flops_before = [0.0, *accumulate(stage_flops)]
        costs, k, names = Costs(spec, survey), spec.link.possible_ks[0], [peer.peer for peer in peers]
        self._message_bytes = sum(costs.sizes(k))
        self._link = cache(lambda upper, lower: costs.link(names[upper], names[lower], k))
        # What a member needs does not depend on the peer, but on whether the device holds the outer state,
        # and on main memory, of which gibibytes are precise enough.
        kinds = [each.device.partition(":")[0] * shares_main(each.device) for each in self._capacities]
        main = [each.main_bytes >> 30 << 30 for each in self._capacities]
        self._kinds = list(zip(kinds, main, strict=True))
        self._memory = cache(
            lambda first, stop, left, kind: memory_needed(spec, StageRange(first, stop), left, *kind)
        )

    def burden(self, peer: int, share: float) -> float:
        """How slow `peer` is: seconds per microbatch for `share` of all stages, or for its messages if that
        is longer, and its round trip.
        """
        capacity = self._capacities[peer]
        compute = share * self._flops_before[-1] * self._seconds_per_flop[peer]
        bandwidths = [each for each in (capacity.uplink, capacity.downlink) if each > 0]
        return max(compute, self._message_bytes / min(bandwidths, default=inf)) + capacity.round_trip

    def most_stages(self, peer: int) -> int:
        """The most successive stages that fit on `peer`, at the end of a chain."""
        ranges = combinations(range(self.stages + 1), 2)
        return max((stop - first for first, stop in ranges if self._fits(peer, first, stop, 1)), default=0)

    def chains_of(self, size: int) -> int:
        """The number of chains that `size` peers can form."""
        return factorial(size) * comb(self.stages - 1, size - 1)

    def chain(self, group: Sequence[int], limit: float = inf) -> Chain | None:
        """A fast chain of `group` below `limit` seconds; the fastest one if the group is small."""
        if self.chains_of(len(group)) <= _MOST_COMPARED:
            return self.fastest(group, limit)
        order = self._plausible_order(group)
        found = self._cut(order) if order else None
        return found if found is not None and found.seconds < limit else None

    def reordered(self, chain: Chain) -> Iterator[Chain]:
        """The chains that result when two members of `chain` change places."""
        for i, j in combinations(range(len(chain.order)), 2):
            order = list(chain.order)
            order[i], order[j] = order[j], order[i]
            found = self._cut(tuple(order))
            if found is not None:
                yield found

    def fastest(self, group: Sequence[int], limit: float = inf) -> Chain | None:
        """The fastest of all chains of `group` below `limit` seconds."""
        best = None
        # Sorted, so that of equally fast chains the same one is found for any order of the group.
        for order in permutations(sorted(group)):
            links = self._links_of(order)
            if links is None:
                continue
            for cuts in _all_cuts(self.stages, len(order)):
                compute = self._compute(order, cuts)
                if compute is None:
                    continue
                self.compared += 1
                # A replay takes longer than the bound, so only promising chains are replayed.
                if least_seconds(compute, links, self._microbatches) < limit:
                    self.compared += 2  # a replay costs about twice as much as the bound
                    seconds = step_seconds(compute, links, self._microbatches)
                    if seconds < limit:
                        limit, best = seconds, Chain(seconds, order, cuts)
        return best

    def _plausible_order(self, group: Sequence[int]) -> tuple[int, ...] | None:
        """An order with the slow peers at the ends, which have one link only. Between two peers without an
        endpoint there is one with an endpoint; None if there are too few of these.
        """
        size = len(group)
        by_burden = sorted(group, key=lambda peer: (-self.burden(peer, 1 / size), peer))
        dialing = [peer for peer in by_burden if not self.reachable[peer]]
        rest = [peer for peer in by_burden if self.reachable[peer]]
        outside_in = sorted(range(size), key=lambda position: (min(position, size - 1 - position), position))
        alternate = [position for position in outside_in if position % 2 == 0]
        if len(dialing) > len(alternate):
            return None
        order = dict(zip(alternate, dialing, strict=False))
        order |= dict(zip([position for position in outside_in if position not in order], rest, strict=True))
        return tuple(order[position] for position in range(size))

    def _cut(self, order: tuple[int, ...]) -> Chain | None:
        """The chain with this order and the best cuts that a local search finds; None if impossible."""
        links = self._links_of(order)
        if links is None:
            return None
        starts = [even_cuts(self.stages, len(order)), self._balanced_cuts(order)]
        chains = [self._bounded(order, cuts, links) for cuts in starts if cuts is not None]
        faster: Chain | None = min(chains, key=lambda each: each.seconds)
        while faster is not None:
            best = faster
            others = (self._bounded(order, cuts, links) for cuts in _moved_cuts(best.cuts))
            faster = next((each for each in others if each.seconds < best.seconds), None)
        compute = self._compute(order, best.cuts)
        if compute is None:
            return None
        # The search compared lower bounds; other searches compare chains by their exact seconds.
        return replace(best, seconds=step_seconds(compute, links, self._microbatches))

    def _bounded(self, order: tuple[int, ...], cuts: Cuts, links: Sequence[LinkTime]) -> Chain:
        """A chain with the lower bound of its seconds in place of a replay; infinite if impossible."""
        self.compared += 1
        compute = self._compute(order, cuts)
        seconds = inf if compute is None else least_seconds(compute, links, self._microbatches)
        return Chain(seconds, order, cuts)

    def _balanced_cuts(self, order: tuple[int, ...]) -> Cuts | None:
        """Cuts that nearly minimise the longest computing time of a member; None if memory forbids all."""
        most = self._flops_before[-1] * max(self._seconds_per_flop[peer] for peer in order)
        low, high, best = 0.0, most, self._greedy_cuts(order, inf)
        # Bisect the longest time that a member may compute.
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            found = self._greedy_cuts(order, middle)
            best = found or best
            low, high = (low, middle) if found else (middle, high)
        return best

    def _greedy_cuts(self, order: tuple[int, ...], longest: float) -> Cuts | None:
        """Each member takes as many stages as its memory and `longest` seconds per microbatch allow."""
        self.compared += 1
        cuts = [0]
        for position, peer in enumerate(order):
            members_left = len(order) - position
            first = stop = cuts[-1]
            # Each later member needs one stage at least.
            while (
                stop <= self.stages - members_left
                and self._compute_seconds(peer, first, stop + 1) <= longest
                and self._fits(peer, first, stop + 1, members_left)
            ):
                stop += 1
            if stop == first:
                return None
            cuts.append(stop)
        return tuple(cuts) if cuts[-1] == self.stages else None

    def _compute(self, order: tuple[int, ...], cuts: Cuts) -> list[float] | None:
        """Seconds of a microbatch on each member; None where the memory of a member does not suffice."""
        found = []
        for position, peer in enumerate(order):
            first, stop = cuts[position], cuts[position + 1]
            if not self._fits(peer, first, stop, len(order) - position):
                return None
            found.append(self._compute_seconds(peer, first, stop))
        return found

    def _compute_seconds(self, peer: int, first: int, stop: int) -> float:
        return (self._flops_before[stop] - self._flops_before[first]) * self._seconds_per_flop[peer]

    def _fits(self, peer: int, first: int, stop: int, members_left: int) -> bool:
        return self._memory(first, stop, members_left, self._kinds[peer]) <= self.budgets[peer]

    def _links_of(self, order: tuple[int, ...]) -> list[LinkTime] | None:
        """None where two neighbours have no endpoint."""
        if not all(self.reachable[one] or self.reachable[other] for one, other in pairwise(order)):
            return None
        return [self._link(*pair) for pair in pairwise(order)]


@lru_cache(maxsize=64)
def _all_cuts(stages: int, members: int) -> tuple[Cuts, ...]:
    """All ways to cut the stages into ranges. Even ones come first, so that a low limit is found early."""
    found: Iterator[Cuts] = ((0, *inner, stages) for inner in combinations(range(1, stages), members - 1))
    return tuple(sorted(found, key=lambda cuts: max(stop - first for first, stop in pairwise(cuts))))


def _moved_cuts(cuts: Cuts) -> Iterator[Cuts]:
    """`cuts` with each cut in turn moved by one stage."""
    for at, by in product(range(1, len(cuts) - 1), (-1, 1)):
        if cuts[at - 1] < cuts[at] + by < cuts[at + 1]:
            yield (*cuts[:at], cuts[at] + by, *cuts[at + 1 :])


def members_along(peers: Iterable[Peer], cuts: Cuts) -> tuple[Member, ...]:
    """`peers` in the order of their stages as members of a chain with these `cuts`."""
    ranges = (StageRange(*ends) for ends in pairwise(cuts))
    return tuple(member_of(one, stages) for one, stages in zip(peers, ranges, strict=True))


def even_cuts(stages: int, members: int) -> Cuts:
    """Equal shares of the stages; where they cannot be equal, the first members have one stage more."""
    size, extra = divmod(stages, members)
    return tuple(i * size + min(i, extra) for i in range(members + 1))
