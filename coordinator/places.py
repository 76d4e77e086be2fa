"""Which place is kept for whom: a peer that comes while the run goes on, or comes back, gets one at once.

A place is a position in a replica. Whoever has it follows the rounds of its stages, and the replica trains as
soon as peers that have caught up fill all of it (coordinator.regrouping).
"""

from __future__ import annotations

from coordinator.events import PlaceGiven
from coordinator.history import Draft
from coordinator.state import Peer, State
from protocol.spec import RunSpec
from protocol.types import PeerId, Place, Role, StageRange

Holders = dict[int, dict[int, PeerId]]
"""By replica and position: who has the place, dead or alive."""


def give_places(draft: Draft, spec: RunSpec, now: float) -> None:
    """Give every live peer without a place one that fits it, the earliest first. The others stay spares."""
    spares = [each for each in draft.state.peers.values() if is_spare(draft.state, each)]
    for peer in sorted(spares, key=lambda each: each.arrival):
        place = place_for(draft.state, spec, peer)
        if place is not None:
            draft.add(PlaceGiven(now, place))


def is_spare(state: State, peer: Peer) -> bool:
    """Whether `peer` waits until a place for it opens."""
    return peer.is_live and peer.peer not in state.places


def place_for(state: State, spec: RunSpec, peer: Peer, former: Place | None = None) -> Place | None:
    """The place for `peer`, which has none; None where it fits nowhere.

    Its `former` one if that is still free, else the lowest vacant one of its role: one whose peer is lost, or
    that nobody has had yet. Else a full replica founds a new replica, and a stage peer a new pipeline, of
    which there is never more than one that was in no plan and is not full.
    """
    holders = holders_of(state)
    is_whole = peer.role is Role.REPLICA or spec.swarm.stages == 1
    if former is not None and (len(former.stages) == spec.swarm.stages) == is_whole:
        where = (former.replica, former.position)
        if _is_vacant(state, holders, *where) and _can_be_linked(state, holders, *where, peer):
            return former
    pipelines = {place.replica for place in state.places.values() if len(place.stages) < spec.swarm.stages}
    positions = range(1 if is_whole else spec.swarm.stages)
    vacant = [
        (replica, position)
        for replica in sorted(holders)
        if (replica in pipelines) != is_whole
        for position in positions
        if _is_vacant(state, holders, replica, position)
    ]
    for replica, position in vacant:
        if _can_be_linked(state, holders, replica, position, peer):
            return _place(spec, peer, replica, position, is_whole)
    if not is_whole and any(replica not in state.seated for replica, _ in vacant):
        return None
    return _place(spec, peer, 1 + max(state.seated | holders.keys()), 0, is_whole)


def holders_of(state: State) -> Holders:
    holders: Holders = {}
    for place in state.places.values():
        holders.setdefault(place.replica, {})[place.position] = place.peer
    return holders


def _is_vacant(state: State, holders: Holders, replica: int, position: int) -> bool:
    holder = holders.get(replica, {}).get(position)
    return holder is None or state.peers[holder].is_lost


def _can_be_linked(state: State, holders: Holders, replica: int, position: int, peer: Peer) -> bool:
    """Whether of `peer` and each of its live neighbours there one accepts connections."""
    chain = holders.get(replica, {})
    beside = (chain.get(position - 1), chain.get(position + 1))
    neighbours = [state.peers[each] for each in beside if each is not None]
    return bool(peer.endpoint) or all(each.endpoint for each in neighbours if each.is_live)


def _place(spec: RunSpec, peer: Peer, replica: int, position: int, is_whole: bool) -> Place:
    stages = StageRange(0, spec.swarm.stages) if is_whole else StageRange(position, position + 1)
    return Place(peer.peer, replica, position, stages)
