"""Reserves assignments: for peers that join or come back, and for peers that move to other stages.

An assignment is a position in a replica. The peer follows the rounds of its stages. The replica trains when
peers that have caught up fill all of its positions (coordinator.placement.replan). The layout of a replica,
which is the stages of each position, never changes. A new pipeline gets the layout that most pipelines have.

Nobody keeps a place by heartbeats alone: a peer that has attested nothing for long, or that must not be next
to its neighbour, gives way to one that waits.

A move to other stages is costly: the peer rebuilds its model and fetches the state of its new stages. So no
peer moves only to make a step faster, or where it may be enough to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from coordinator.base.phrases import stages_of
from coordinator.placement.rules import (
    apart_until,
    fits,
    is_overdue,
    may_be_neighbours,
    memory_for,
    neighbour_obstacle,
    peer_rests_until,
)
from coordinator.run.state.events import AssignmentReserved
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.types import PeerId, ReservedAssignment, StageRange

Vacancy = ReservedAssignment
"""An assignment that can be reserved; its `peer` is the one that has it and gives way, or ""."""
_MOST_TRIED = 16
"""While nothing trains, at most this many pipelines are tried: those that lack the fewest members."""


def reserve_assignments(transaction: Transaction) -> None:
    """Reserve an assignment for each spare that fits one, in order of arrival. The others stay spares."""
    state = transaction.state
    spares = [each for each in state.peers.values() if is_spare(state, each)]
    if not spares:
        return
    vacancies = Vacancies(state, transaction.now)
    # Who has lost a reservation by doing nothing comes after those that have not.
    for peer in sorted(spares, key=lambda each: (state.failures.get(each.peer, (0, 0))[0], each.arrival)):
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
            peers that drain or give way; both in order of replica and position.

    Args:
        now: the time at which reservations end; by default that of the newest event.
    """

    def __init__(self, state: State, now: float | None = None) -> None:
        self._state, self._spec, self._now = state, state.spec, state.latest_at if now is None else now
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
            gives_way = drains or (holder is not None and self._gives_way(holder, replica, position))
            if holder is None or holder.is_lost or gives_way:
                yield Vacancy(peer if peer and gives_way else PeerId(""), replica, position, stages)

    def _gives_way(self, holder: Peer, replica: int, position: int) -> bool:
        """Whether a peer that stays would keep others from training at its position."""
        if len(self._layouts[replica]) == 1 or self._is_assigned(holder):
            return False
        before = self._holders.get((replica, position - 1))
        is_parted = before is not None and apart_until(self._state, self._state.peers[before], holder) > 0
        return is_parted or self._is_overdue(holder)

    def _is_assigned(self, peer: Peer) -> bool:
        return bool(self._state.plans) and peer.peer in self._state.assignments[self._state.plans[-1].epoch]

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
            replace(each, peer=peer.peer) == former and self._can_connect(each, peer) for each in vacant
        ):
            return former
        for each in vacant:
            if self.suits(each, peer):
                return replace(each, peer=peer.peer)
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
            layout = self._founded_by(peer, 1 + max(self._layouts))
            # The end of a pipeline needs the fewest microbatches.
            found.append(f"a new pipeline: {self._memory(peer, layout[-1], 1)}")
        return found

    def _obstacle(self, vacancy: Vacancy, peer: Peer) -> str:
        """Why `peer` does not suit `vacancy`; "" if it does."""
        left = len(self._layouts[vacancy.replica]) - vacancy.position
        if not self._fits(peer.peer, vacancy.stages, left):
            return self._memory(peer, vacancy.stages, left)
        for each in self._neighbours(vacancy):
            if why := neighbour_obstacle(self._state, peer, each):
                return why
        return ""

    def _memory(self, peer: Peer, stages: StageRange, members_left: int) -> str:
        needed, budget = memory_for(self._state, peer.peer, stages, members_left)
        may = f"{budget / 1e6:,.1f} MB of its memory may be used"
        noun = "stage" if len(stages) == 1 else "stages"
        return f"{noun} {stages} would need {needed / 1e6:,.1f} MB, and {may}"

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
        # A neighbour that is gone, drains or does not follow will be replaced.
        return [each for each in neighbours if each.is_staying and not self._is_overdue(each)]

    def _is_overdue(self, peer: Peer) -> bool:
        return not self._is_assigned(peer) and is_overdue(self._state, peer, self._now)


def _order(vacancy: Vacancy) -> tuple[bool, tuple[int, int]]:
    return bool(vacancy.peer), vacancy.slot


