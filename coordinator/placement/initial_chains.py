"""Which stage peers form which pipeline when the run starts, by what they can carry.

What is minimised is the inner step of the slowest pipeline under the cost model (coordinator.placement.cost_model), subject
to memory and to every two neighbours being able to connect. Everything is free for that: who is taken, who
goes with whom, in which order, with how many stages each. Who makes no pipeline faster stays a spare.

A few peers are searched in full. Then the result is the optimum, and more bandwidth of whomever never makes
it slower, since every candidate's step only becomes shorter. Of many peers the strongest are dealt out so
that pipelines are alike, and members of the slowest pipeline are exchanged as long as that makes it faster;
that is a heuristic, which a peer's better line may send another way. k is chosen last, for the
chains found with the narrowest one: a wider one costs a few percent of a step at most.

Pure functions; whoever calls them with the same peers in another order gets the same chains.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb, inf

from coordinator.placement.chain_search import Arrangement, Arranger
from coordinator.placement.cost_model import Survey, chain_time, choose_k, memory_needed
from coordinator.placement.schedule import StepTime
from coordinator.state.state import Peer
from coordinator.state.text import Waiting, counted
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, StageRange

_MOST_IN_FULL = 6_000
"""So many chains are all looked at."""
_MOST_MATCHED = 10
"""Of so many peers all sets are tried against each other."""
_MOST_IN_PART = 10_000
"""Exchanges are tried until so many chains have been looked at, from each start."""
_STARTS = 4
"""From so many ways to deal the peers out exchanges begin."""
_PARTNERS = 32
"""Members are exchanged with so many of the fastest pipelines, and of the strongest spares."""

Group = tuple[int, ...]
"""The peers of one pipeline, by number."""


@dataclass(frozen=True)
class Chain:
    """A pipeline to be: its members in order, k of each link, and what its inner step takes."""

    members: tuple[Member, ...]
    ks: tuple[int, ...]
    time: StepTime


def form(spec: RunSpec, survey: Survey, peers: Sequence[Peer], pipelines: int) -> tuple[Chain, ...] | Waiting:
    """`pipelines` chains out of `peers`, by the arrival of their first peer; the other peers stay spares."""
    here = sorted(peers, key=lambda peer: (peer.arrival, peer.peer))
    found = _search(spec, Arranger(spec, survey, here), pipelines)
    if found is None:
        return _why_not(spec, survey, here, pipelines)
    return tuple(_chain(spec, survey, here, each) for each in sorted(found, key=lambda each: min(each.order)))


def _chain(spec: RunSpec, survey: Survey, peers: Sequence[Peer], found: Arrangement) -> Chain:
    ranges = (StageRange(*found.cuts[i : i + 2]) for i in range(len(found.order)))
    members = tuple(
        Member(peers[number].peer, stages, peers[number].endpoint)
        for number, stages in zip(found.order, ranges, strict=True)
    )
    ks = choose_k(spec, survey, members, None)
    return Chain(members, ks, chain_time(spec, survey, members, ks, 0))


def _search(spec: RunSpec, arranger: Arranger, pipelines: int) -> list[Arrangement] | None:
    """None where no way was found."""
    count = len(arranger.reachable)
    if pipelines == 0:
        return []
    lengths = range(2, min(arranger.stages, count) + 1)
    chains = sum(comb(count, size) * arranger.chains_of(size) for size in lengths)
    if chains <= _MOST_IN_FULL and (pipelines == 1 or count <= _MOST_MATCHED):
        return _best_of_all(spec, arranger, pipelines)
    return _Search(spec, arranger, pipelines).run()


def _best_of_all(spec: RunSpec, arranger: Arranger, pipelines: int) -> list[Arrangement] | None:
    """The optimum, by the best chain of every set of peers, and then of disjoint sets.

    Of equally fast ones that with the usual lengths, then the one whose other pipelines are faster.
    """
    count = len(arranger.reachable)
    by_lowest: dict[int, list[tuple[int, Arrangement]]] = {}
    for size in range(2, min(arranger.stages, count) + 1):
        for group in combinations(range(count), size):
            found = arranger.best_of_all(group)
            if found is not None:
                mask = sum(1 << peer for peer in group)
                by_lowest.setdefault(group[0], []).append((mask, found))

    nothing = (inf, 0, 0.0)

    @cache
    def best(peer: int, taken: int, left: int) -> tuple[tuple[float, int, float], tuple[Arrangement, ...]]:
        """(worst, deviation, sum) and the chains of `left` pipelines out of the peers from `peer` on."""
        if left == 0:
            return (0.0, 0, 0.0), ()
        if peer >= count:
            return nothing, ()
        choice = best(peer + 1, taken, left)
        if not taken >> peer & 1:
            for mask, found in by_lowest.get(peer, []):
                if mask & taken:
                    continue
                (worst, odd, total), others = best(peer + 1, taken | mask, left - 1)
                odd += abs(len(found.order) - spec.swarm.chain_length)
                value = (max(worst, found.seconds), odd, total + found.seconds)
                if value < choice[0]:
                    choice = (value, (found, *others))
        return choice

    value, chains = best(0, 0, pipelines)
    return list(chains) if value[0] < inf else None


@dataclass(frozen=True)
class _Formation:
    groups: tuple[Group, ...]
    found: tuple[Arrangement | None, ...]

    @property
    def worst(self) -> float:
        return max(map(_seconds, self.found), default=inf)


class _Search:
    """Of many peers: deal the strongest out, then exchange members of the slowest pipeline."""

    def __init__(self, spec: RunSpec, arranger: Arranger, pipelines: int) -> None:
        self._arranger, self._pipelines = arranger, pipelines
        self._usual = spec.swarm.chain_length
        count = len(arranger.reachable)
        self._burdens = [arranger.burden(peer, 1 / self._usual) for peer in range(count)]
        rooms = [arranger.room(peer) for peer in range(count)]
        self._rooms = rooms
        self._usable = [peer for peer in range(count) if rooms[peer]]

    def run(self) -> list[Arrangement] | None:
        """Deal out chains of several lengths, the usual one first, and improve the best of them."""
        most = min(self._arranger.stages, len(self._usable) // self._pipelines)
        if most < 2:
            return None
        usual = min(self._usual, most)
        halves = (usual >> halvings for halvings in range(1, usual.bit_length()))
        near = (usual - 1, usual, usual + 1, (usual + most) // 2, most)
        lengths = {min(max(2, length), most) for length in (*halves, *near)}
        tried = [
            self._dealt(length) for length in sorted(lengths, key=lambda each: (abs(each - usual), each))
        ]
        starts = sorted(tried, key=lambda each: each.worst)[:_STARTS]
        ends = [self._improved(list(each.groups), list(each.found)) for each in starts]
        ends = [found for found in ends if found and None not in found]
        found = min(ends, key=lambda found: max(map(_seconds, found)), default=[])
        return [each for each in found if each is not None] or None

    def _dealt(self, length: int) -> _Formation:
        formations = (
            _Formation(tuple(groups), tuple(self._arranger.best(group) for group in groups))
            for groups in self._deals(length)
        )
        first = next(formations, _Formation((), ()))
        return first if first.worst < inf else min([first, *formations], key=lambda each: each.worst)

    def _deals(self, length: int) -> Iterator[list[Group]]:
        """Groups of `length` that are alike in burden; and, should memory forbid those, in memory."""
        by_burden = [(self._burdens[peer], peer) for peer in self._usable]
        dealt = self._deal(sorted(by_burden), length)
        if dealt is not None:
            yield dealt
        by_room = [(float(self._rooms[peer]), peer) for peer in self._usable]
        dealt = self._deal(sorted(by_room, key=lambda each: (-each[0], each[1])), length)
        if dealt is not None:
            yield dealt

    def _deal(self, weighed: Sequence[tuple[float, int]], length: int) -> list[Group] | None:
        """The first of `weighed` for which there is room, heaviest first to the group that weighs least.

        A chain has room for every other member without an endpoint.
        """
        reachable = self._arranger.reachable
        room = self._pipelines * -(-length // 2)
        dialing = [each for each in weighed if not reachable[each[1]]][:room]
        allowed = {peer for _, peer in dialing}
        chosen = [each for each in weighed if reachable[each[1]] or each[1] in allowed]
        chosen = chosen[: self._pipelines * length]
        if len(chosen) < self._pipelines * length:
            return None
        groups: list[list[int]] = [[] for _ in range(self._pipelines)]
        weights = [0.0] * self._pipelines
        for only, most in ((False, -(-length // 2)), (True, length)):
            heap = [(weights[i], i) for i, group in enumerate(groups) if len(group) < most]
            heapq.heapify(heap)
            for weight, peer in sorted(chosen, key=lambda each: (-each[0], each[1])):
                if reachable[peer] != only:
                    continue
                _, i = heapq.heappop(heap)
                groups[i].append(peer)
                weights[i] += weight
                if len(groups[i]) < most:
                    heapq.heappush(heap, (weights[i], i))
        return [tuple(group) for group in groups]

    def _improved(self, groups: list[Group], found: list[Arrangement | None]) -> list[Arrangement | None]:
        """Exchange members of the slowest pipeline for others while that makes it faster, within a budget."""
        taken = {peer for group in groups for peer in group}
        spares = sorted((self._burdens[peer], peer) for peer in self._usable if peer not in taken)
        idle = [peer for _, peer in spares]
        until = self._arranger.looked_at + _MOST_IN_PART
        while groups and self._arranger.looked_at < until:
            worst = max(range(len(groups)), key=lambda i: (_seconds(found[i]), -i))
            others = sorted(
                (i for i in range(len(groups)) if i != worst), key=lambda i: (_seconds(found[i]), i)
            )
            if not self._exchange(groups, found, worst, others[:_PARTNERS], idle, until):
                break
        return found

    def _exchange(
        self,
        groups: list[Group],
        found: list[Arrangement | None],
        worst: int,
        others: Sequence[int],
        idle: list[int],
        until: int,
    ) -> bool:
        """Make pipeline `worst` faster, and no other as slow. Whether that succeeded."""
        limit, present = _seconds(found[worst]), found[worst]
        if present is not None and (better := self._arranger.improved(present)) is not None:
            found[worst] = better
            return True
        for mine, spares in _exchanges(groups[worst], tuple(idle[:_PARTNERS]), self._arranger.stages, 0):
            faster = self._arranger.best(mine, limit)
            if faster is not None:
                rest = [*spares, *idle[_PARTNERS:]]
                idle[:] = sorted(rest, key=lambda peer: (self._burdens[peer], peer))
                groups[worst], found[worst] = mine, faster
                return True
        for other in others:
            for mine, theirs in _exchanges(groups[worst], groups[other], self._arranger.stages, 2):
                if self._arranger.looked_at >= until:
                    return False
                faster = self._arranger.best(mine, limit)
                changed = self._arranger.best(theirs, limit) if faster is not None else None
                if faster is not None and (changed is not None or found[other] is None):
                    groups[worst], found[worst] = mine, faster
                    groups[other], found[other] = theirs, changed
                    return True
        return False


def _exchanges(mine: Group, theirs: Group, most: int, least: int) -> Iterator[tuple[Group, Group]]:
    """Both groups after one for one, after one was taken, and after one was given away."""
    for own in mine:
        for their in theirs:
            yield _without(mine, own, their), _without(theirs, their, own)
    if len(mine) < most and len(theirs) > least:
        for their in theirs:
            yield (*mine, their), _without(theirs, their)
    if len(mine) > 2 and (least == 0 or len(theirs) < most):
        for own in mine:
            yield _without(mine, own), (*theirs, own)


def _without(group: Group, peer: int, *instead: int) -> Group:
    return (*(each for each in group if each != peer), *instead)


def _seconds(found: Arrangement | None) -> float:
    return inf if found is None else found.seconds


def _why_not(spec: RunSpec, survey: Survey, peers: Sequence[Peer], pipelines: int) -> Waiting:
    if len(peers) < 2 * pipelines:
        return Waiting(f"waiting for {counted(2 * pipelines - len(peers), 'more stage peer')}")
    dialing = [peer.peer for peer in peers if not peer.endpoint]
    if dialing and _search(spec, Arranger(spec, survey, peers, anywhere=True), pipelines) is not None:
        return unconnected(dialing)
    arranger = Arranger(spec, survey, peers)
    needs = [memory_needed(spec, StageRange(stage, stage + 1), 1) for stage in range(arranger.stages)]
    here = [budget for budget in arranger.budgets if budget < inf]
    return Waiting(
        f"waiting for more memory: {counted(pipelines, 'pipeline')} of {arranger.stages} stages take at "
        f"least {_megabytes(pipelines * sum(needs))}, and {_megabytes(max(needs))} for the largest stage; "
        f"{counted(len(peers), 'stage peer')} can give {_megabytes(sum(here))}, "
        f"and {_megabytes(max(here, default=0.0))} at most"
    )


def unconnected(dialing: Sequence[PeerId]) -> Waiting:
    """For an endpoint, so that the peers that are `dialing` can be neighbours of somebody."""
    pair = " and ".join(dialing[:2])
    sentence = f"waiting for 1 more stage peer with an endpoint: {pair} have none, so cannot be neighbours"
    return Waiting(sentence, unreachable=True)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
