"""Peers join the run, and the run starts when enough peers have joined."""

from __future__ import annotations

from dataclasses import replace

from coordinator.base.phrases import lacking_text
from coordinator.membership.invites import permitted_role
from coordinator.membership.reachability import check_claims
from coordinator.membership.validation import (
    bad_request,
    check_not_excluded,
    check_not_finished,
    check_peer_id,
)
from coordinator.placement.cost_model import relay_uplinks
from coordinator.placement.reservations import Vacancies, reserve_assignments
from coordinator.placement.roles import role_of_newcomer, roles_at_start
from coordinator.placement.start import initial_plan, lacking, measuring
from coordinator.run.state.apply import apply
from coordinator.run.state.commands import Join
from coordinator.run.state.events import AssignmentReserved, PeerJoined, PeerLost, PlanAdopted, RoleChanged
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode, RunPhase
from protocol.types import PeerId, Plan, Reachability, ReservedAssignment, Role
from protocol.wire.versions import common_version

SPEED_SECONDS = 20.0
"""How long the start of the run waits for the speed of a peer that has joined."""
_TAKEOVER_HEARTBEATS = 2
"""After this many missing heartbeats, a second join comes from a restarted node, not from another node."""


def check_compatible(spec: RunSpec, newest: int, spec_hash: str, oldest: int = 0) -> int:
    """Refuse a peer of another version or run. Comes before all other checks, which assume both.

    Returns the version that both sides speak; the peer speaks `oldest` (0: `newest`) to `newest`.

    Raises:
        HetnodeError: VERSION_MISMATCH with both versions; SPEC_MISMATCH with both hashes, in full.
    """
    version = common_version("the node", "the coordinator", newest, oldest)
    if spec_hash not in ("", spec.identity):
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"This run has the specification {spec.identity}, the node has {spec_hash}.",
            "Join with a fresh run folder, or with the coordinator of that other run.",
        )
    return version


def join(transaction: Transaction, command: Join) -> None:
    """Let the peer in. After the start of the run, it also gets a reservation if a vacancy fits it.

    Raises:
        HetnodeError: VERSION_MISMATCH, SPEC_MISMATCH, BAD_REQUEST, BAD_ADDRESS for an endpoint that no peer
            may have, BANNED, QUARANTINED; ALREADY_ACTIVE if another node of this identity takes part;
            RUN_STARTED after the end; RUN_FULL before the start.
    """
    check_compatible(transaction.state.spec, command.protocol_version, command.spec_hash)
    check_peer_id(command.peer)
    check_not_excluded(transaction.state, command.peer)
    check_claims(command.endpoint, command.claimed)
    command, trains = _with_permitted_role(transaction.state, command)
    former = transaction.state.peers.get(command.peer)
    silent = _silent_seconds(transaction.state, command.peer, transaction.now)
    state = transaction.state
    takeover_seconds = _TAKEOVER_HEARTBEATS * state.spec.timing.heartbeat_of(state.live)
    if former is not None and former.is_live and silent <= takeover_seconds:
        if _is_repeated(transaction.state, former, command):
            return
        raise HetnodeError(
            ErrorCode.ALREADY_ACTIVE,
            f"Peer {command.peer} already takes part, perhaps on a machine with a copy of its key.",
            "Stop the other node, or give this machine an identity of its own: hetnode join INVITE "
            f"--identity NEW-FILE. If the other has just died, try again in {takeover_seconds:g} s.",
        )
    check_not_finished(transaction.state)
    if former is not None and former.is_live:  # it was killed and restarted before it counted as lost
        transaction.add(PeerLost(transaction.now, command.peer, silent))
    # Read before the join, which clears it: a peer that comes back gets its former position, if it is free.
    former_reservation = transaction.state.reservations.get(command.peer)
    joined = _joined(transaction, command, former, former_reservation)
    if transaction.state.phase is RunPhase.GATHERING and trains:
        trial = Transaction(transaction.state, transaction.now)  # a refused peer changes no role
        assign_roles(trial, newcomer=joined)
        _require_room(trial.state, joined)
        for event in trial.events:
            transaction.add(event)
    transaction.add(joined)
    if transaction.state.phase is RunPhase.GATHERING:
        start_run(transaction)
    elif trains:
        peer = transaction.state.peers[command.peer]
        reservation = Vacancies(transaction.state, transaction.now).reservation_for(peer, former_reservation)
        if reservation is not None:
            transaction.add(AssignmentReserved(transaction.now, reservation))


