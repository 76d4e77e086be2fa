"""Peers that move to other stages because a pipeline lacks a member that no spare can replace.

A move is costly: the peer rebuilds its model and fetches the state of its new stages. So no peer moves
only to make a step faster, or where it may be enough to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.placement.eligibility import peer_rests_until
from coordinator.placement.vacancies import Vacancies, Vacancy
from coordinator.state.events import AssignmentReserved
from coordinator.state.state import Peer, State
from coordinator.state.transaction import Transaction
from protocol.types import PeerId, ReservedAssignment

_MOST_TRIED = 16
"""While nothing trains, at most this many pipelines are tried: those that lack the fewest members."""


def move_spares(transaction: Transaction) -> None:
    """Reserve the assignments of lost or draining members of pipelines that have trained for spares.

    Called at the end of a round, when lost peers have had time to come back. A spare does not move if enough
    spares with the wanted stages exist, nor to stages whose state no live peer has, nor away from stages
    whose state no other live peer has, nor twice within `grouping.settle_rounds` rounds.

    Spares whose pipeline never trained move first, in reverse order of arrival. Then spares of a later
    pipeline move, if it has not trained for `grouping.settle_rounds` rounds.
    """
    state = transaction.state
    trained = state.assigned_replicas
    vacant = (each for each in Vacancies(state).vacant if each.replica in trained)
    holes = [each for each in vacant if len(state.layout(each.replica)) > 1]
    if not holes:
        return
    idle = [state.reservations[peer.peer] for peer in state.staying if _is_idle(state, peer)]
    spares = Counter(former.stages for former in idle)
    wanted = Counter(hole.stages for hole in holes)
    lost_in = _last_losses(state, holes)
    movable = [former for former in idle if _has_settled(state, former, lost_in)]
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
        former = _first_fitting(transaction.state, hole, candidates)
        if former is not None:
            transaction.add(AssignmentReserved(transaction.now, hole.reserved_for(former.peer)))
            movable.remove(former)
            spares[former.stages] -= 1
            wanted[hole.stages] -= 1
            wanted[former.stages] += former.replica in trained  # the peer leaves a hole in its old pipeline


def complete_a_pipeline(transaction: Transaction) -> None:
    """While nothing trains: fill one pipeline with peers of other replicas, whatever their stages are.

    No round ends in this time, so peers get no time to come back, to settle or to rest. No peer moves if some
    replica has all its members, which only have to catch up, or if no live peer has the state of some stage.
    Of the pipelines that lack the fewest members, the one is filled for which the fewest peers move to other
    stages.
    """
    state, hosts = transaction.state, _hosts(transaction.state)
    if not all(hosts[stage] for stage in range(state.stages)):
        return
    holes: dict[int, list[Vacancy]] = {replica: [] for replica in state.layouts}
    for hole in Vacancies(state).vacant:
        holes[hole.replica].append(hole)
    if not all(holes.values()):
        return
    pipelines = [replica for replica in holes if len(state.layout(replica)) > 1]
    pipelines.sort(key=lambda replica: (len(holes[replica]), replica not in state.assigned_replicas, replica))
    fillings = [_filling(state, holes[replica]) for replica in pipelines[:_MOST_TRIED]]

    def moves(filling: Sequence[ReservedAssignment]) -> int:
        return sum(each.stages != state.reservations[each.peer].stages for each in filling)

    possible = [filling for filling in fillings if filling is not None]
    # Of equal fillings, min takes the first, whose pipeline lacks the fewest members.
    for reservation in min(possible, key=moves, default=[]):
        transaction.add(AssignmentReserved(transaction.now, reservation))


def _filling(state: State, holes: Sequence[Vacancy]) -> list[ReservedAssignment] | None:
    """Reservations for peers of other replicas that fill all `holes` of one; None if that is not possible."""
    # Each reservation changes which peers and neighbours the next hole can have.
    trial = Transaction(state, state.latest_at)
    found = []
    for hole in holes:
        reservations = [
            trial.state.reservations.get(peer.peer) for peer in state.staying if peer.policy.joins_pipelines
        ]
        others = [each for each in reservations if each is not None and each.replica != hole.replica]
        former = _first_fitting(trial.state, hole, others)
        if former is None:
            return None
        found.append(hole.reserved_for(former.peer))
        trial.add(AssignmentReserved(trial.now, found[-1]))
    return found


def _first_fitting(
    state: State, hole: Vacancy, candidates: Sequence[ReservedAssignment]
) -> ReservedAssignment | None:
    """The present reservation of the peer that should move to `hole`; None if no peer can.

    Peers with the same stages come first, then those whose replica never trained, then the last to join.
    """
    vacancies, hosts = Vacancies(state), _hosts(state)

    def order(former: ReservedAssignment) -> tuple[bool, bool, int]:
        has_trained = former.replica in state.assigned_replicas
        return former.stages != hole.stages, has_trained, -state.peers[former.peer].arrival

    def may_move(former: ReservedAssignment) -> bool:
        suits = vacancies.suits(hole, state.peers[former.peer])
        return suits and not _is_last_host(state, hosts, former, hole)

    return next(filter(may_move, sorted(candidates, key=order)), None)


def _is_idle(state: State, peer: Peer) -> bool:
    """Whether `peer` is a rested stage peer with a reservation that the newest plan does not need."""
    is_assigned = peer.peer in state.assignments[state.plans[-1].epoch]
    rests = peer_rests_until(state, peer.peer) > state.current_round
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


def _has_settled(state: State, reservation: ReservedAssignment, lost_in: Mapping[int, int]) -> bool:
    """Whether the peer moved long ago, and its pipeline, if it has trained, lost its last member long ago."""
    settled = state.current_round - state.spec.grouping.settle_rounds
    has_trained = reservation.replica in state.assigned_replicas
    has_lost = has_trained and lost_in.get(reservation.replica, state.current_round) > settled
    return state.moved_at.get(reservation.peer, settled) <= settled and not has_lost
