"""Which place is kept for whom: a peer that comes while the run goes on, or comes back, gets one at once.

A place is a position in a replica. Whoever has it follows the rounds of its stages, and the replica trains as
soon as peers that have caught up fill all of it (coordinator.placement.replan). The layout of a replica, the stages
of each position, never changes; a new pipeline gets the one that most pipelines have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from coordinator.placement.eligibility import can_be_neighbours, fits
from coordinator.state.events import AssignmentReserved
from coordinator.state.state import Peer, State
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec
from protocol.types import PeerId, ReservedAssignment, StageRange

Where = tuple[int, int]
"""Replica and position."""


@dataclass(frozen=True)
class Vacancy:
    """A place that can be given to somebody. `is_left` while its peer is still there, but drains."""

    replica: int
    position: int
    stages: StageRange
    is_left: bool = False

    @property
    def where(self) -> Where:
        return self.replica, self.position

    def given_to(self, peer: PeerId) -> ReservedAssignment:
        return ReservedAssignment(peer, self.replica, self.position, self.stages)


def reserve_assignments(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Give every live peer without a place one that fits it, the earliest first. The others stay spares."""
    spares = [each for each in transaction.state.peers.values() if is_spare(transaction.state, each)]
    if not spares:
        return
    vacancies = Vacancies(transaction.state, spec)
    for peer in sorted(spares, key=lambda each: each.arrival):
        place = vacancies.reservation_for(peer)
        if place is not None:
            transaction.add(AssignmentReserved(now, place))
            vacancies.give(place)


def is_spare(state: State, peer: Peer) -> bool:
    """Whether `peer` waits until a place for it opens."""
    return peer.is_staying and peer.peer not in state.reservations


class Vacancies:
    """Who has which place of `state`, and which are vacant; :meth:`give` keeps it up to date.

    `vacant` are the places in existing replicas that nobody has had yet, or whose peer is gone; then those
    left, each by replica and position.
    """

    def __init__(self, state: State, spec: RunSpec) -> None:
        self._state, self._spec = state, spec
        self._layouts = dict(state.layouts)
        self._holders = {place.slot: place.peer for place in state.reservations.values()}
        open_places = [
            Vacancy(replica, position, stages, is_left)
            for replica, layout in self._layouts.items()
            for position, stages in enumerate(layout)
            for is_left in self._how_vacant((replica, position))
        ]
        self.vacant = sorted(open_places, key=_order)

    def _how_vacant(self, where: Where) -> tuple[bool, ...]:
        """`is_left` of the vacancy there; nothing where there is none."""
        if where not in self._holders:
            return (False,)
        holder = self._state.peers[self._holders[where]]
        if not holder.is_live:
            return () if holder.finished else (False,)
        return () if holder.is_staying else (True,)

    def reservation_for(
        self, peer: Peer, former: ReservedAssignment | None = None
    ) -> ReservedAssignment | None:
        """The place for `peer`, which has none; None where it fits nowhere.

        Its `former` one if that is still free, whatever its memory is by now. Else the lowest vacant one of
        its role that its memory and its neighbours allow, those of draining peers last. Else a full replica
        founds a new replica, and a stage peer a new pipeline, unless there are more pipelines that were in no
        plan and are not full than pipelines that were in one.
        """
        is_alone = peer.policy.is_alone(self._spec)
        vacant = [each for each in self.vacant if (len(self._layouts[each.replica]) == 1) == is_alone]
        if former is not None and any(
            each.given_to(peer.peer) == former and self.can_connect(each, peer) for each in vacant
        ):
            return former
        has_room = cache(lambda stages, left: fits(self._state, self._spec, peer.peer, stages, left))
        for each in vacant:
            left = len(self._layouts[each.replica]) - each.position
            if has_room(each.stages, left) and self.can_connect(each, peer):
                return each.given_to(peer.peer)
        seated = self._state.assigned_replicas
        unseated = {each.replica for each in vacant} - seated
        if not is_alone and len(unseated) > sum(len(self._layouts[index]) > 1 for index in seated):
            return None
        founded = 1 + max(self._layouts)
        layout = self._founded_by(peer, founded)
        new = [Vacancy(founded, position, stages) for position, stages in enumerate(layout)]
        found = (each for each in new if has_room(each.stages, len(layout) - each.position))
        return next((each.given_to(peer.peer) for each in found), None)

    def _founded_by(self, peer: Peer, replica: int) -> tuple[StageRange, ...]:
        is_alone = peer.policy.is_alone(self._spec)
        return (StageRange(0, self._spec.swarm.stages),) if is_alone else self._state.layout(replica)

    def give(self, place: ReservedAssignment) -> None:
        """`place` is its peer's from now on."""
        where = place.slot
        vacant = [each for each in self.vacant if each.where != where]
        if place.replica not in self._layouts:
            layout = self._founded_by(self._state.peers[place.peer], place.replica)
            self._layouts[place.replica] = layout
            others = [Vacancy(place.replica, position, stages) for position, stages in enumerate(layout)]
            vacant += [each for each in others if each.where != where]
        self._holders[where] = place.peer
        self.vacant = sorted(vacant, key=_order)

    def suits(self, vacancy: Vacancy, peer: Peer) -> bool:
        """Whether the memory of `peer` allows it, and of it and each neighbour one accepts connections."""
        left = len(self._layouts[vacancy.replica]) - vacancy.position
        has_room = fits(self._state, self._spec, peer.peer, vacancy.stages, left)
        return has_room and self.can_connect(vacancy, peer)

    def can_connect(self, vacancy: Vacancy, peer: Peer) -> bool:
        beside = ((vacancy.replica, vacancy.position + by) for by in (-1, 1))
        neighbours = [self._state.peers[self._holders[where]] for where in beside if where in self._holders]
        return all(can_be_neighbours(peer, each) for each in neighbours if each.is_staying)


def _order(vacancy: Vacancy) -> tuple[bool, int, int]:
    return vacancy.is_left, vacancy.replica, vacancy.position