def move_spares(transaction: Transaction) -> None:
    """Reserve the assignments of lost or draining members of pipelines that have trained for spares.

    Called at the end of a round, when lost peers have had time to come back. A spare does not move if enough
    spares with the wanted stages exist, nor to stages whose state no live peer has, nor away from stages
    whose state no other live peer has, nor twice within SETTLE_ROUNDS rounds.

    Spares whose pipeline never trained move first, in reverse order of arrival. Then spares of a later
    pipeline move, if it has not trained for SETTLE_ROUNDS rounds.
    """
    state, now = transaction.state, transaction.now
    trained = state.assigned_replicas
    vacant = [each for each in Vacancies(state, now).vacant if len(state.layout(each.replica)) > 1]
    holes = [each for each in vacant if each.replica in trained]
    if not vacant:
        return
    idle = [state.reservations[peer.peer] for peer in state.staying if _is_idle(state, peer, now)]
    spares = Counter(former.stages for former in idle)
    wanted = Counter(hole.stages for hole in holes)
    lost_in = _last_losses(state, holes)
    movable = [former for former in idle if _moved_long_ago(state, former, lost_in)]
    for hole in holes:
        hosts = _hosts(transaction.state)
        if spares[hole.stages] >= wanted[hole.stages] or not all(hosts[stage] for stage in hole.stages):
            continue
        candidates = [
            former
            for former in movable
            # A pipeline gives members only to earlier ones, so that two do not exchange them forever.
            if (former.replica not in trained or former.replica > hole.replica)
            # A spare whose stages are wanted as much elsewhere would only move the hole.
            and spares[former.stages] > wanted[former.stages]
        ]
        former = _first_fitting(transaction.state, hole, candidates, now)
        if former is not None:
            transaction.add(AssignmentReserved(transaction.now, replace(hole, peer=former.peer)))
            movable.remove(former)
            spares[former.stages] -= 1
            wanted[hole.stages] -= 1
            wanted[former.stages] += former.replica in trained  # the peer leaves a hole in its old pipeline
    _join_waiting(transaction, [each for each in vacant if each.replica not in trained])


def _join_waiting(transaction: Transaction, vacant: Sequence[Vacancy]) -> None:
    """Fill the first possible of the pipelines that never trained with members of later ones.

    All of these have `vacant` positions. Without that, each would wait for another newcomer.
    """
    holes = dict[int, list[Vacancy]]()
    for hole in vacant:
        holes.setdefault(hole.replica, []).append(hole)
    state, settled = transaction.state, transaction.state.current_round - SETTLE_ROUNDS
    for replica in sorted(holes)[:_MOST_TRIED]:
        donors = (each for each in state.reservations.values() if each.replica in holes)
        movable = {each.peer for each in donors if each.replica > replica}
        movable = {peer for peer in movable if state.moved_at.get(peer, 0) <= settled}
        for reservation in _filling(state, holes[replica], transaction.now, movable) or ():
            transaction.add(AssignmentReserved(transaction.now, reservation))
        if transaction.state is not state:
            return


def complete_a_pipeline(transaction: Transaction) -> None:
    """While nothing trains: fill one pipeline with peers of other replicas, whatever their stages are.

    No round ends in this time, so peers get no time to come back, to settle or to rest. No peer moves if some
    replica has all its members, which only have to catch up, or if no live peer has the state of some stage.
    The members of a stranger's replica do not end the wait, since its payloads do not count.
    Of the pipelines that lack the fewest members, the one is filled for which the fewest peers move to other
    stages.
    """
    state, hosts, now = transaction.state, _hosts(transaction.state), transaction.now
    if not all(hosts[stage] for stage in range(state.stages)):
        return
    holes: dict[int, list[Vacancy]] = {replica: [] for replica in state.layouts}
    for hole in Vacancies(state, now).vacant:
        holes[hole.replica].append(hole)
    of_strangers = {each.replica for each in state.reservations.values() if state.is_unproven(each.peer)}
    if not all(vacant or replica in of_strangers for replica, vacant in holes.items()):
        return
    pipelines = [replica for replica, vacant in holes.items() if vacant and len(state.layout(replica)) > 1]
    pipelines.sort(key=lambda replica: (len(holes[replica]), replica not in state.assigned_replicas, replica))
    fillings = [_filling(state, holes[replica], now) for replica in pipelines[:_MOST_TRIED]]

    def moves(filling: Sequence[ReservedAssignment]) -> int:
        return sum(each.stages != state.reservations[each.peer].stages for each in filling)

    possible = [filling for filling in fillings if filling is not None]
    # Of equal fillings, min takes the first, whose pipeline lacks the fewest members.
    for reservation in min(possible, key=moves, default=[]):
        transaction.add(AssignmentReserved(transaction.now, reservation))


