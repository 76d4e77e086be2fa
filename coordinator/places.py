"""Which place is kept for whom: a peer that comes while the run goes on, or comes back, gets one at once.

A place is a position in a replica. Whoever has it follows the rounds of its stages, and the replica trains as
soon as peers that have caught up fill all of it (coordinator.regrouping). The layout of a replica, the stages
of each position, never changes; a new pipeline gets the one that most pipelines have.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.events import PlaceGiven
from coordinator.history import Draft
from coordinator.readiness import can_be_neighbours, fits
from coordinator.state import Peer, State
from protocol.spec import RunSpec
from protocol.types import PeerId, Place, Role, StageRange


@dataclass(frozen=True)
class Vacancy:
    """A place that can be given to somebody. `is_left` while its peer is still there, but drains."""

    replica: int
    position: int
    stages: StageRange
    is_left: bool = False

    def given_to(self, peer: PeerId) -> Place:
        return Place(peer, self.replica, self.position, self.stages)


def give_places(draft: Draft, spec: RunSpec, now: float) -> None:
    """Give every live peer without a place one that fits it, the earliest first. The others stay spares."""
    spares = [each for each in draft.state.peers.values() if is_spare(draft.state, each)]
    for peer in sorted(spares, key=lambda each: each.arrival):
        place = place_for(draft.state, spec, peer)
        if place is not None:
            draft.add(PlaceGiven(now, place))


def is_spare(state: State, peer: Peer) -> bool:
    """Whether `peer` waits until a place for it opens."""
    return peer.is_staying and peer.peer not in state.places


def place_for(state: State, spec: RunSpec, peer: Peer, former: Place | None = None) -> Place | None:
    """The place for `peer`, which has none; None where it fits nowhere.

    Its `former` one if that is still free, else the lowest vacant one of its role that its memory and its
    neighbours allow, those of draining peers last. Else a full replica founds a new replica, and a stage peer
    a new pipeline, of which there is never more than one that was in no plan and is not full.
    """
    is_whole = peer.role is Role.REPLICA or spec.swarm.stages == 1
    vacant = [each for each in vacancies(state) if (len(state.layout(each.replica)) == 1) == is_whole]
    suiting = [each.given_to(peer.peer) for each in vacant if suits(state, spec, each, peer)]
    if former in suiting:
        return former
    if suiting:
        return suiting[0]
    if not is_whole and any(each.replica not in state.seated for each in vacant):
        return None
    founded = 1 + max(state.layouts)
    layout = (StageRange(0, spec.swarm.stages),) if is_whole else state.layout(founded)
    new = [Vacancy(founded, position, stages) for position, stages in enumerate(layout)]
    found = (each for each in new if fits(state, spec, peer.peer, each.stages, len(layout) - each.position))
    return next((each.given_to(peer.peer) for each in found), None)


def vacancies(state: State) -> list[Vacancy]:
    """The places in existing replicas that nobody has had yet, or whose peer is gone; then those left."""
    holders = {(place.replica, place.position): place.peer for place in state.places.values()}
    found = []
    for replica, layout in sorted(state.layouts.items()):
        for position, stages in enumerate(layout):
            holder = holders.get((replica, position))
            if holder is None or not state.peers[holder].is_live:
                finished = holder is not None and state.peers[holder].finished
                found += [] if finished else [Vacancy(replica, position, stages)]
            elif not state.peers[holder].is_staying:
                found.append(Vacancy(replica, position, stages, is_left=True))
    return sorted(found, key=lambda vacancy: vacancy.is_left)


def suits(state: State, spec: RunSpec, vacancy: Vacancy, peer: Peer) -> bool:
    """Whether the memory of `peer` allows it, and of it and each neighbour there one accepts connections."""
    layout = state.layout(vacancy.replica)
    beside = (vacancy.position - 1, vacancy.position + 1)
    neighbours = [
        state.peers[place.peer]
        for place in state.places.values()
        if place.replica == vacancy.replica and place.position in beside
    ]
    return fits(state, spec, peer.peer, vacancy.stages, len(layout) - vacancy.position) and all(
        can_be_neighbours(peer, each) for each in neighbours if each.is_staying
    )
