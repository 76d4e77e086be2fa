"""Reserves assignments for peers that join while the run goes on, or come back.

An assignment is a position in a replica. The peer follows the rounds of its stages. The replica trains when
peers that have caught up fill all of its positions (coordinator.placement.replan). The layout of a replica,
which is the stages of each position, never changes. A new pipeline gets the layout that most pipelines have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from coordinator.placement.eligibility import apart_until, fits, may_be_neighbours, memory_for
from coordinator.placement.links import can_be_neighbours
from coordinator.state.events import AssignmentReserved
from coordinator.state.state import Peer, State
from coordinator.state.text import short, stages_of
from coordinator.state.transaction import Transaction
from protocol.types import PeerId, ReservedAssignment, StageRange

Slot = tuple[int, int]
"""Replica and position."""


@dataclass(frozen=True)
class Vacancy:
    """An assignment that can be reserved; `is_left` while the peer that has it drains."""

    replica: int
    position: int
    stages: StageRange
    is_left: bool = False

    @property
    def slot(self) -> Slot:
        return self.replica, self.position

    def reserved_for(self, peer: PeerId) -> ReservedAssignment:
        return ReservedAssignment(peer, self.replica, self.position, self.stages)


def reserve_assignments(transaction: Transaction) -> None:
    """Reserve an assignment for each spare that fits one, in order of arrival. The others stay spares."""
    spares = [each for each in transaction.state.peers.values() if is_spare(transaction.state, each)]
    if not spares:
        return
    vacancies = Vacancies(transaction.state)
    for peer in sorted(spares, key=lambda each: each.arrival):
        reservation = vacancies.reservation_for(peer)
        if reservation is not None:
            transaction.add(AssignmentReserved(transaction.now, reservation))
            vacancies.take(reservation)


def is_spare(state: State, peer: Peer) -> bool:
    """Whether `peer` waits until an assignment can be reserved for it."""
    return peer.is_staying and peer.peer not in state.reservations


class Vacancies:
    """The vacant assignments of `state`; :meth:`take` keeps them up to date.

    Attributes:
        vacant: first assignments in existing replicas that no peer has or whose peer is lost, then those of
            peers that drain; both in order of replica and position.
    """

    def __init__(self, state: State) -> None:
        self._state, self._spec = state, state.spec
        self._layouts = dict(state.layouts)
        self._holders = {each.slot: each.peer for each in state.reservations.values()}
        # Many peers are compared with the same vacancies.
        self._fits = cache(lambda peer, stages, left: fits(state, peer, stages, left))
        self.vacant = sorted(
            (vacancy for replica in self._layouts for vacancy in self._vacant_in(replica)), key=_order
        )

    def _vacant_in(self, replica: int) -> Iterator[Vacancy]:
        for position, stages in enumerate(self._layouts[replica]):
            peer = self._holders.get((replica, position))
            holder = None if peer is None else self._state.peers[peer]
            drains = holder is not None and holder.is_live and not holder.is_staying
            if holder is None or holder.is_lost or drains:
                yield Vacancy(replica, position, stages, is_left=drains)

    def reservation_for(
        self, peer: Peer, former: ReservedAssignment | None = None
    ) -> ReservedAssignment | None:
        """The assignment to reserve for `peer`, which has none; None where it fits nowhere.

        - Its `former` one if that is still vacant; the peer's memory is not compared again.
        - Else the first vacant one of its role that its memory and its neighbours allow.
        - Else one in a new replica, or for a stage peer in a new pipeline. There is no new pipeline while the
          pipelines that wait for their first plan outnumber those that have been in one.
        """
        vacant = self._of_its_role(peer)
        if former is not None and any(
            each.reserved_for(peer.peer) == former and self._can_connect(each, peer) for each in vacant
        ):
            return former
        for each in vacant:
            if self.suits(each, peer):
                return each.reserved_for(peer.peer)
        if self._waiting_pipelines(peer):
            return None
        founded = 1 + max(self._layouts)
        layout = self._founded_by(peer, founded)
        for position, stages in enumerate(layout):
            if self._fits(peer.peer, stages, len(layout) - position):
                return ReservedAssignment(peer.peer, founded, position, stages)
        return None

    def _of_its_role(self, peer: Peer) -> list[Vacancy]:
        is_alone = peer.policy.is_alone(self._spec)
        return [each for each in self.vacant if (len(self._layouts[each.replica]) == 1) == is_alone]

    def _waiting_pipelines(self, peer: Peer) -> int:
        """The pipelines that wait for their first plan, if they keep `peer` from founding another; else 0."""
        # Without this bound, peers that do not fit together would found one pipeline each.
        assigned = self._state.assigned_replicas
        waiting = {each.replica for each in self._of_its_role(peer)} - assigned
        is_bound = not peer.policy.is_alone(self._spec)
        trained = sum(len(self._layouts[index]) > 1 for index in assigned)
        return len(waiting) if is_bound and len(waiting) > trained else 0

    def obstacles(self, peer: Peer) -> list[str]:
        """Why nothing can be reserved for `peer`: a phrase for each vacancy, and for a new pipeline.

        Empty if there is something to reserve.
        """
        if self.reservation_for(peer) is not None:
            return []
        found = [
            f"the vacancy at {stages_of(each)} of replica-{each.replica}: {self._obstacle(each, peer)}"
            for each in self._of_its_role(peer)
        ]
        if waiting := self._waiting_pipelines(peer):
            have = "pipeline waits" if waiting == 1 else "pipelines wait"
            found.append(f"a new pipeline: {waiting} {have} already for the peers that they lack")
        else:
            founded = 1 + max(self._layouts)
            layout = self._founded_by(peer, founded)
            new = (Vacancy(founded, at, stages) for at, stages in enumerate(layout))
            why = [self._memory(peer, each, len(layout) - each.position) for each in new]
            found += [f"a new pipeline: {each}" for each in why[-1:]]  # its end needs the fewest microbatches
        return found

    def _obstacle(self, vacancy: Vacancy, peer: Peer) -> str:
        """Why `peer` does not suit `vacancy`; "" if it does."""
        left = len(self._layouts[vacancy.replica]) - vacancy.position
        if not self._fits(peer.peer, vacancy.stages, left):
            return self._memory(peer, vacancy, left)
        for each in self._neighbours(vacancy):
            if not can_be_neighbours(peer, each):
                return f"neither it nor its neighbour {short(each.peer)} has an endpoint"
            if until := apart_until(self._state, peer, each):
                return f"its link to {short(each.peer)} has failed; it is tried again from round {until} on"
        return ""

    def _memory(self, peer: Peer, vacancy: Vacancy, members_left: int) -> str:
        needed, budget = memory_for(self._state, peer.peer, vacancy.stages, members_left)
        may = f"{budget / 1e6:,.1f} MB of its memory may be used"
        return f"{stages_of(vacancy)} would need {needed / 1e6:,.1f} MB, and {may}"

    def _founded_by(self, peer: Peer, replica: int) -> tuple[StageRange, ...]:
        is_alone = peer.policy.is_alone(self._spec)
        return (StageRange(0, self._spec.swarm.stages),) if is_alone else self._state.layout(replica)

    def take(self, reservation: ReservedAssignment) -> None:
        """Make `reservation` not vacant; if it founds a replica, the other positions become vacant."""
        replica = reservation.replica
        if replica not in self._layouts:
            self._layouts[replica] = self._founded_by(self._state.peers[reservation.peer], replica)
            self.vacant += self._vacant_in(replica)
        self._holders[reservation.slot] = reservation.peer
        self.vacant = sorted((each for each in self.vacant if each.slot != reservation.slot), key=_order)

    def suits(self, vacancy: Vacancy, peer: Peer) -> bool:
        """Whether the memory of `peer` allows `vacancy`, and the peer can connect to both neighbours."""
        # The nearer to the start of the chain, the more microbatches are in flight.
        left = len(self._layouts[vacancy.replica]) - vacancy.position
        return self._fits(peer.peer, vacancy.stages, left) and self._can_connect(vacancy, peer)

    def _can_connect(self, vacancy: Vacancy, peer: Peer) -> bool:
        return all(may_be_neighbours(self._state, peer, each) for each in self._neighbours(vacancy))

    def _neighbours(self, vacancy: Vacancy) -> list[Peer]:
        slots = ((vacancy.replica, vacancy.position + by) for by in (-1, 1))
        neighbours = [self._state.peers[self._holders[slot]] for slot in slots if slot in self._holders]
        # A neighbour that is gone or drains will be replaced.
        return [each for each in neighbours if each.is_staying]


def _order(vacancy: Vacancy) -> tuple[bool, Slot]:
    return vacancy.is_left, vacancy.slot
