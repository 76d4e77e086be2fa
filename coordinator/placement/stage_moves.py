"""Which peer moves to other stages, where a pipeline lacks a member that no spare can replace.

A move is costly: the peer has to rebuild its model and to fetch the state of its new stages. So no peer moves
merely to make a step faster, or where waiting may be enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.placement.eligibility import peer_rests_until
from coordinator.placement.vacancies import Vacancies, Vacancy
from coordinator.state.events import AssignmentReserved
from coordinator.state.state import Peer, State
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec
from protocol.types import PeerId, ReservedAssignment

_MOST_TRIED = 16
"""While nothing trains, this many pipelines are tried, those that lack the fewest members."""


def move_spares(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Reserve the assignments of lost or draining members of pipelines that have trained for spares.

    To be called at the end of a round, when lost peers have had time to come back. A spare does not move

    - if as many spares with the wanted stages are there;
    - to stages whose state no live peer has, or away from stages whose state no other live peer has;
    - twice within `grouping.settle_rounds` rounds.

    Spares whose pipeline never trained move first, the last to join before others; then those of a later
    pipeline that has not trained for `grouping.settle_rounds` rounds.
    """
    state, vacancies = transaction.state, Vacancies(transaction.state, spec)
    holes = [
        each
        for each in vacancies.vacant
        if each.replica in state.assigned_replicas and len(state.layout(each.replica)) > 1
    ]
    if not holes:
        return
    idle = [(peer, state.reservations[peer.peer]) for peer in state.staying if _is_idle(state, peer)]
    spares = Counter(reservation.stages for _, reservation in idle)
    wanted = Counter(hole.stages for hole in holes)
    hosts = _hosts(state)
    lost_in = _last_losses(state, holes)
    movable = [each for each in idle if _has_settled(state, spec, each[1], lost_in)]
    movable.sort(key=lambda each: (each[1].replica in state.assigned_replicas, -each[0].arrival))
    for hole in holes:
        if spares[hole.stages] >= wanted[hole.stages] or not all(hosts[stage] for stage in hole.stages):
            continue
        for peer, former in movable:
            has_trained = former.replica in state.assigned_replicas
            if has_trained and former.replica <= hole.replica:
                continue
            is_spared = spares[former.stages] > wanted[former.stages]
            if is_spared and not _is_last_host(state, hosts, former, hole) and vacancies.suits(hole, peer):
                transaction.add(AssignmentReserved(now, hole.reserved_for(peer.peer)))
                movable.remove((peer, former))
                spares[former.stages] -= 1
                wanted[hole.stages] -= 1
                wanted[former.stages] += has_trained
                hosts, vacancies = _hosts(transaction.state), Vacancies(transaction.state, spec)
                break


def complete_a_pipeline(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """While nothing trains: fill one pipeline with peers of others, whatever their stages are.

    No round ends meanwhile, so peers are given no time to come back, to settle or to rest. But none moves if
    some replica has all its members, which only have to catch up; or if no live peer has the state of some
    stage. Of the pipelines that lack the fewest members, the one is filled for which the fewest peers have to
    move to other stages.
    """
    state = transaction.state
    hosts = _hosts(state)
    if not all(hosts[stage] for stage in range(state.stages)):
        return
    holes: dict[int, list[Vacancy]] = {replica: [] for replica in state.layouts}
    for hole in Vacancies(state, spec).vacant:
        holes[hole.replica].append(hole)
    if not all(holes.values()):
        return
    pipelines = [replica for replica in holes if len(state.layout(replica)) > 1]
    pipelines.sort(key=lambda replica: (len(holes[replica]), replica not in state.assigned_replicas, replica))
    fillings = [_filling(state, spec, holes[replica]) for replica in pipelines[:_MOST_TRIED]]

    def moves(filling: Sequence[ReservedAssignment]) -> int:
        return sum(each.stages != state.reservations[each.peer].stages for each in filling)

    possible = [filling for filling in fillings if filling is not None]
    for reservation in min(possible, key=moves, default=[]):
        transaction.add(AssignmentReserved(now, reservation))


def _filling(state: State, spec: RunSpec, holes: Sequence[Vacancy]) -> list[ReservedAssignment] | None:
    """Reservations for peers of other replicas that fill all `holes` of one; None if that is not possible."""
    trial = Transaction(state)
    found = []
    for hole in holes:
        vacancies, hosts = Vacancies(trial.state, spec), _hosts(trial.state)
        candidates = [
            (peer, former)
            for peer in state.staying
            for former in [trial.state.reservations.get(peer.peer)]
            if peer.policy.joins_pipelines and former is not None and former.replica != hole.replica
        ]
        # Peers with the same stages first, then those whose replica never trained, the last to join first.
        candidates.sort(
            key=lambda each: (
                each[1].stages != hole.stages,
                each[1].replica in state.assigned_replicas,
                -each[0].arrival,
            )
        )
        suitable = (
            hole.reserved_for(peer.peer)
            for peer, former in candidates
            if not _is_last_host(trial.state, hosts, former, hole) and vacancies.suits(hole, peer)
        )
        reservation = next(suitable, None)
        if reservation is None:
            return None
        found.append(reservation)
        trial.add(AssignmentReserved(state.latest_at, reservation))
    return found


def _is_idle(state: State, peer: Peer) -> bool:
    """Whether `peer` is a stage peer with a reservation that the newest plan does not need."""
    is_assigned = peer.peer in state.assignments[state.plans[-1].epoch]
    rests = peer_rests_until(state, peer.peer) > state.current_round
    return peer.policy.joins_pipelines and peer.peer in state.reservations and not is_assigned and not rests


def _hosts(state: State) -> Counter[int]:
    """How many live peers have the state of each stage."""
    return Counter(stage for peer in state.reservations for stage in _hosted(state, peer))


def _hosted(state: State, peer: PeerId) -> set[int]:
    """The stages of whose state `peer` has some round; before the first decision all peers have all stages."""
    if not state.peers[peer].is_live:
        return set()
    if state.rounds_decided == 0:
        return set(range(state.stages))
    return {stage for stage in state.reservations[peer].stages if stage in state.synced.get(peer, {})}


def _is_last_host(state: State, hosts: Counter[int], former: ReservedAssignment, hole: Vacancy) -> bool:
    """Whether the peer of `former`, if it moves to `hole`, leaves a stage that no other live peer has."""
    hosted = _hosted(state, former.peer)
    return any(hosts[stage] <= (stage in hosted) for stage in set(former.stages) - set(hole.stages))


def _last_losses(state: State, holes: Sequence[Vacancy]) -> dict[int, int]:
    """By replica that lacks members: the round in which it lost the last one."""
    slots = {hole.slot for hole in holes}
    found = {hole.replica: 0 for hole in holes}
    for reservation in state.reservations.values():
        if reservation.slot in slots:
            _, lost_in = state.failures.get(reservation.peer, (0, 0))
            found[reservation.replica] = max(found[reservation.replica], lost_in)
    return found


def _has_settled(
    state: State, spec: RunSpec, reservation: ReservedAssignment, lost_in: Mapping[int, int]
) -> bool:
    """Whether the peer moved long ago, and its pipeline, if it has trained, lost its last member long ago."""
    settled = state.current_round - spec.grouping.settle_rounds
    if state.moved_at.get(reservation.peer, settled) > settled:
        return False
    if reservation.replica not in state.assigned_replicas:
        return True
    return lost_in.get(reservation.replica, state.current_round) <= settled
