"""Exchanges members between two rounds so that steps become faster.

All replicas have bit-equal anchors after a round, so two peers with the same stages can change places without
moving any state. In a move of this local search (coordinator.placement.local_search) a member changes places
with a member of another pipeline, or with a spare, that has the same stages. The best of all moves is made,
since each exchange makes peers connect anew.

Pure: the same peers in another order give the same exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from coordinator.placement.cost_model import (
    COMPARED_MICROBATCHES,
    ChainTimer,
    Survey,
    compute_seconds,
    message_bytes,
)
from coordinator.placement.links import can_be_neighbours, links_between
from coordinator.placement.local_search import Move, harmonic_mean, improve, slowest
from coordinator.state.text import listed, short
from protocol.algorithm.batch import whole_batch
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, Replica, StageRange

MOST_OPERATIONS = 40_000
"""A search replays at most this many operations of members, about half a second. An impossible exchange
counts as one operation.
"""
_SAMPLE = 4
"""In a large swarm, this many of the fastest peers, of the slowest and of the others are tried per member."""
_LEAST_GAIN = 0.01
"""An exchange must make the chains that it touches faster by this share."""


@dataclass(frozen=True)
class _Chain:
    members: tuple[Member, ...]
    seconds: float


class MemberExchange:
    """Searches for exchanges of members.

    Args:
        replicas: all replicas of the plan.
        movable: indices of the replicas whose members may change places.
        spares: peers that may become members.
        may_host: whether a peer's memory holds its stages, given the members from it to the end of its chain.
        most_operations: the budget of the search.
    """

    def __init__(
        self,
        spec: RunSpec,
        survey: Survey,
        replicas: Sequence[Replica],
        movable: Collection[int],
        spares: Sequence[Member],
        may_host: Callable[[Member, int], bool],
        most_operations: int = MOST_OPERATIONS,
        may_be_neighbours: Callable[[Member, Member], bool] = can_be_neighbours,
    ) -> None:
        self._spec, self._survey, self._may_host = spec, survey, cache(may_host)
        self._may_be_neighbours = may_be_neighbours
        self._replicas = {each.index: each for each in replicas}
        self._ks = {each.index: tuple(link.k for link in each.links) for each in replicas}
        self._operations_left, self._timer = most_operations, ChainTimer(spec, survey)
        self._seconds: dict[tuple[tuple[Member, ...], tuple[int, ...]], float] = {}
        self._chains = {each.index: self._timed(each.index, each.members) for each in replicas}
        self._movable = {index: self._chains[index] for index in movable}
        members = [member for chain in self._movable.values() for member in chain.members]
        self._candidates: defaultdict[StageRange, list[Member]] = defaultdict(list)
        for each in sorted([*members, *spares], key=lambda each: (self._seconds_alone(each), each.peer)):
            self._candidates[each.stages].append(each)

    def run(self) -> tuple[list[Replica], list[str]]:
        """The replicas after the exchanges that help, and a sentence that says what changes and why.

        Nothing changes unless the step becomes shorter by `grouping.margin`.
        """
        grouping = self._spec.grouping
        objective = harmonic_mean if grouping.balance else slowest
        made = improve(self._movable, self._moves, objective, margin=_LEAST_GAIN, takes_first=False)
        after = {**self._chains, **self._movable}
        changed = [index for index, chain in after.items() if chain.members != self._chains[index].members]
        if not changed:
            return list(self._replicas.values()), []
        # Where work is shared by speed, count only changed chains: a mean over all would hide their gain.
        counted = changed if grouping.balance else list(after)
        usual = whole_batch(self._spec, len(self._replicas)) / len(self._replicas)
        seconds_before, seconds_after = (
            usual * objective([chains[index].seconds for index in counted])
            for chains in (self._chains, after)
        )
        if seconds_after >= seconds_before * (1 - grouping.margin):
            return list(self._replicas.values()), []
        replicas = dict(self._replicas)
        for index in changed:
            members = after[index].members
            links = links_between(members, self._ks[index])  # another peer may have to dial
            replicas[index] = replace(replicas[index], members=members, links=links)
        step = "their step, at fair shares," if grouping.balance else "the slowest step"
        gain = f"{step} falls from {seconds_before:.3g} s to {seconds_after:.3g} s"
        return list(replicas.values()), [f"{listed([move.description for move in made])}: {gain}"]

    def _moves(self, index: int) -> Iterator[Move[_Chain]]:
        where = {member.peer: i for i, chain in self._movable.items() for member in chain.members}
        for member in self._movable[index].members:
            for other in self._partners(member, index, where):
                if self._operations_left <= 0:
                    return
                self._operations_left -= 1  # also for impossible exchanges, else the search has no bound
                move = self._exchange(index, member, other, where.get(other.peer))
                if move is not None:
                    yield move

    def _exchange(
        self, index: int, member: Member, other: Member, its_index: int | None
    ) -> Move[_Chain] | None:
        """Exchange `member` of chain `index` for `other` of chain `its_index`; None if that is impossible.

        A spare has no `its_index`.
        """
        chain = self._with(index, member, other)
        if chain is None:
            return None
        name, other_name = short(member.peer), short(other.peer)
        if its_index is None:
            return Move({index: chain}, f"{other_name} takes the place of {name} in replica-{index}")
        its_chain = self._with(its_index, other, member)
        if its_chain is None:
            return None
        where = f"between replica-{index} and replica-{its_index}"
        return Move({index: chain, its_index: its_chain}, f"{name} and {other_name} change places {where}")

    def _with(self, index: int, former: Member, newcomer: Member) -> _Chain | None:
        """Chain `index` with `newcomer` in place of `former`; None where memory or endpoints forbid it."""
        members = tuple(newcomer if each == former else each for each in self._movable[index].members)
        # The others were members before, so only the newcomer's memory matters.
        if not self._may_host(newcomer, len(members) - members.index(newcomer)):
            return None
        if not all(self._may_be_neighbours(one, other) for one, other in pairwise(members)):
            return None
        return self._timed(index, members)

    def _partners(self, member: Member, index: int, where: Mapping[PeerId, int]) -> list[Member]:
        """Peers to try in place of `member`, the fastest first: all of them in a small swarm."""
        found = [each for each in self._candidates[member.stages] if where.get(each.peer) != index]
        if len(found) <= 3 * _SAMPLE:
            return found
        others = found[_SAMPLE:-_SAMPLE]
        return [*found[:_SAMPLE], *others[:: -(-len(others) // _SAMPLE)], *found[-_SAMPLE:]]

    def _seconds_alone(self, member: Member) -> float:
        """Seconds per microbatch for computing, or for sending both messages if that is slower."""
        compute = compute_seconds(self._spec, self._survey, member.peer, member.stages)
        uplink = self._survey.capacity(member.peer).uplink
        return max(compute, sum(message_bytes(self._spec, self._spec.link.k)) / uplink if uplink > 0 else 0.0)

    def _timed(self, index: int, members: tuple[Member, ...]) -> _Chain:
        key = (members, self._ks[index])
        if key not in self._seconds:
            # The budget counts replays only; a chain that was timed before is free.
            self._operations_left -= len(members) * min(self._spec.inner.microbatches, COMPARED_MICROBATCHES)
            self._seconds[key] = self._timer.seconds_per_microbatch(*key)
        return _Chain(members, self._seconds[key])