def _filling(
    state: State, holes: Sequence[Vacancy], now: float, movable: Collection[PeerId] | None = None
) -> list[ReservedAssignment] | None:
    """Reservations for `movable` peers of other replicas (None: any) that fill all `holes` of one.

    None if that is not possible.
    """
    # Each reservation changes which peers and neighbours the next hole can have.
    trial = Transaction(state, now)
    found = []
    for hole in holes:
        reservations = [
            trial.state.reservations.get(peer.peer)
            for peer in state.staying
            if peer.policy.joins_pipelines and not is_overdue(state, peer, now)
            if movable is None or peer.peer in movable
        ]
        others = [each for each in reservations if each is not None and each.replica != hole.replica]
        former = _first_fitting(trial.state, hole, others, now)
        if former is None:
            return None
        found.append(replace(hole, peer=former.peer))
        trial.add(AssignmentReserved(trial.now, found[-1]))
    return found


def _first_fitting(
    state: State, hole: Vacancy, candidates: Sequence[ReservedAssignment], now: float
) -> ReservedAssignment | None:
    """The present reservation of the peer that should move to `hole`; None if no peer can.

    Peers with the same stages come first, then those whose replica never trained, then the last to join.
    """
    vacancies, hosts = Vacancies(state, now), _hosts(state)

    def order(former: ReservedAssignment) -> tuple[bool, bool, int]:
        has_trained = former.replica in state.assigned_replicas
        return former.stages != hole.stages, has_trained, -state.peers[former.peer].arrival

    def may_move(former: ReservedAssignment) -> bool:
        suits = vacancies.suits(hole, state.peers[former.peer])
        return suits and not _is_last_host(state, hosts, former, hole)

    return next(filter(may_move, sorted(candidates, key=order)), None)


def _is_idle(state: State, peer: Peer, now: float) -> bool:
    """Whether `peer` is a rested stage peer that follows and that the newest plan does not need."""
    is_assigned = peer.peer in state.assignments[state.plans[-1].epoch]
    rests = peer_rests_until(state, peer.peer) > state.current_round or is_overdue(state, peer, now)
    return peer.policy.joins_pipelines and peer.peer in state.reservations and not is_assigned and not rests


def _hosts(state: State) -> Counter[int]:
    """How many live peers have the state of each stage."""
    return Counter(stage for peer in state.reservations for stage in _hosted(state, peer))


def _hosted(state: State, peer: PeerId) -> set[int]:
    """The stages whose state `peer` has after any round."""
    if not state.peers[peer].is_live:
        return set()
    if state.rounds_decided == 0:
        return set(range(state.stages))  # each peer can compute the initial state from the seed
    return {stage for stage in state.reservations[peer].stages if stage in state.synced.get(peer, {})}


def _is_last_host(state: State, hosts: Counter[int], former: ReservedAssignment, hole: Vacancy) -> bool:
    """Whether the peer of `former` would leave a stage that no other live peer has if it moved to `hole`."""
    hosted = _hosted(state, former.peer)
    # `hosts` counts the peer itself where it has the state.
    return any(hosts[stage] <= (stage in hosted) for stage in set(former.stages) - set(hole.stages))


def _last_losses(state: State, holes: Sequence[Vacancy]) -> dict[int, int]:
    """The round in which each replica with `holes` lost its last member."""
    slots = {hole.slot for hole in holes}
    found = {hole.replica: 0 for hole in holes}
    for reservation in state.reservations.values():
        if reservation.slot in slots:
            _, lost_in = state.failures.get(reservation.peer, (0, 0))
            found[reservation.replica] = max(found[reservation.replica], lost_in)
    return found


def _moved_long_ago(state: State, reservation: ReservedAssignment, lost_in: Mapping[int, int]) -> bool:
    """Whether the peer moved long ago, and its pipeline, if it has trained, lost its last member long ago."""
    settled = state.current_round - SETTLE_ROUNDS
    has_trained = reservation.replica in state.assigned_replicas
    has_lost = has_trained and lost_in.get(reservation.replica, state.current_round) > settled
    return state.moved_at.get(reservation.peer, settled) <= settled and not has_lost
