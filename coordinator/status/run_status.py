"""Builds the status of the run from the coordinator's state. All faces render this one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from coordinator.base.phrases import stages_of
from coordinator.base.replacing import replace
from coordinator.membership.open_places import waiting
from coordinator.placement.rules import barren_replicas, is_synced, obstacles
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from coordinator.status.causes import ALARM_ROUNDS, alarm_cause, peer_cause, run_cause, told_of_rest
from coordinator.status.progress import expected_round_seconds, remaining_seconds
from protocol.math.turns import due_stages
from protocol.status import (
    Cause,
    Exclusion,
    Measurement,
    ModelEvaluation,
    PeerStatus,
    Place,
    ReplicaFigures,
    ReplicaState,
    ReplicaStatus,
    RunPhase,
    RunStatus,
    TrainingHealth,
)
from protocol.types import Lifecycle, PeerId, Replica, Rollback

_MOST_ROLLBACKS, _MOST_EVALUATIONS = 5, 64
_BYTE_COUNTS = ("link_bytes_sent", "link_bytes_dense", "payload_bytes", "payload_bytes_dense")
_HAS_TRAINED = (ReplicaState.OFFERED, ReplicaState.EXCHANGES, ReplicaState.DECIDED, ReplicaState.DONE)


def run_status(
    state: State,
    measurements: Iterable[Measurement],
    now: float,
    time: float,
    resting: Collection[PeerId] = (),
    health: TrainingHealth | None = None,
    hindrance: Cause | None = None,
) -> RunStatus:
    """The status at `now`.

    Args:
        measurements: the newest of each member.
        now: seconds on the clock of the events.
        time: Unix time, with which a reader compares its own clock.
        resting: the peers whose processes rest.
        health: of the newest round that was judged (coordinator.ops.health).
        hindrance: why the coordinator itself decides nothing now.
    """
    measured = tuple(measurements)
    is_open = state.phase is RunPhase.TRAINING and state.rounds_decided < state.spec.rounds
    # Once for all peers: of a large swarm they take long.
    found = obstacles(state, state.current_round) if is_open else {}
    lacks = {index: told_of_rest(cause, resting) for index, cause in found.items()}
    return RunStatus(
        run=state.run,
        spec=state.spec,
        phase=state.phase,
        cause=hindrance or run_cause(state, resting),
        rounds_decided=state.rounds_decided,
        stage_rounds_committed=state.committed,
        stage_rounds_aborted=state.aborted,
        peers=tuple(
            _peer_status(state, peer, now, peer.peer in resting, lacks) for peer in state.peers.values()
        ),
        replicas=_replicas(state, measured, lacks),
        measurements=measured,
        plan=state.plans[-1] if state.plans else None,
        anchors_agree=not any(state.peers[peer].is_live for peer, *_ in state.diverged),
        time=time,
        parameters=state.spec.parameters,
        round_number=state.current_round,
        round_seconds=max(0.0, now - state.began_at) if is_open else 0.0,
        expected_round_seconds=expected_round_seconds(state) if is_open else None,
        remaining_seconds=remaining_seconds(state, now),
        tokens_committed=state.tokens,
        pause=state.pause,
        health=health,
        alarm=alarm_cause(state),
        committed_at=state.committed_at,
        rollbacks=_rollbacks(state),
        waiting=waiting(state, now),
        changes=state.changes,
        term=state.term,
        evaluations=_evaluations(state),
    )


def _evaluations(state: State) -> tuple[ModelEvaluation, ...]:
    """The newest of each name, of peers that are not excluded; of a round the operator's first."""
    told = [each for each in state.evaluations.values() if each.peer not in state.excluded]
    newest = sorted(told, key=lambda each: (-each.round_number, each.key))[:_MOST_EVALUATIONS]
    shown = next((each for each in newest if each.samples), None)
    return tuple(each if each is shown else replace(each, samples=()) for each in newest)


def _rollbacks(state: State) -> tuple[Rollback, ...]:
    oldest = state.current_round - ALARM_ROUNDS
    recent = sorted(((number, to) for number, to in state.restored.items() if number > oldest), reverse=True)
    return tuple(Rollback(number, to) for number, to in recent[:_MOST_ROLLBACKS])


def _peer_status(state: State, peer: Peer, now: float, rests: bool, lacks: Mapping[int, Cause]) -> PeerStatus:
    last_seen = state.last_seen[peer.peer]
    assignment = state.assignment(peer.peer, state.current_round)
    reserved = state.reservations.get(peer.peer)
    lifecycle, where = peer.lifecycle, "" if assignment is None else str(assignment)
    if lifecycle is Lifecycle.SYNCING and reserved is not None:
        # A follower is shown with its reservation, and as READY when a plan may include it.
        where = f"replica-{reserved.replica}, {stages_of(reserved)}"
        if is_synced(state, reserved, state.current_round):
            lifecycle = Lifecycle.READY
    exclusion = Exclusion.QUARANTINED if peer.peer in state.quarantined else None
    return PeerStatus(
        peer=peer.peer,
        role=peer.role,
        lifecycle=lifecycle,
        round_number=last_seen.round_number,
        inner_step=last_seen.inner_step,
        seconds_since_seen=max(0.0, now - last_seen.at),
        assignment=where,
        estimates=state.estimates[peer.peer],
        reachability=peer.reachability,
        problem=peer.problem,
        role_reason=peer.role_reason,
        rests=rests and not peer.is_live,
        cause=peer_cause(state, peer.peer, lacks) if peer.is_live else None,
        waits=last_seen.waits if peer.is_live else (),
        name=state.name_of(peer.peer),
        strikes=len(state.strikes.get(peer.peer, ())),
        failures=state.failures.get(peer.peer, (0, 0))[0],
        exclusion=Exclusion.BANNED if peer.peer in state.banned else exclusion,
        exclusion_reason=state.banned.get(peer.peer, ""),
    )


