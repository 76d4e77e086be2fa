"""What a peer does, and why it does not train."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.known import SLOW, Known, middle
from coordinator.ops.explain.statements import Code, nonfinite, say
from coordinator.placement.reservations import Vacancies, is_spare
from coordinator.placement.rules import closed_links, is_synced, least_synced
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from coordinator.status.causes import peer_cause, run_cause, told_of_rest
from coordinator.status.messages import run_message
from coordinator.store.history_answers import PeerDetail
from coordinator.store.history_tables import Kind
from protocol.group.batch import work_of
from protocol.status import RunPhase, Statement
from protocol.types import Lifecycle, PeerId, Plan

_MOST_VACANCIES = 4
_MOST_LINES = 200
_TOLD = {
    Kind.BANNED: 1,
    Kind.QUARANTINED: 1,
    Kind.LEFT: 1,
    Kind.LOST: 2,
    Kind.RETREATED: 2,
    Kind.DIVERGED: 2,
    Kind.LINK_FAILED: 2,
    Kind.DRAINS: 1,
    Kind.WEIGHED: 2,
    Kind.STRIKE: 16,
    Kind.ROLE: 1,
    Kind.ADDRESSES: 1,
    Kind.JOINED: 1,
}
"""The lines of a peer's journal that an answer tells, the most important kind first, and how many of each."""


def explain_peer(known: Known, peer: PeerId) -> Iterator[Statement]:
    """The title, why it does not train, what has happened to it, and how it compares with others."""
    state, past = known.state, known.history.peer(peer, _MOST_LINES)
    found = state.peers.get(peer)
    if found is None or past is None:
        code = Code.PEER if peer in state.banned else Code.ENROLLED
        yield say(code, peers=(peer,), detail="banned" if peer in state.banned else "")
        return
    yield _title(known, found)
    if peer in state.excluded:
        yield say(Code.REMEDY, detail="excluded")
    elif found.is_live:
        yield from _standing(known, found, past)
    elif not found.finished and state.phase is not RunPhase.FINISHED:
        yield say(Code.REMEDY, detail=_activity(known, found))
    for kind, most in _TOLD.items():
        # A failure from before its last join says nothing of now, but for why it lost its part of the plan.
        lines = [each for each in past.changes if each.kind is kind][:most]
        yield from map(known.told, reversed(lines))
    yield from (nonfinite(each) for each in past.figures[:1] if each.nonfinite_step)
    yield from _comparison(state, found, past)
    if past.credit.last_round:
        yield say(Code.COUNTED, past.credit.sequence, rounds=(past.credit.last_round,))


def _title(known: Known, peer: Peer) -> Statement:
    state = known.state
    assignment = state.assignment(peer.peer, state.current_round) if state.plans else None
    reserved = state.reservations.get(peer.peer)
    where = (assignment.replica.index, assignment.member.stages) if assignment else None
    if where is None and reserved is not None:
        where = reserved.replica, reserved.stages
    replicas, stages = ((where[0],), where[1]) if where else ((), ())
    detail = _activity(known, peer)
    return say(Code.PEER, peers=(peer.peer,), role=peer.role, detail=detail, replicas=replicas, stages=stages)


def _activity(known: Known, peer: Peer) -> str:
    state = known.state
    if peer.peer in state.excluded:
        return "banned" if peer.peer in state.banned else "quarantined"
    if not peer.is_live:
        return "finished" if peer.finished else "rests" if peer.peer in known.resting else "gone"
    if not peer.policy.trains:
        return "relay"
    if state.phase is RunPhase.GATHERING or _trains(state, peer.peer):
        return "waits" if state.phase is RunPhase.GATHERING else "trains"
    idle = "spare" if is_spare(state, peer) else "follows"
    return "drains" if peer.lifecycle is Lifecycle.DRAINING else idle


def _trains(state: State, peer: PeerId) -> bool:
    is_open = state.phase is RunPhase.TRAINING and state.current_round <= state.spec.rounds
    return is_open and state.takes_part(peer, state.current_round)


def _event(past: PeerDetail, kind: Kind) -> int | None:
    return next((each.sequence for each in past.changes if each.kind is kind), None)


