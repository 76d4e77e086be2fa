"""Forms the pipelines of a run that starts from the stage peers and what these have measured.

The objective is the inner step of the slowest pipeline under the cost model
(coordinator.placement.cost_model). The search chooses the members of each pipeline, their order and their
stages. Two constraints hold: a member's memory suffices for its stages, and one of two neighbours accepts
connections. A peer that makes no pipeline faster stays a spare.

- For a few peers all possibilities are compared, so the result is the optimum. More bandwidth of any peer
  never makes it slower.
- For many peers the strongest are distributed so that pipelines are alike. Then a local search
  (coordinator.placement.local_search) exchanges members of the slowest pipeline. This is a heuristic.

k is chosen last, for pipelines that were found with the least k.

Pure functions: the same peers in another order give the same chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import comb, inf

from coordinator.placement.chain_search import Chain, ChainSearch, members_along
from coordinator.placement.cost_model import Survey, chain_time, memory_needed
from coordinator.placement.links import choose_k
from coordinator.placement.local_search import Move, improve
from coordinator.placement.schedule import StepTime
from coordinator.state.state import Peer
from coordinator.state.text import Waiting, counted
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, StageRange

MOST_CHAINS_IN_FULL = 6_000
"""All possibilities are compared if the peers can form at most this many chains."""
_MOST_PEERS_IN_FULL = 10
"""All divisions into several pipelines are compared for at most this many peers."""
_MOST_COMPARED = 10_000
"""A local search ends when it has compared this many chains."""
_STARTS = 4
"""A local search starts from each of this many distributions of the peers."""
_PARTNERS = 32
"""Members are exchanged with this many of the fastest pipelines and of the strongest spares."""

PeerNumbers = tuple[int, ...]
"""The peers of one pipeline in any order, by their position among all peers."""
_Solution = tuple[float, int, float, tuple[Chain, ...]]
"""Seconds of the slowest chain, deviation from the usual lengths, sum of seconds, and the chains."""


@dataclass(frozen=True)
class FormedChain:
    """A pipeline before it is in a plan: its members in order, k of each link, and its inner step."""

    members: tuple[Member, ...]
    ks: tuple[int, ...]
    time: StepTime


def form_chains(
    spec: RunSpec,
    survey: Survey,
    peers: Sequence[Peer],
    pipelines: int,
    most_in_full: int = MOST_CHAINS_IN_FULL,
) -> tuple[FormedChain, ...] | Waiting:
    """`pipelines` chains out of `peers`, by the arrival of their first peer; the other peers stay spares."""
    by_arrival = sorted(peers, key=lambda peer: (peer.arrival, peer.peer))
    found = _search(spec, ChainSearch(spec, survey, by_arrival), pipelines, most_in_full)
    if found is None:
        return _why_not(spec, survey, by_arrival, pipelines)
    in_order = sorted(found, key=lambda each: min(each.order))
    return tuple(_formed(spec, survey, by_arrival, chain) for chain in in_order)


def _formed(spec: RunSpec, survey: Survey, peers: Sequence[Peer], chain: Chain) -> FormedChain:
    members = members_along((peers[number] for number in chain.order), chain.cuts)
    ks = choose_k(spec, survey, members, None)
    return FormedChain(members, ks, chain_time(spec, survey, members, ks))


def _search(
    spec: RunSpec, search: ChainSearch, pipelines: int, most_in_full: int = MOST_CHAINS_IN_FULL
) -> Sequence[Chain] | None:
    """The chains of all pipelines; None where no solution is found."""
    count = len(search.reachable)
    if pipelines == 0:
        return []
    lengths = range(2, min(search.stages, count) + 1)
    chains = sum(comb(count, length) * search.chains_of(length) for length in lengths)
    if chains <= most_in_full and (pipelines == 1 or count <= _MOST_PEERS_IN_FULL):
        return _best_of_all(spec, search, pipelines)
    return _LargeSwarm(spec, search, pipelines).run()


def _best_of_all(spec: RunSpec, search: ChainSearch, pipelines: int) -> Sequence[Chain] | None:
    """The optimum: the fastest chain of each set of peers, then the best `pipelines` disjoint sets.

    Of equally fast solutions it takes the one with the usual lengths, then the least sum of steps.
    """
    count = len(search.reachable)
    # By the lowest peer of the set, so that each solution is built once. Sets are bit masks.
    fastest: dict[int, list[tuple[int, Chain]]] = {}
    for length in range(2, min(search.stages, count) + 1):
        for group in combinations(range(count), length):
            chain = search.fastest(group)
            if chain is not None:
                fastest.setdefault(group[0], []).append((sum(1 << peer for peer in group), chain))

    @cache
    def best(peer: int, taken: int, left: int) -> _Solution:
        """`left` pipelines out of the peers from `peer` on that are not in `taken`."""
        if left == 0:
            return 0.0, 0, 0.0, ()
        if peer == count:
            return inf, 0, 0.0, ()
        options = [best(peer + 1, taken, left)]
        for mask, chain in fastest.get(peer, []):
            if not mask & taken:
                slowest, deviation, total, others = best(peer + 1, taken | mask, left - 1)
                slowest, total = max(slowest, chain.seconds), total + chain.seconds
                deviation += abs(len(chain.order) - spec.swarm.chain_length)
                options.append((slowest, deviation, total, (chain, *others)))
        # min takes the first of equal solutions, so the result does not depend on the chains themselves.
        return min(options, key=lambda option: option[:3])

    slowest, _, _, chains = best(0, 0, pipelines)
    return chains if slowest < inf else None


class _LargeSwarm:
    """For many peers: distribute the strongest, then exchange members of the slowest pipeline."""

    def __init__(self, spec: RunSpec, search: ChainSearch, pipelines: int) -> None:
        self._search, self._pipelines = search, pipelines
        self._usual = spec.swarm.chain_length
        count = len(search.reachable)
        self._burdens = [search.burden(peer, 1 / self._usual) for peer in range(count)]
        self._most_stages = [search.most_stages(peer) for peer in range(count)]
        self._usable = [peer for peer in range(count) if self._most_stages[peer]]

    def run(self) -> Sequence[Chain] | None:
        """Start from chains of several lengths, and improve the best of these starts."""
        most = min(self._search.stages, len(self._usable) // self._pipelines)
        if most < 2:
            return None
        usual = min(self._usual, most)
        halves = (usual >> halvings for halvings in range(1, usual.bit_length()))
        lengths = {
            min(max(2, length), most)
            for length in (*halves, usual - 1, usual, usual + 1, (usual + most) // 2, most)
        }
        starts = [
            start
            for length in sorted(lengths, key=lambda each: (abs(each - usual), each))
            for start in self._starts(length)
        ]
        best, best_seconds = None, inf
        for chains in sorted(starts, key=_slowest)[:_STARTS]:
            spent = self._search.compared + _MOST_COMPARED
            improve(chains, lambda index: self._moves(chains, index, spent))  # noqa: B023
            if _slowest(chains) < best_seconds:
                best, best_seconds = [*chains.values()], _slowest(chains)
        return best

    def _starts(self, length: int) -> Iterator[dict[int, Chain]]:
        """Chains of `length` with similar burdens; if memory forbids some, chains with similar memory."""
        for weights in (self._burdens, [1 / most if most else inf for most in self._most_stages]):
            groups = self._deal(weights, length)
            if groups is None:
                return
            # An impossible chain stays in the start, since an exchange of members may make it possible.
            chains = {
                i: self._search.chain(group) or Chain(inf, tuple(group), ()) for i, group in enumerate(groups)
            }
            yield chains
            if _slowest(chains) < inf:
                return

    def _deal(self, weights: Sequence[float], length: int) -> list[list[int]] | None:
        """Groups of the lightest peers; None if there are too few. Each goes to the lightest group with room.

        A chain of n members has room for ceil(n/2) peers without an endpoint.
        """
        reachable, alternate = self._search.reachable, -(-length // 2)
        ranked = sorted(self._usable, key=lambda peer: (weights[peer], peer))
        dialing = [peer for peer in ranked if not reachable[peer]][: self._pipelines * alternate]
        allowed = set(dialing)
        chosen = [peer for peer in ranked if reachable[peer] or peer in allowed][: self._pipelines * length]
        if len(chosen) < self._pipelines * length:
            return None
        groups: list[list[int]] = [[] for _ in range(self._pipelines)]
        loads = [0.0] * self._pipelines
        # Peers without an endpoint come first: any group has room for the others.
        for is_reachable, room in ((False, alternate), (True, length)):
            lightest = [(loads[i], i) for i, group in enumerate(groups) if len(group) < room]
            heapify(lightest)
            for peer in reversed(chosen):  # the heaviest first: light peers then even the loads out
                if reachable[peer] == is_reachable:
                    _, i = heappop(lightest)
                    groups[i].append(peer)
                    loads[i] += weights[peer]
                    if len(groups[i]) < room:
                        heappush(lightest, (loads[i], i))
        return groups

    def _moves(self, chains: Mapping[int, Chain], index: int, spent: int) -> Iterator[Move[Chain]]:
        """Other orders of the chain, and exchanges of its members with spares and with other chains.

        Slow members of the chain and fast members of others come first. Ends when `compared` reaches `spent`.
        """
        search, own = self._search, chains[index]
        if search.compared >= spent:
            return
        if own.seconds < inf:  # an impossible chain has no cuts to start from
            yield from (Move({index: chain}) for chain in search.reordered(own))
        mine = self._by_burden(own.order)[::-1]
        taken = {peer for chain in chains.values() for peer in chain.order}
        spares = self._by_burden(peer for peer in self._usable if peer not in taken)
        for group, _ in _exchanges(mine, spares[:_PARTNERS], search.stages, 0):
            chain = search.chain(group, own.seconds)
            if chain is not None:
                yield Move({index: chain})
        others = sorted((i for i in chains if i != index), key=lambda i: (chains[i].seconds, i))
        for other in others[:_PARTNERS]:
            theirs = self._by_burden(chains[other].order)
            for group, other_group in _exchanges(mine, theirs, search.stages, 2):
                if search.compared >= spent:
                    return
                # Both chains must be faster than this one is now, else the move does not help.
                chain = search.chain(group, own.seconds)
                other_chain = search.chain(other_group, own.seconds) if chain is not None else None
                if chain is not None and other_chain is not None:
                    yield Move({index: chain, other: other_chain})

    def _by_burden(self, peers: Iterable[int]) -> PeerNumbers:
        return tuple(sorted(peers, key=lambda peer: (self._burdens[peer], peer)))


def _slowest(chains: Mapping[int, Chain]) -> float:
    return max(chain.seconds for chain in chains.values())


def _exchanges(
    mine: PeerNumbers, theirs: PeerNumbers, most: int, least: int
) -> Iterator[tuple[PeerNumbers, PeerNumbers]]:
    """Both groups after two peers are exchanged, after `mine` takes one peer, and after it gives one away.

    No group has more peers than `most`. `theirs` keeps at least `least` (0 for spares), `mine` at least two.
    """
    for own in mine:
        for their in theirs:
            yield _without(mine, own, their), _without(theirs, their, own)
    if len(mine) < most and len(theirs) > least:
        for their in theirs:
            yield (*mine, their), _without(theirs, their)
    if len(mine) > 2 and (least == 0 or len(theirs) < most):
        for own in mine:
            yield _without(mine, own), (*theirs, own)


def _without(group: PeerNumbers, peer: int, *instead: int) -> PeerNumbers:
    return (*(each for each in group if each != peer), *instead)


def _why_not(spec: RunSpec, survey: Survey, peers: Sequence[Peer], pipelines: int) -> Waiting:
    if len(peers) < 2 * pipelines:  # a pipeline has two members at least
        return Waiting(f"waiting for {counted(2 * pipelines - len(peers), 'more stage peer')}")
    dialing = [peer.peer for peer in peers if not peer.endpoint]
    reachable = ChainSearch(spec, survey, peers, ignore_endpoints=True)
    # If endpoints alone would make a solution possible, memory is not the cause.
    if dialing and _search(spec, reachable, pipelines) is not None:
        return unconnected(dialing)
    search = ChainSearch(spec, survey, peers)
    needs = [memory_needed(spec, StageRange(stage, stage + 1), 1) for stage in range(search.stages)]
    budgets = [budget for budget in search.budgets if budget < inf]
    return Waiting(
        f"waiting for more memory: {counted(pipelines, 'pipeline')} of {search.stages} stages take at "
        f"least {_megabytes(pipelines * sum(needs))}, and {_megabytes(max(needs))} for the largest stage; "
        f"{counted(len(peers), 'stage peer')} can give {_megabytes(sum(budgets))}, "
        f"and {_megabytes(max(budgets, default=0.0))} at most"
    )


def unconnected(dialing: Sequence[PeerId]) -> Waiting:
    """Waiting for a peer with an endpoint: two of the `dialing` peers cannot be neighbours."""
    pair = " and ".join(dialing[:2])
    sentence = (
        f"waiting for 1 more stage peer with an endpoint: {pair} have none, so cannot be neighbours; one of "
        "these peers must be reached by others (the log of its node says how), or the run needs a relay"
    )
    return Waiting(sentence, unreachable=True)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
