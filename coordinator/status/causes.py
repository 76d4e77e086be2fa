"""The causes of the run's state: what it does or waits for, and why a peer does not train."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from coordinator.placement.reservations import is_spare
from coordinator.placement.rules import closed_links, obstacles, unreached_hosts
from coordinator.placement.start import initial_plan, lacking, measuring
from coordinator.run.rounds.answers import missing_offers, missing_reports
from coordinator.run.rounds.attestation import unattested, unconfirmed
from coordinator.run.rounds.rounds import is_stalled
from coordinator.run.state.state import State
from protocol.status import Cause, CauseCode, RunPhase
from protocol.types import PeerId, ReservedAssignment

ALARM_ROUNDS = 16
"""An alarm is shown for so many rounds."""


def run_cause(state: State, resting: Collection[PeerId] = ()) -> Cause:
    """What the run does or waits for, as far as it is not paused. The processes of `resting` rest."""
    match state.phase:
        case RunPhase.GATHERING:
            return _gathering(state)
        case RunPhase.TRAINING:
            found = told_of_rest(_training(state), resting)
            return replace(found, round_number=state.current_round, total=state.spec.rounds)
        case RunPhase.FINISHED:
            return Cause(CauseCode.FINISHED, total=state.spec.rounds)


def told_of_rest(cause: Cause, resting: Collection[PeerId]) -> Cause:
    """`cause`, where of the members that are gone those in `resting` have processes that rest."""
    if not resting:
        return cause
    rests = cause.code is CauseCode.MEMBER_GONE and cause.peers[0] in resting
    causes = tuple(told_of_rest(each, resting) for each in cause.causes)
    return replace(cause, detail="rests" if rests else cause.detail, causes=causes)


def _gathering(state: State) -> Cause:
    staying = state.staying
    if lacks := lacking(staying, state.spec):
        return Cause(CauseCode.PEERS_LACKING, causes=lacks)
    plan = initial_plan(staying, state.spec, state.estimates)
    if isinstance(plan, Cause):
        return plan
    peers = tuple(peer.peer for peer in measuring(staying, state.estimates))
    return Cause(CauseCode.SPEED_UNKNOWN, peers=peers) if peers else Cause(CauseCode.STARTING)


def _training(state: State) -> Cause:
    round_number = state.current_round
    if round_number > state.spec.rounds:
        if peers := tuple(unconfirmed(state)):
            return Cause(CauseCode.DIGESTS_LACKING, peers=peers)
        return Cause(CauseCode.DIGESTS_LACKING, stages=tuple(unattested(state)))
    if is_stalled(state):
        return Cause(CauseCode.NO_REPLICA, causes=tuple(obstacles(state, round_number).values()))
    if state.is_held:
        return Cause(CauseCode.PAUSED)
    if hosts := unreached_hosts(state.plan_for(round_number).replicas, state.peers):
        return Cause(CauseCode.NO_EXCHANGE, peers=tuple(hosts))
    found = (_exchange(state, stage, round_number) for stage in range(state.stages))
    return next((cause for cause in found if cause is not None), Cause(CauseCode.TRAINING))


def _exchange(state: State, stage: int, round_number: int) -> Cause | None:
    """What the exchange of `stage` waits for; None before it begins and after its end."""
    round_state = state.round_of(stage, round_number)
    if state.is_decided(stage, round_number) or not round_state.offers:
        return None
    if round_state.group is None:
        replicas = tuple(missing_offers(state, stage, round_number))
        return Cause(CauseCode.OFFERS_LACKING, stages=(stage,), replicas=replicas)
    if (contest := round_state.contest) is not None and contest.open_owners:
        return Cause(CauseCode.PAYLOADS_CONTESTED, stages=(stage,), count=len(contest.open_owners))
    assignments = [state.assignment(peer, round_number) for peer in missing_reports(state, round_state)]
    replicas = tuple(each.replica.index for each in assignments if each is not None)
    return Cause(CauseCode.REPORTS_LACKING, stages=(stage,), replicas=replicas)


def alarm_cause(state: State) -> Cause | None:
    """What the newest alarm has seen while it is new; None after the operator has decided to go on."""
    alarm = state.alarm
    if alarm is None or alarm.is_over or state.current_round > alarm.round_number + ALARM_ROUNDS:
        return None
    number, healthy = alarm.round_number, alarm.last_healthy
    return Cause(CauseCode.ALARM, round_number=number, count=healthy, detail=alarm.reason)


def peer_cause(state: State, peer: PeerId, lacks: Mapping[int, Cause] | None = None) -> Cause | None:
    """Why `peer`, which has joined, does not train, or for nothing, while the run trains; None if it trains.

    `lacks`: the obstacles of the current round, for a caller that asks about many peers.
    """
    if state.phase is not RunPhase.TRAINING:
        return None
    seen = state.last_seen[peer].round_number
    told = max((each for _, each, _ in state.last_seen[peer].ahead), default=0)
    if seen > min(state.current_round, state.spec.rounds) + 1 or told >= state.current_round:
        return Cause(CauseCode.COORDINATOR_BEHIND, round_number=max(seen - 1, told))
    closed = next(closed_links(state, peer), None)
    if closed or state.takes_part(peer, state.plans[-1].from_round):
        return closed or (Cause(CauseCode.DISCOUNTED) if peer in state.discounted else None)
    known, reservation = state.peers[peer], state.reservations.get(peer)
    if is_spare(state, known):
        return Cause(CauseCode.SPARE)
    if reservation is None or not known.is_staying:
        return None
    lacks = obstacles(state, state.current_round) if lacks is None else lacks
    why = lacks.get(reservation.replica) or _why_not_yet(state, reservation)
    return Cause(CauseCode.FOLLOWS, stages=tuple(reservation.stages), causes=(why,))


def _why_not_yet(state: State, reservation: ReservedAssignment) -> Cause:
    spares = state.spec.grouping.spares
    is_new = reservation.replica not in state.assigned_replicas
    if is_new and len(state.layout(reservation.replica)) > 1 and spares:
        return Cause(CauseCode.SPARES_KEPT, count=spares)
    return Cause(CauseCode.NEXT_PLAN)