def _standing(known: Known, peer: Peer, past: PeerDetail) -> Iterator[Statement]:
    """Why a live peer does not train, and what has to happen."""
    state = known.state
    if state.phase is not RunPhase.TRAINING:
        yield say(Code.RUN, cause=run_cause(state), detail=run_message(state))
        return
    cause, plan = peer_cause(state, peer.peer), state.plans[-1]
    cause = told_of_rest(cause, known.resting) if cause else None
    if cause is not None:
        yield say(Code.CAUSE, _event(past, Kind.RESERVED) or _event(past, Kind.JOINED), cause=cause)
    for closed in closed_links(state):
        if peer.peer in closed.peers and closed != cause:
            yield say(Code.CAUSE, _event(past, Kind.LINK_FAILED), peers=closed.peers, cause=closed)
    if is_spare(state, peer):
        vacancies = Vacancies(state).obstacles(peer)[:_MOST_VACANCIES]
        for each in vacancies:
            yield say(Code.NO_VACANCY, _event(past, Kind.JOINED), detail=each)
        if not vacancies:
            yield say(Code.RESERVED_SOON, _event(past, Kind.JOINED))
    elif state.takes_part(peer.peer, plan.from_round):
        yield _assigned(known, peer.peer, plan)
    elif (reservation := state.reservations.get(peer.peer)) is not None and not is_synced(
        state, reservation, state.current_round
    ):
        attested = state.synced.get(peer.peer, {})
        least = least_synced(state, reservation, state.current_round)
        stages = [stage for stage in reservation.stages if attested.get(stage, -1) < least]
        rounds = [attested.get(stage, -1) for stage in stages]
        cited = _event(past, Kind.RESERVED), _event(past, Kind.DIVERGED)
        yield say(Code.BEHIND, *cited, stages=stages, rounds=rounds, least=least)


def _assigned(known: Known, peer: PeerId, plan: Plan) -> Statement:
    """Its place in the newest plan, with the k of its links."""
    replica, adopted, ks = plan.replica_of(peer), known.history.plan(plan.epoch), dict[str, int]()
    assert replica is not None, "the peer takes part in the plan"
    position = replica.position_of(peer)
    if position > 0:
        ks["upstream"] = replica.links[position - 1].k
    if position < len(replica.links):
        ks["downstream"] = replica.links[position].k
    return say(
        Code.ASSIGNED,
        adopted.sequence if adopted else None,
        rounds=(plan.from_round,),
        replicas=(replica.index,),
        epoch=plan.epoch,
        width=known.state.spec.model.width,
        upstream=ks.get("upstream"),
        downstream=ks.get("downstream"),
    )


def _comparison(state: State, peer: Peer, past: PeerDetail) -> Iterator[Statement]:
    """Its speed, its line and the pace of its replica against those of the live peers of its role."""
    if not peer.is_live or not peer.policy.trains:
        return
    own, measured = state.estimates[peer.peer].capacity, [each.sequence for each in past.estimates[-1:]]
    others = [
        state.estimates[each.peer].capacity
        for each in state.peers.values()
        if each.is_live and each.role is peer.role and each.peer != peer.peer
    ]
    usual = {
        Code.FLOPS: (own.flops, middle(each.flops for each in others if each.flops)),
        Code.UPLINK: (own.uplink, middle(each.uplink for each in others if each.uplink)),
    }
    for code, (mine, rest) in usual.items():
        if mine and rest and not 1 / SLOW < mine / rest < SLOW:
            yield say(code, *measured, peers=(peer.peer,), own=mine, usual=rest)
    if (assignment := state.assignment(peer.peer, state.current_round)) is None:
        return
    index, pace = assignment.replica.index, dict[int, float]()
    for each in state.plan_for(state.current_round).replicas:
        if (seconds := middle(state.phase_seconds.get(each.index, ()))) is not None:
            pace[each.index] = seconds * work_of(state.spec, each)
    spent, others_spend = pace.get(index), middle(each for at, each in pace.items() if at != index)
    if spent and others_spend and spent > SLOW * others_spend:
        yield say(Code.PACE, *measured, replicas=(index,), own=spent, usual=others_spend)
