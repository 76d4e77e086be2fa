"""Builds the status of the run from the coordinator's state. All faces render this one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coordinator.placement.eligibility import is_synced
from coordinator.placement.obstacles import closed_links, obstacles
from coordinator.state.cause_text import alarm_text, cause_text
from coordinator.state.state import Peer, State
from coordinator.state.text import stages_of
from coordinator.status.causes import peer_cause
from coordinator.status.messages import run_message
from coordinator.status.progress import expected_round_seconds, remaining_seconds
from protocol.status import Cause, Measurement, PeerStatus, RunPhase, RunStatus, TrainingHealth
from protocol.types import Lifecycle, PeerId


def run_status(
    state: State,
    measurements: Iterable[Measurement],
    now: float,
    time: float,
    resting: Collection[PeerId] = (),
    health: TrainingHealth | None = None,
) -> RunStatus:
    """The status at `now`.

    Args:
        measurements: the newest of each member.
        now: seconds on the clock of the events.
        time: Unix time, with which a reader compares its own clock.
        resting: the peers whose processes rest.
        health: of the newest round that was judged (coordinator.health).
    """
    is_open = state.phase is RunPhase.TRAINING and state.rounds_decided < state.spec.rounds
    # Once for all peers: of a large swarm they take long.
    lacks = obstacles(state, state.current_round) if is_open else {}
    return RunStatus(
        run=state.run,
        spec=state.spec,
        phase=state.phase,
        message=run_message(state),
        rounds_decided=state.rounds_decided,
        stage_rounds_committed=state.committed,
        stage_rounds_aborted=state.aborted,
        peers=tuple(
            _peer_status(state, peer, now, peer.peer in resting, lacks) for peer in state.peers.values()
        ),
        measurements=tuple(measurements),
        plan=state.plans[-1] if state.plans else None,
        anchors_agree=not any(state.peers[peer].is_live for peer, *_ in state.diverged),
        time=time,
        round_number=state.current_round,
        round_seconds=max(0.0, now - state.began_at) if is_open else 0.0,
        expected_round_seconds=expected_round_seconds(state) if is_open else None,
        remaining_seconds=remaining_seconds(state, now),
        tokens_committed=state.tokens,
        pause=state.pause,
        health=health,
        alarm=alarm_text(alarm.reason, alarm.last_healthy) if (alarm := state.open_alarm) else "",
    )


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
    cause = peer_cause(state, peer.peer, lacks) if peer.is_live else None
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
        problem=". ".join(
            filter(None, (peer.problem, *(cause_text(each) for each in closed_links(state, peer.peer))))
        ),
        role_reason=peer.role_reason,
        rests=rests and not peer.is_live,
        message=cause_text(cause) if cause else "",
        waits=last_seen.waits if peer.is_live else (),
        name=state.name_of(peer.peer),
    )