def _replicas(
    state: State, measurements: Sequence[Measurement], lacks: Mapping[int, Cause]
) -> tuple[ReplicaStatus, ...]:
    """The replicas of the plan of the open round, those that are reserved, and those that have measured."""
    number = min(state.current_round, state.spec.rounds)
    plan = state.plan_for(number) if state.plans else None
    planned = {replica.index: replica for replica in plan.replicas} if plan else {}
    complete = {each.index for each in state.complete_replicas(number)} if plan else set()
    reserved = {each.slot: each.peer for each in state.reservations.values()}
    figures, barren = replica_figures(measurements), barren_replicas(state)
    found = []
    for index in sorted({*planned, *figures, *(replica for replica, _ in reserved)}):
        cause = lacks.get(index)
        if (replica := planned.get(index)) is not None:
            doing = _state_of(state, replica, number) if index in complete else ReplicaState.BROKEN
            places = tuple(Place(member.stages, member.peer) for member in replica.members)
        elif any(slot[0] == index for slot in reserved):
            doing = ReplicaState.READY if cause is None else ReplicaState.BROKEN
            layout = enumerate(state.layout(index))
            places = tuple(Place(stages, reserved.get((index, position))) for position, stages in layout)
        else:
            doing, places = ReplicaState.GONE, ()
        found.append(
            ReplicaStatus(
                index=index,
                state=doing,
                places=places,
                is_planned=replica is not None,
                links=replica.links if replica else (),
                microbatches=state.spec.microbatches_of(replica) if replica else 0,
                progress=_progress(state, replica, doing, number) if replica else 0.0,
                cause=cause if doing is ReplicaState.BROKEN else barren.get(index),
                figures=figures.get(index),
            )
        )
    return tuple(found)


def _state_of(state: State, replica: Replica, round_number: int) -> ReplicaState:
    """What a complete replica does in the open round."""
    if state.phase is not RunPhase.TRAINING:
        return ReplicaState.DONE
    if state.is_held:
        return ReplicaState.PAUSED
    open_stages = [
        stage for stage in due_stages(state.spec, round_number) if not state.is_decided(stage, round_number)
    ]
    if not open_stages:
        return ReplicaState.DECIDED
    rounds = [(replica.host_of(stage).peer, state.round_of(stage, round_number)) for stage in open_stages]
    answered = [host in each.offers or host in each.withheld for host, each in rounds]
    is_undecided = len(open_stages) == len(due_stages(state.spec, round_number))
    if is_undecided and not any(answered):
        return ReplicaState.TRAINS
    is_grouped = all(answered) and all(each.group is not None for _, each in rounds)
    return ReplicaState.EXCHANGES if is_grouped else ReplicaState.OFFERED


def _progress(state: State, replica: Replica, doing: ReplicaState, round_number: int) -> float:
    """The share of its inner steps that a replica has done in the open round."""
    if doing in _HAS_TRAINED:
        return 1.0
    seen = [state.last_seen.get(member.peer) for member in replica.members]
    steps = [each.inner_step if each and each.round_number == round_number else 0 for each in seen]
    return min(1.0, min(steps, default=0) / state.spec.inner.steps)


def replica_figures(measurements: Iterable[Measurement]) -> dict[int, ReplicaFigures]:
    """By index: the figures of the replicas whose last member has measured."""
    newest: dict[tuple[int, int], Measurement] = {}
    # A peer that replaced another one at a position has measured a later round there.
    for measurement in sorted(measurements, key=lambda each: each.round_number):
        newest[measurement.replica, measurement.position] = measurement
    by_replica: dict[int, list[Measurement]] = {}
    for measurement in newest.values():
        by_replica.setdefault(measurement.replica, []).append(measurement)
    found = {}
    for index, members in sorted(by_replica.items()):
        last = next((member for member in members if member.complete), None)
        if last is None:
            continue
        seconds = last.inner_seconds + last.outer_seconds
        found[index] = ReplicaFigures(
            members=len(members),
            round_number=last.round_number,
            validation_loss=last.validation_loss,
            train_loss=last.train_loss,
            tokens_per_second=last.tokens / seconds if seconds else 0.0,
            inner_seconds=last.inner_seconds,
            outer_seconds=last.outer_seconds,
            **{name: sum(getattr(member, name) for member in members) for name in _BYTE_COUNTS},
        )
    return found
