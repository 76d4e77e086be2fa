"""The one search of placement: it starts from some chains, and makes moves until none helps.

A move replaces some of the chains. The search takes the slowest chain, tries the moves that change it, and
makes one that lowers the objective of the chains in the move. There are two sets of moves, each with a bound
of its effort:

- :func:`free_moves`, before the run: two members of a chain change places, a member changes places with a
  spare or a member of another chain, a chain takes a peer or gives one away. Order and stages of a chain are
  chosen anew. The first move that helps is made.
- :class:`ExchangeMoves`, between two rounds, from the running plan: a member changes places with a spare or
  a member of another chain that has the same stages. All replicas have bit-equal anchors after a round, so
  no state moves. Peers connect anew, so the best move is made, and only if it helps by a margin.

Pure: the same peers in another order give the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf

from coordinator.base.phrases import listed, short
from coordinator.placement.chains import Chain, ChainSearch
from coordinator.placement.cost_model import COMPARED_MICROBATCHES, Costs, Survey
from coordinator.placement.rules import can_be_neighbours, links_between
from protocol.group.batch import whole_batch
from protocol.spec.fixed import MARGIN
from protocol.spec.run import RunSpec
from protocol.types import Member, Replica, StageRange

MOST_COMPARED = 10_000
"""Free moves from one start compare about this many chains."""
_PARTNERS = 32
"""Members are exchanged with this many of the fastest chains and of the strongest spares."""
MOST_OPERATIONS = 40_000
"""Exchanges replay at most this many operations of members, about half a second. An impossible exchange
counts as one operation.
"""
_SAMPLE = 4
"""In a large swarm, this many of the fastest peers, of the slowest and of the others are tried per member."""
_LEAST_GAIN = 0.01
"""An exchange must make the chains that it touches faster by this share."""

PeerNumbers = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """The chains that a move replaces, by index, and what it does, for messages."""

    chains: Mapping[int, Chain]
    description: str = ""


def slowest(seconds: Iterable[float]) -> float:
    """The objective where all chains do the same work: the slowest one determines the step."""
    return max(seconds)


def harmonic_mean(seconds: Iterable[float]) -> float:
    """The objective where chains share the work by speed: all need the mean of what they would need alone."""
    speeds = [1 / each for each in seconds]
    return len(speeds) / sum(speeds)


def improve(
    chains: dict[int, Chain],
    moves: Callable[[int], Iterable[Move]],
    objective: Callable[[Iterable[float]], float] = slowest,
    margin: float = 0.0,
    takes_first: bool = True,
) -> list[Move]:
    """Change `chains` in place by moves until none helps. Returns the moves that were made, in order.

    Args:
        chains: by index.
        moves: offers the moves that change the chain of an index, given the present `chains`.
        margin: a move must lower the objective of the chains that it touches by this share.
        takes_first: whether to make the first move that helps, or the best of all.
    """
    made = list[Move]()
    waiting = set(chains)  # chains whose moves were not tried since they changed
    while waiting:
        # The slowest first; the index decides ties, so that the result does not depend on an order.
        index = min(waiting, key=lambda each: (-chains[each].seconds, each))
        waiting.remove(index)
        best, best_ratio = None, 1 - margin
        for move in moves(index):
            # By ratio, so that moves of chains with unlike seconds can be compared.
            before = objective(chains[each].seconds for each in move.chains)
            after = objective(chain.seconds for chain in move.chains.values())
            if after < before * best_ratio:
                best, best_ratio = move, after / before
                if takes_first:
                    break
        if best is not None:
            chains.update(best.chains)
            waiting.update(best.chains)
            made.append(best)
        elif objective is slowest:
            break  # a faster other chain would not shorten the step
    return made


def free_moves(
    search: ChainSearch, chains: Mapping[int, Chain], burdens: Sequence[float], usable: Collection[int]
) -> Callable[[int], Iterator[Move]]:
    """The moves of chains whose order and stages are chosen anew.

    Args:
        chains: by index; :func:`improve` changes them.
        burdens: by peer, how slow it is.
        usable: the peers that can host a stage.
    """
    most_compared = search.compared + MOST_COMPARED

    def by_burden(peers: Iterable[int]) -> PeerNumbers:
        return tuple(sorted(peers, key=lambda peer: (burdens[peer], peer)))

    def moves(index: int) -> Iterator[Move]:
        """Slow members of the chain and fast members of others come first."""
        own = chains[index]
        if search.compared >= most_compared:
            return
        if own.seconds < inf:  # an impossible chain has no cuts to start from
            yield from (Move({index: chain}) for chain in search.reordered(own))
        mine = by_burden(own.order)[::-1]
        taken = {peer for chain in chains.values() for peer in chain.order}
        spares = by_burden(peer for peer in usable if peer not in taken)
        for group, _ in _exchanges(mine, spares[:_PARTNERS], search.stages, 0):
            chain = search.chain(group, own.seconds)
            if chain is not None:
                yield Move({index: chain})
        others = sorted((i for i in chains if i != index), key=lambda i: (chains[i].seconds, i))
        for other in others[:_PARTNERS]:
            theirs = by_burden(chains[other].order)
            for group, other_group in _exchanges(mine, theirs, search.stages, 2):
                if search.compared >= most_compared:
                    return
                # Both chains must be faster than this one is now, else the move does not help.
                chain = search.chain(group, own.seconds)
                other_chain = search.chain(other_group, own.seconds) if chain is not None else None
                if chain is not None and other_chain is not None:
                    yield Move({index: chain, other: other_chain})

    return moves


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


class ExchangeMoves:
    """The moves of running chains: a member changes places with another peer that has the same stages.

    Args:
        replicas: all replicas of the plan.
        movable: indices of the replicas whose members may change places.
        spares: peers that may become members.
        may_host: whether a peer's memory holds its stages, given the members from it to the end of its chain.

    Attributes:
        members: by number, the members of all replicas, then the spares.
        chains: of all replicas as they are, by index.
        movable: those that :func:`improve` changes.
    """

    def __init__(
        self,
        spec: RunSpec,
        survey: Survey,
        replicas: Sequence[Replica],
        movable: Collection[int],
        spares: Sequence[Member],
        may_host: Callable[[Member, int], bool],
        may_be_neighbours: Callable[[Member, Member], bool] = can_be_neighbours,
        most_operations: int = MOST_OPERATIONS,
    ) -> None:
        self._costs, self._k = Costs(spec, survey), spec.link.k
        self._compared_microbatches = min(spec.inner.microbatches, COMPARED_MICROBATCHES)
        self._may_host, self._may_be_neighbours = cache(may_host), may_be_neighbours
        self._ks = {each.index: tuple(link.k for link in each.links) for each in replicas}
        self._operations_left = most_operations
        self.members = [*(member for each in replicas for member in each.members), *spares]
        self._seconds: dict[tuple[PeerNumbers, tuple[int, ...]], float] = {}
        numbers = iter(range(len(self.members)))
        orders = {each.index: tuple(next(numbers) for _ in each.members) for each in replicas}
        self.chains = {index: self._chain(index, order) for index, order in orders.items()}
        self.movable = {index: self.chains[index] for index in movable}
        usable = [number for chain in self.movable.values() for number in chain.order] + [*numbers]
        self._candidates: defaultdict[StageRange, list[int]] = defaultdict(list)
        for number in sorted(usable, key=lambda each: (self._seconds_alone(each), self.members[each].peer)):
            self._candidates[self.members[number].stages].append(number)

    def __call__(self, index: int) -> Iterator[Move]:
        where = {number: i for i, chain in self.movable.items() for number in chain.order}
        for member in self.movable[index].order:
            for other in self._partners(member, index, where):
                if self._operations_left <= 0:
                    return
                self._operations_left -= 1  # also for impossible exchanges, else the search has no bound
                move = self._exchange(index, member, other, where.get(other))
                if move is not None:
                    yield move

    def _exchange(self, index: int, member: int, other: int, its_index: int | None) -> Move | None:
        """Exchange `member` of chain `index` for `other` of chain `its_index`; None if that is impossible.

        A spare has no `its_index`.
        """
        chain = self._with(index, member, other)
        if chain is None:
            return None
        name, other_name = (short(self.members[each].peer) for each in (member, other))
        if its_index is None:
            return Move({index: chain}, f"{other_name} takes the place of {name} in replica-{index}")
        its_chain = self._with(its_index, other, member)
        if its_chain is None:
            return None
        where = f"between replica-{index} and replica-{its_index}"
        return Move({index: chain, its_index: its_chain}, f"{name} and {other_name} change places {where}")

    def _with(self, index: int, former: int, newcomer: int) -> Chain | None:
        """Chain `index` with `newcomer` in place of `former`; None where memory or endpoints forbid it."""
        order = tuple(newcomer if each == former else each for each in self.movable[index].order)
        # The others were members before, so only the newcomer's memory matters.
        if not self._may_host(self.members[newcomer], len(order) - order.index(newcomer)):
            return None
        members = (self.members[number] for number in order)
        if not all(self._may_be_neighbours(one, other) for one, other in pairwise(members)):
            return None
        return self._chain(index, order)

    def _partners(self, member: int, index: int, where: Mapping[int, int]) -> list[int]:
        """Peers to try in place of `member`, the fastest first: all of them in a small swarm."""
        candidates = self._candidates[self.members[member].stages]
        found = [each for each in candidates if where.get(each) != index]
        if len(found) <= 3 * _SAMPLE:
            return found
        others = found[_SAMPLE:-_SAMPLE]
        return [*found[:_SAMPLE], *others[:: -(-len(others) // _SAMPLE)], *found[-_SAMPLE:]]

    def _seconds_alone(self, number: int) -> float:
        """Seconds per microbatch for computing, or for sending both messages if that is slower."""
        member = self.members[number]
        compute = self._costs.compute(member.peer, member.stages)
        uplink = self._costs.survey.capacity(member.peer).uplink
        return max(compute, sum(self._costs.sizes(self._k)) / uplink if uplink > 0 else 0.0)

    def _chain(self, index: int, order: tuple[int, ...]) -> Chain:
        key = (order, self._ks[index])
        if key not in self._seconds:
            # The budget counts replays only; a chain that was timed before is free.
            self._operations_left -= len(order) * self._compared_microbatches
            members = [self.members[number] for number in order]
            self._seconds[key] = self._costs.seconds_per_microbatch(members, self._ks[index])
        return Chain(self._seconds[key], order)


def exchange_members(
    spec: RunSpec, replicas: Sequence[Replica], moves: ExchangeMoves
) -> tuple[list[Replica], str]:
    """`replicas` after the exchanges that help, and a sentence that says what changes and why, or "".

    Nothing changes unless the step becomes shorter by MARGIN.
    """
    grouping = spec.grouping
    objective = harmonic_mean if grouping.balance else slowest
    made = improve(moves.movable, moves, objective, margin=_LEAST_GAIN, takes_first=False)
    before, after = moves.chains, {**moves.chains, **moves.movable}
    changed = [index for index, chain in after.items() if chain.order != before[index].order]
    if not changed:
        return list(replicas), ""
    # Where work is shared by speed, count only changed chains: a mean over all would hide their gain.
    counted = changed if grouping.balance else list(after)
    usual = whole_batch(spec, len(replicas)) / len(replicas)
    was, now = (usual * objective(chains[i].seconds for i in counted) for chains in (before, after))
    if now >= was * (1 - MARGIN):
        return list(replicas), ""
    result = []
    for each in replicas:
        members = tuple(moves.members[number] for number in after[each.index].order)
        # Another peer may have to dial.
        ks = [link.k for link in each.links]
        links = links_between(members, ks) if each.index in changed else each.links
        result.append(replace(each, members=members, links=links))
    step = "their step, at fair shares," if grouping.balance else "the slowest step"
    what = listed([move.description for move in made])
    return result, f"{what}: {step} falls from {was:.3g} s to {now:.3g} s"
