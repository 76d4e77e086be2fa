"""Builds the status of the run from the coordinator's state. All faces render this one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coordinator.placement.eligibility import is_synced
from coordinator.state.state import Peer, State
from coordinator.state.text import stages_of
from coordinator.status.messages import failed_links_of, run_message
from protocol.status import Measurement, PeerStatus, RunStatus
from protocol.types import Lifecycle, PeerId


def run_status(
    state: State,
    measurements: Iterable[Measurement],
    now: float,
    time: float,
    resting: Collection[PeerId] = (),
) -> RunStatus:
    """The status at `now`.

    Args:
        measurements: the newest of each member.
        now: seconds on the clock of the events.
        time: Unix time, with which a reader compares its own clock.
        resting: the peers whose processes rest.
    """
    return RunStatus(
        run=state.run,
        spec=state.spec,
        phase=state.phase,
        message=run_message(state),
        rounds_decided=state.rounds_decided,
        stage_rounds_committed=state.committed,
        stage_rounds_aborted=state.aborted,
        peers=tuple(_peer_status(state, peer, now, peer.peer in resting) for peer in state.peers.values()),
        measurements=tuple(measurements),
        plan=state.plans[-1] if state.plans else None,
        anchors_agree=not any(state.peers[peer].is_live for peer, *_ in state.diverged),
        time=time,
    )


def _peer_status(state: State, peer: Peer, now: float, rests: bool) -> PeerStatus:
    last_seen = state.last_seen[peer.peer]
    assignment = state.assignment(peer.peer, state.current_round)
    reserved = state.reservations.get(peer.peer)
    lifecycle, where = peer.lifecycle, "" if assignment is None else str(assignment)
    if lifecycle is Lifecycle.SYNCING and reserved is not None:
        # A follower is shown with its reservation, and as READY when a plan may include it.
        where = f"replica-{reserved.replica}, {stages_of(reserved)}"
        if is_synced(state, reserved, state.current_round):
            lifecycle = Lifecycle.READY
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
        problem=". ".join(filter(None, (peer.problem, *failed_links_of(state, peer.peer)))),
        role_reason=peer.role_reason,
        rests=rests and not peer.is_live,
    )
