"""Why a replica cannot train: the causes of each, by what is reserved for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coordinator.placement.rules import is_synced, peer_rests_until, replica_rests_until
from coordinator.run.state.state import State
from protocol.status import Cause, CauseCode
from protocol.types import Lifecycle, PeerId, ReservedAssignment


def obstacles(state: State, from_round: int) -> dict[int, Cause]:
    """By index: why a replica cannot train from `from_round` on. Replicas that can train are left out."""
    reserved = {reservation.slot: reservation for reservation in state.reservations.values()}
    found = {}
    for index in sorted({replica for replica, _ in reserved}):
        causes = []
        for position, stages in enumerate(state.layout(index)):
            holder = reserved.get((index, position))
            if holder is None:
                causes.append(Cause(CauseCode.VACANT, stages=tuple(stages)))
            elif (cause := member_obstacle(state, holder, from_round)) is not None:
                causes.append(cause)
        causes += [link for link in closed_links(state) if link.replicas == (index,)]
        rests = replica_rests_until(state, index)
        if not causes and rests > from_round:
            causes.append(Cause(CauseCode.REPLICA_RESTS, round_number=rests))
        if causes:
            found[index] = Cause(CauseCode.OBSTRUCTED, replicas=(index,), causes=tuple(causes))
    return found


def closed_links(state: State, peer: PeerId | None = None) -> Iterator[Cause]:
    """The links that could not be opened; of `peer`, those whose ends still have the same addresses."""
    for ends, link in state.failed_links.items():
        if peer is None or (peer in ends and not link.is_moved):
            yield Cause(
                CauseCode.LINK_CLOSED,
                peers=ends,
                replicas=(link.replica,),
                address=link.address,
                detail=link.reason,
            )


def member_obstacle(state: State, reservation: ReservedAssignment, from_round: int) -> Cause | None:
    """Why the peer of `reservation` cannot train from `from_round` on; None where it can."""
    peer, rests = state.peers[reservation.peer], peer_rests_until(state, reservation.peer)
    if not peer.is_live:
        code = CauseCode.MEMBER_GONE
    elif peer.lifecycle is Lifecycle.DRAINING:
        code = CauseCode.MEMBER_DRAINS
    elif rests > from_round:
        code = CauseCode.MEMBER_RESTS
    elif not is_synced(state, reservation, from_round):
        code = CauseCode.MEMBER_SYNCS
    else:
        return None
    cause = Cause(code, peers=(peer.peer,), stages=tuple(reservation.stages))
    if code is CauseCode.MEMBER_RESTS:
        return replace(cause, round_number=rests, count=state.failures[peer.peer][0])
    return cause