def _with_permitted_role(state: State, command: Join) -> tuple[Join, bool]:
    """`command` with the role that its invite names, if it names one, and whether this role trains.

    Raises BAD_REQUEST for another role, and for a relay without an invite for relays.
    """
    permitted, wanted = permitted_role(state, command.peer), command.role
    if wanted is None:
        wanted = permitted if permitted is not None and POLICIES[permitted].trains else None
    if permitted not in (None, wanted):
        raise bad_request(f"the invite of {command.peer} is for the role {permitted}, not {wanted or 'auto'}")
    trains = wanted is None or POLICIES[wanted].trains
    if not trains and permitted is not wanted:
        # A relay sees which peers connect and can block them, so the operator chooses the relays.
        raise HetnodeError(
            ErrorCode.BAD_REQUEST,
            f"The invite of {command.peer} is not for the role {wanted}.",
            f"Ask the operator for an invite made with 'hetnode invite create --role {wanted}'.",
        )
    return replace(command, role=wanted), trains


def _joined(
    transaction: Transaction, command: Join, former: Peer | None, reservation: ReservedAssignment | None
) -> PeerJoined:
    """The event of `command`, with the role that the coordinator chooses if it is to choose."""
    found = command.endpoint, command.reachability, command.claimed, command.problem
    if command.role is not None:
        return PeerJoined(transaction.now, command.peer, command.role, command.capacity, *found)
    undecided = PeerJoined(
        transaction.now, command.peer, Role.STAGE, command.capacity, *found, role_reason="not decided yet"
    )
    state = apply(transaction.state, undecided)
    peer = state.peers[command.peer]
    if state.phase is RunPhase.GATHERING:
        choice = roles_at_start(state.staying, state.spec, state.estimates)[command.peer]
    else:
        choice = role_of_newcomer(state, peer, former, reservation)
    return replace(undecided, role=choice.role, role_reason=choice.reason)


def assign_roles(transaction: Transaction, newcomer: PeerJoined | None = None) -> None:
    """Before the run starts: change the roles of flexible peers to what they should be, with `newcomer`."""
    state = transaction.state if newcomer is None else apply(transaction.state, newcomer)
    if not any(peer.is_flexible for peer in state.peers.values()):
        return  # each join asks this, so that joins of a large swarm must not search
    for peer, choice in roles_at_start(state.staying, state.spec, state.estimates).items():
        is_new = newcomer is not None and peer == newcomer.peer
        if state.peers[peer].role is not choice.role and not is_new:
            transaction.add(RoleChanged(transaction.now, peer, choice.role, choice.reason))


def start_run(transaction: Transaction) -> None:
    """Adopt the first plan if the peers suffice for one and none of them is about to report its speed."""
    # Later plans do not cut the stages anew only to be faster, so the first plan waits for measured speeds.
    state, estimates = transaction.state, transaction.state.estimates
    if len(state.peers) < sum(policy.peers_needed(state.spec) for policy in POLICIES.values()):
        return  # each join asks this
    staying = state.staying
    if any(transaction.now < peer.joined_at + SPEED_SECONDS for peer in measuring(staying, estimates)):
        return
    assign_roles(transaction)
    state = transaction.state
    plan = initial_plan(state.staying, state.spec, estimates, relay_uplinks(state))
    if isinstance(plan, Plan):
        transaction.add(PlanAdopted(transaction.now, replace(plan, changes=state.changes_until(1))))
        reserve_assignments(transaction)


def _silent_seconds(state: State, peer: PeerId, now: float) -> float:
    """Seconds since the last sign of life of `peer`; a restart of the coordinator does not reset them."""
    last_seen = state.last_seen.get(peer)
    return now - last_seen.at if last_seen else 0.0


def _is_repeated(state: State, former: Peer, command: Join) -> bool:
    """Whether the peer repeats a join whose answer was lost: it has sent no heartbeat since that join."""
    # What answers there may have changed in between, but not what the peer claims.
    described = (None if former.is_flexible else former.role, former.capacity, former.claimed)
    same = described == (command.role, command.capacity, command.claimed or command.endpoint)
    return same and not state.last_seen[former.peer].has_sent_heartbeat


def _require_room(state: State, joined: PeerJoined) -> None:
    """Raise RUN_FULL if the run has not started and needs no more peers of this role."""
    peers = state.staying
    policy = POLICIES[joined.role]
    total = policy.peers_needed(state.spec)
    if sum(peer.role is joined.role for peer in peers) < total:
        return
    short = lacking_text(lacking(peers, state.spec))
    waiting = initial_plan(peers, state.spec, state.estimates)
    if not short and isinstance(waiting, Cause):
        is_reached = joined.endpoint or joined.reachability in (Reachability.OPEN, Reachability.RELAYED)
        is_unreached = waiting.code in (CauseCode.ENDPOINT_LACKING, CauseCode.HOST_LACKING)
        if is_reached if is_unreached else policy.joins_pipelines:
            return  # one more peer may connect two others, or have the memory that they lack
    raise HetnodeError(
        ErrorCode.RUN_FULL,
        f"The run takes {total} peer{'' if total == 1 else 's'} of role {joined.role.value} "
        f"and has them; it still waits for {short or 'a peer that others reach'}"
        f"{'; of this peer, ' if joined.role_reason else ''}{joined.role_reason}.",
        "Join in a role that is missing, or after the run has started: then it takes more peers.",
    )
