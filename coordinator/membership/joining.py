"""Peers join the run, and the run starts when enough peers have joined."""

from __future__ import annotations

from coordinator.membership.invites import permitted_role
from coordinator.membership.validation import bad_request, check_not_excluded, check_peer_id
from coordinator.placement.initial_placement import initial_plan, measuring, missing
from coordinator.placement.vacancies import Vacancies, reserve_assignments
from coordinator.state.commands import Join
from coordinator.state.events import AssignmentReserved, PeerJoined, PeerLost, PlanAdopted
from coordinator.state.state import Peer, State
from coordinator.state.text import Waiting
from coordinator.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import PROTOCOL_VERSION, PeerId, Plan

SPEED_SECONDS = 20.0
"""How long the start of the run waits for the speed of a peer that has joined."""
_TAKEOVER_HEARTBEATS = 2
"""After this many missing heartbeats, a second join comes from a restarted node, not from another node."""


def check_compatible(spec: RunSpec, protocol_version: int, spec_hash: str) -> None:
    """Refuse a peer of another version or run. Comes before all other checks, which assume both.

    Raises:
        HetnodeError: VERSION_MISMATCH with both versions; SPEC_MISMATCH with both hashes, in full.
    """
    if protocol_version != PROTOCOL_VERSION:
        raise HetnodeError(
            ErrorCode.VERSION_MISMATCH,
            f"This coordinator speaks protocol version {PROTOCOL_VERSION}, the node {protocol_version}.",
            "Install the same version of hetnode on both.",
        )
    if spec_hash not in ("", spec.hash):
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"This run has the specification {spec.hash}, the node has {spec_hash}.",
            "Join with a fresh run folder, or with the coordinator of that other run.",
        )


def join(transaction: Transaction, spec: RunSpec, command: Join, now: float) -> None:
    """Let the peer in. After the start of the run, it also gets a reservation if a vacancy fits it.

    Raises:
        HetnodeError: VERSION_MISMATCH, SPEC_MISMATCH, BAD_REQUEST, BANNED, QUARANTINED; ALREADY_ACTIVE if
            another node of this identity takes part; RUN_STARTED after the end; RUN_FULL before the start.
    """
    check_compatible(spec, command.protocol_version, command.spec_hash)
    check_peer_id(command.peer)
    check_not_excluded(transaction.state, command.peer)
    permitted = permitted_role(transaction.state, command.peer)
    if permitted not in (None, command.role):
        raise bad_request(f"the invite of {command.peer} is for the role {permitted}, not {command.role}")
    former = transaction.state.peers.get(command.peer)
    silent = _silent_seconds(transaction.state, command.peer, now)
    if former is not None and former.is_live and silent <= _TAKEOVER_HEARTBEATS * spec.timing.heartbeat:
        if _is_repeated(transaction.state, former, command):
            return
        raise HetnodeError(
            ErrorCode.ALREADY_ACTIVE,
            f"Peer {command.peer} already takes part.",
            "Stop the other node of this identity; if it has just died, "
            f"try again in {_TAKEOVER_HEARTBEATS * spec.timing.heartbeat:g} s.",
        )
    if transaction.state.phase is RunPhase.FINISHED:
        raise HetnodeError(
            ErrorCode.RUN_STARTED, "The run has finished.", "Join another run, or start one in a new folder."
        )
    if former is not None and former.is_live:  # it was killed and restarted before it counted as lost
        transaction.add(PeerLost(now, command.peer, silent))
    if transaction.state.phase is RunPhase.GATHERING:
        _require_room(transaction.state, spec, command)
    # Read before the join, which clears it: a peer that comes back gets its former position, if it is free.
    former_reservation = transaction.state.reservations.get(command.peer)
    transaction.add(PeerJoined(now, command.peer, command.role, command.capacity, command.endpoint))
    if transaction.state.phase is RunPhase.GATHERING:
        start_run(transaction, spec, now)
    else:
        peer = transaction.state.peers[command.peer]
        reservation = Vacancies(transaction.state, spec).reservation_for(peer, former_reservation)
        if reservation is not None:
            transaction.add(AssignmentReserved(now, reservation))


def start_run(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Adopt the first plan if the peers suffice for one and none of them is about to report its speed."""
    # Later plans do not cut the stages anew only to be faster, so the first plan waits for measured speeds.
    staying, estimates = transaction.state.staying, transaction.state.estimates
    if any(now < peer.joined_at + SPEED_SECONDS for peer in measuring(staying, estimates)):
        return
    plan = initial_plan(staying, spec, 1, 1, 0, estimates)
    if isinstance(plan, Plan):
        transaction.add(PlanAdopted(now, plan))
        reserve_assignments(transaction, spec, now)


def _silent_seconds(state: State, peer: PeerId, now: float) -> float:
    """Seconds since the last sign of life of `peer`; a restart of the coordinator does not reset them."""
    last_seen = state.last_seen.get(peer)
    return now - last_seen.at if last_seen else 0.0


def _is_repeated(state: State, former: Peer, command: Join) -> bool:
    """Whether the peer repeats a join whose answer was lost: it has sent no heartbeat since that join."""
    described = (former.role, former.capacity, former.endpoint)
    same = described == (command.role, command.capacity, command.endpoint)
    return same and not state.last_seen[former.peer].has_sent_heartbeat


def _require_room(state: State, spec: RunSpec, command: Join) -> None:
    """Raise RUN_FULL if the run has not started and needs no more peers of this role."""
    peers = state.staying
    policy = POLICIES[command.role]
    total = policy.peers_needed(spec)
    if sum(peer.role is command.role for peer in peers) < total:
        return
    short = missing(peers, spec)
    waiting = initial_plan(peers, spec, 1, 1, 0, state.estimates)
    is_open = isinstance(waiting, Waiting) and (command.endpoint or not waiting.unreachable)
    if not short and policy.joins_pipelines and is_open:
        return  # one more peer may connect two others, or have the memory that they lack
    raise HetnodeError(
        ErrorCode.RUN_FULL,
        f"The run takes {total} peer{'' if total == 1 else 's'} of role {command.role.value} "
        f"and has them; it still waits for {short or 'a stage peer with an endpoint'}.",
        "Join in a role that is missing, or after the run has started: then it takes more peers.",
    )
