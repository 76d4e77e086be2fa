"""Which peer moves to other stages, where a pipeline lacks a member that nobody can stand in for.

A move is costly: the peer has to rebuild and to fetch the state of its new stages. So none is made merely to
be faster, and none where waiting may do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coordinator.placement.eligibility import peer_rests_until
from coordinator.placement.vacancies import Vacancies, Vacancy
from coordinator.state.events import AssignmentReserved
from coordinator.state.state import Peer, State
from coordinator.state.transaction import Transaction
from protocol.spec.run import RunSpec
from protocol.types import PeerId, ReservedAssignment

_MOST_TRIED = 16
"""While nothing trains, it is tried to complete one of so many pipelines, those that lack fewest members."""


def move_spares(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Give spares the places of lost or draining members of pipelines that have trained.

    To be called at the end of a round, when who was lost has had its time to come back. Nobody moves where as
    many spares have those stages already; to stages whose state no live peer has, or away from such; or twice
    within `grouping.settle_rounds` rounds. First move those whose pipeline never trained, of these who joined
    last; then those of a later pipeline that has stood still for as many rounds.
    """
    state, vacancies = transaction.state, Vacancies(transaction.state, spec)
    holes = [
        each
        for each in vacancies.vacant
        if each.replica in state.assigned_replicas and _is_pipeline(state, each)
    ]
    if not holes:
        return
    idle = [(peer, state.reservations[peer.peer]) for peer in state.staying if _is_idle(state, peer)]
    spares, wanted = Counter(place.stages for _, place in idle), Counter(hole.stages for hole in holes)
    hosts = _hosts(state)
    lost_in = _last_losses(state, holes)
    movable = [(peer, place) for peer, place in idle if _has_settled(state, spec, place, lost_in)]
    movable.sort(key=lambda each: (each[1].replica in state.assigned_replicas, -each[0].arrival))
    for hole in holes:
        if spares[hole.stages] >= wanted[hole.stages] or not all(hosts[stage] for stage in hole.stages):
            continue
        for peer, place in movable:
            has_trained = place.replica in state.assigned_replicas
            if has_trained and place.replica <= hole.replica:
                continue
            is_spared = spares[place.stages] > wanted[place.stages]
            if is_spared and not _is_last(state, hosts, place, hole) and vacancies.suits(hole, peer):
                transaction.add(AssignmentReserved(now, hole.given_to(place.peer)))
                movable.remove((peer, place))
                spares[place.stages] -= 1
                wanted[hole.stages] -= 1
                wanted[place.stages] += has_trained
                hosts, vacancies = _hosts(transaction.state), Vacancies(transaction.state, spec)
                break


def complete_a_pipeline(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """While nothing trains: give one pipeline all members that it lacks, whoever is there and wherever it is.

    No round ends meanwhile, so nobody is given time to come back, to settle or to rest. But nobody moves
    where the members of some replica are all there, and only have to catch up; where the state of some stage
    is with no live peer; or away from such. Of the pipelines that lack fewest, the one for which fewest peers
    have to move to other stages.
    """
    state = transaction.state
    hosts = _hosts(state)
    if not all(hosts[stage] for stage in range(state.stages)):
        return
    lacking: dict[int, list[Vacancy]] = {replica: [] for replica in state.layouts}
    for hole in Vacancies(state, spec).vacant:
        lacking[hole.replica].append(hole)
    if not all(lacking.values()):
        return
    pipelines = [replica for replica in lacking if len(state.layout(replica)) > 1]
    pipelines.sort(
        key=lambda replica: (len(lacking[replica]), replica not in state.assigned_replicas, replica)
    )
    ways = [_filling(state, spec, lacking[replica]) for replica in pipelines[:_MOST_TRIED]]
    possible = [places for places in ways if places is not None]
    for place in min(possible, key=lambda places: _moves(state, places), default=[]):
        transaction.add(AssignmentReserved(now, place))


def _filling(state: State, spec: RunSpec, holes: Sequence[Vacancy]) -> list[ReservedAssignment] | None:
    """The places that members of other pipelines get so that all `holes` of one are filled; None if not all.

    Into each comes, where there is one, somebody with its stages, else of those who never trained who came
    last.
    """
    trial = Transaction(state)
    found = []
    for hole in holes:
        vacancies, hosts = Vacancies(trial.state, spec), _hosts(trial.state)
        others = [
            (
                place.stages != hole.stages,
                place.replica in state.assigned_replicas,
                -peer.arrival,
                peer,
                place,
            )
            for peer in state.staying
            for place in [trial.state.reservations.get(peer.peer)]
            if place is not None and peer.policy.joins_pipelines and place.replica != hole.replica
        ]
        others.sort(key=lambda each: each[:3])
        mover = next(
            (
                peer
                for *_, peer, place in others
                if not _is_last(trial.state, hosts, place, hole) and vacancies.suits(hole, peer)
            ),
            None,
        )
        if mover is None:
            return None
        found.append(hole.given_to(mover.peer))
        trial.add(AssignmentReserved(state.latest_at, found[-1]))
    return found


def _moves(state: State, places: Sequence[ReservedAssignment]) -> int:
    """How many of those who get `places` have other stages now."""
    return sum(place.stages != state.reservations[place.peer].stages for place in places)


def _is_pipeline(state: State, vacancy: Vacancy) -> bool:
    return len(state.layout(vacancy.replica)) > 1


def _is_idle(state: State, peer: Peer) -> bool:
    """Whether `peer` is a stage peer with a place that the newest plan does not need."""
    seated = peer.peer in state.assignments[state.plans[-1].epoch]
    rests = peer_rests_until(state, peer.peer) > state.current_round
    return peer.policy.joins_pipelines and peer.peer in state.reservations and not seated and not rests


def _hosts(state: State) -> Counter[int]:
    """How many live peers have the state of each stage."""
    return Counter(stage for peer in state.reservations for stage in _held(state, peer))


def _held(state: State, peer: PeerId) -> set[int]:
    """The stages of whose state `peer` has some round. Before the first decision everybody has them all."""
    if not state.peers[peer].is_live:
        return set()
    place = state.reservations[peer]
    if state.rounds_decided == 0:
        return set(range(state.stages))
    return {stage for stage in place.stages if stage in state.synced.get(peer, {})}


def _is_last(state: State, hosts: Counter[int], place: ReservedAssignment, hole: Vacancy) -> bool:
    """Whether nobody else would have a stage any more that the peer of `place` would leave for `hole`."""
    held = _held(state, place.peer)
    left = set(place.stages) - set(hole.stages)
    return any(hosts[stage] <= (stage in held) for stage in left)


def _last_losses(state: State, holes: list[Vacancy]) -> dict[int, int]:
    """By replica that lacks members: the round in which it lost the last one."""
    missing = {hole.where for hole in holes}
    found = {hole.replica: 0 for hole in holes}
    for place in state.reservations.values():
        if place.slot in missing:
            lost_in = state.failures.get(place.peer, (0, 0))[1]
            found[place.replica] = max(found[place.replica], lost_in)
    return found


def _has_settled(state: State, spec: RunSpec, place: ReservedAssignment, lost_in: dict[int, int]) -> bool:
    """Whether its last move is long ago, and so is the loss for which its pipeline trains no more, if any."""
    settled = state.current_round - spec.grouping.settle_rounds
    if state.moved_at.get(place.peer, settled) > settled:
        return False
    return (
        place.replica not in state.assigned_replicas
        or lost_in.get(place.replica, state.current_round) <= settled
    )
