"""What the coordinator answers to a command: ``decide(state, command, now) -> events | refusal``.

Pure: the clock is an argument, and the same state, command and time always give the same outcome. The rules
of a round are in coordinator.rounds.rounds, those of the anchors in coordinator.rounds.attestation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from coordinator.membership.invites import create, enroll, permitted_role, revoke
from coordinator.membership.validation import bad_request, check_welcome, live_peer
from coordinator.placement.initial_placement import group, measuring, missing
from coordinator.placement.vacancies import Vacancies, reserve_assignments
from coordinator.rounds.attestation import attest, has_attested_last, unattested, unconfirmed
from coordinator.rounds.rounds import advance, offer, report, resume, withhold
from coordinator.state.commands import (
    Attest,
    Await,
    Ban,
    Command,
    CreateInvite,
    Drain,
    Enroll,
    Heartbeat,
    Join,
    Leave,
    Offer,
    Report,
    Retreat,
    RevokeInvite,
    Start,
    Tick,
    Unban,
)
from coordinator.state.events import (
    AnchorDiverged,
    AssignmentReserved,
    CoordinatorStarted,
    Event,
    PeerBanned,
    PeerDraining,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerMeasured,
    PeerRetreated,
    PeerSeen,
    PeerUnbanned,
    PlanAdopted,
    RunFinished,
)
from coordinator.state.state import Peer, State
from coordinator.state.text import Waiting
from coordinator.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import policy_of
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.trust.envelope import public_key_of
from protocol.types import PROTOCOL_VERSION, Estimates, PeerId, Plan

FINISHED = "finished"
"""The reason with which a peer leaves whose work is done."""
_SPEED_SECONDS = 20.0
"""So long the run waits for the speed of a peer that has joined."""
_LEAST_PAUSE, _LONGEST_PAUSE = 2.0, 20.0
"""Seconds between two reports of a peer that are recorded: more after each report. Nodes wait longer than that."""
_TAKEOVER_BEATS = 2
"""Who missed so many heartbeats and joins again has died meanwhile; otherwise it is another node."""


@dataclass(frozen=True)
class Outcome:
    """The events of a command, recorded in any case, and the refusal that its sender is told, if any."""

    events: tuple[Event, ...]
    refusal: HetnodeError | None = None


def decide(state: State, spec: RunSpec, command: Command, now: float) -> Outcome:
    """What `command` leads to at time `now` (seconds, on the clock of the recorded events). Never raises."""
    transaction = Transaction(state)
    try:
        _obey(transaction, spec, command, now)
    except HetnodeError as refusal:
        return Outcome(tuple(transaction.events), refusal)
    return Outcome(tuple(transaction.events))


def check_compatible(spec: RunSpec, protocol_version: int, spec_hash: str) -> None:
    """Refuse a peer that cannot take part, before anything else it says is looked at.

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


def _obey(transaction: Transaction, spec: RunSpec, command: Command, now: float) -> None:  # noqa: PLR0912
    match command:
        case Start():
            transaction.add(CoordinatorStarted(now))
        case CreateInvite():
            create(
                transaction,
                command.invite,
                command.secret_sha256,
                command.uses,
                command.valid_seconds,
                command.role,
                now,
            )
        case RevokeInvite():
            revoke(transaction, command.invite, now)
        case Enroll():
            check_welcome(transaction.state, command.peer)
            enroll(transaction, command.peer, command.invite, command.secret_sha256, now)
        case Ban():
            _ban(transaction, spec, command, now)
        case Unban():
            if command.peer in transaction.state.banned or command.peer in transaction.state.quarantined:
                transaction.add(PeerUnbanned(now, command.peer))
        case Join():
            _join(transaction, spec, command, now)
        case Heartbeat():
            live_peer(transaction.state, command.peer)
            transaction.add(PeerSeen(now, command.peer, command.round_number, command.inner_step))
            if command.estimates is not None:
                _measured(transaction, command.peer, command.estimates, now)
        case Leave():
            _leave(transaction, spec, command, now)
        case Drain():
            if live_peer(transaction.state, command.peer).is_staying:
                transaction.add(PeerDraining(now, command.peer, command.reason))
                _membership_changed(transaction, spec, now)
        case Retreat():
            _retreat(transaction, spec, command, now)
        case Offer():
            offer(transaction, spec, command.peer, command.descriptor, now)
        case Await():
            withhold(
                transaction, spec, command.peer, command.stage, command.round_number, command.withheld, now
            )
        case Report():
            _report(transaction, spec, command, now)
        case Attest():
            _attest(transaction, spec, command, now)
        case Tick():
            _tick(transaction, spec, now)
        case _:
            assert_never(command)


def _join(transaction: Transaction, spec: RunSpec, command: Join, now: float) -> None:
    check_compatible(spec, command.protocol_version, command.spec_hash)
    _check_peer_id(command.peer)
    check_welcome(transaction.state, command.peer)
    permitted = permitted_role(transaction.state, command.peer)
    if permitted not in (None, command.role):
        raise bad_request(f"the invite of {command.peer} is for the role {permitted}, not {command.role}")
    former = transaction.state.peers.get(command.peer)
    silent = _silence(transaction.state, command.peer, now)
    if former is not None and former.is_live and silent <= _TAKEOVER_BEATS * spec.timing.heartbeat:
        if _is_repeated(transaction.state, former, command):
            return
        raise HetnodeError(
            ErrorCode.ALREADY_ACTIVE,
            f"Peer {command.peer} takes part already.",
            "Stop the other node of this identity; if it has just died, "
            f"try again in {_TAKEOVER_BEATS * spec.timing.heartbeat:g} s.",
        )
    if transaction.state.phase is RunPhase.FINISHED:
        raise HetnodeError(
            ErrorCode.RUN_STARTED, "The run has finished.", "Join another run, or start one in a new folder."
        )
    if former is not None and former.is_live:
        transaction.add(PeerLost(now, command.peer, silent))
    if transaction.state.phase is RunPhase.GATHERING:
        _require_room(transaction.state, spec, command)
    kept = transaction.state.reservations.get(command.peer)
    transaction.add(PeerJoined(now, command.peer, command.role, command.capacity, command.endpoint))
    if transaction.state.phase is RunPhase.GATHERING:
        _begin(transaction, spec, now)
    else:
        place = Vacancies(transaction.state, spec).reservation_for(
            transaction.state.peers[command.peer], kept
        )
        if place is not None:
            transaction.add(AssignmentReserved(now, place))
    _membership_changed(transaction, spec, now)


def _begin(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Start the run as soon as those who are there can form it, and have measured what they can carry."""
    staying, estimates = transaction.state.staying, transaction.state.estimates
    if any(now < peer.joined_at + _SPEED_SECONDS for peer in measuring(staying, estimates)):
        return
    plan = group(staying, spec, 1, 1, 0, estimates)
    if isinstance(plan, Plan):
        transaction.add(PlanAdopted(now, plan))
        reserve_assignments(transaction, spec, now)


def _measured(transaction: Transaction, peer: PeerId, estimates: Estimates, now: float) -> None:
    """Record what `peer` has measured. It is stored, so who tells too often is not heard.

    While the run gathers, the next tick sees whether it can begin now.
    """
    times, last = transaction.state.report_times.get(peer, (0, now))
    links = tuple(link for link in estimates.links if link.peer in transaction.state.peers)
    heard = replace(estimates, links=links)
    too_soon = now < last + min(_LEAST_PAUSE * times, _LONGEST_PAUSE)
    if not too_soon and heard != transaction.state.estimates.get(peer):
        transaction.add(PeerMeasured(now, peer, heard))


def _silence(state: State, peer: PeerId, now: float) -> float:
    """Seconds since `peer` was heard of; a restart of the coordinator does not shorten them."""
    last_seen = state.last_seen.get(peer)
    return now - last_seen.at if last_seen else 0.0


def _check_peer_id(peer: PeerId) -> None:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise bad_request(str(error)) from None


def _ban(transaction: Transaction, spec: RunSpec, command: Ban, now: float) -> None:
    _check_peer_id(command.peer)
    if command.peer in transaction.state.banned:
        return
    transaction.add(PeerBanned(now, command.peer, command.reason))
    known = transaction.state.peers.get(command.peer)
    if known is not None and known.is_live:
        transaction.add(PeerLeft(now, command.peer, f"banned: {command.reason}", finished=False))
        _membership_changed(transaction, spec, now)


def _is_repeated(state: State, former: Peer, command: Join) -> bool:
    """Whether this is the same join once more, after its answer was lost: no heartbeat has followed it."""
    same = (former.role, former.capacity, former.endpoint) == (
        command.role,
        command.capacity,
        command.endpoint,
    )
    return same and not state.last_seen[former.peer].has_sent_heartbeat


def _require_room(state: State, spec: RunSpec, command: Join) -> None:
    peers = state.staying
    policy = policy_of(command.role)
    total = policy.peers_needed(spec)
    if sum(peer.role is command.role for peer in peers) < total:
        return
    short = missing(peers, spec)
    waiting = group(peers, spec, 1, 1, 0, state.estimates)
    is_open = isinstance(waiting, Waiting) and (command.endpoint or not waiting.unreachable)
    if not short and policy.joins_pipelines and is_open:
        return  # one more may let two others be connected, or have the memory that they lack
    raise HetnodeError(
        ErrorCode.RUN_FULL,
        f"The run takes {total} peer{'' if total == 1 else 's'} of role {command.role.value} "
        f"and has them; it still waits for {short or 'a stage peer with an endpoint'}.",
        "Join in a role that is missing, or when the run has started: then it takes in more.",
    )


def _leave(transaction: Transaction, spec: RunSpec, command: Leave, now: float) -> None:
    known = transaction.state.peers.get(command.peer)
    if known is not None and not known.is_live:
        return
    live_peer(transaction.state, command.peer)
    finished = command.reason == FINISHED and has_attested_last(transaction.state, spec, command.peer)
    transaction.add(PeerLeft(now, command.peer, command.reason, finished))
    _membership_changed(transaction, spec, now)


def _retreat(transaction: Transaction, spec: RunSpec, command: Retreat, now: float) -> None:
    """Nobody waits for a replica that cannot go on. Of no effect after its plan, or without a seat in it."""
    state = transaction.state
    live_peer(state, command.peer)
    runs = state.plans and state.plan_for(state.current_round).epoch <= command.epoch <= state.plans[-1].epoch
    has_seat = command.peer in state.assignments.get(command.epoch, {})
    if runs and has_seat and command.peer not in state.absent.get(command.epoch, ()):
        transaction.add(PeerRetreated(now, command.peer, command.epoch, command.reason))
        _advance_all(transaction, spec, now)


def _report(transaction: Transaction, spec: RunSpec, command: Report, now: float) -> None:
    held, rejected = command.held, command.rejected
    report(transaction, spec, command.peer, command.stage, command.round_number, held, rejected, now)


def _attest(transaction: Transaction, spec: RunSpec, command: Attest, now: float) -> None:
    before = len(transaction.events)
    attest(
        transaction,
        spec,
        command.peer,
        command.stage,
        command.round_number,
        command.part,
        command.digest,
        now,
    )
    if any(isinstance(event, AnchorDiverged) for event in transaction.events[before:]):
        _advance_all(transaction, spec, now)
    else:
        resume(transaction, spec, now)
        _finish(transaction, spec, now)


def _tick(transaction: Transaction, spec: RunSpec, now: float) -> None:
    started_at = transaction.state.started_at
    before = len(transaction.events)
    for peer in transaction.state.peers.values():
        silent = now - max(transaction.state.last_seen[peer.peer].at, started_at)
        if peer.is_live and silent > spec.timing.lost_after:
            transaction.add(PeerLost(now, peer.peer, silent))
    if len(transaction.events) > before:
        _membership_changed(transaction, spec, now)
    elif transaction.state.phase is RunPhase.GATHERING:
        if now < transaction.state.latest_at + 2 * _SPEED_SECONDS:  # later nothing is new
            _begin(transaction, spec, now)
    else:
        _advance_all(transaction, spec, now)


def _membership_changed(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """A place may have opened, for which a spare waits."""
    if transaction.state.phase is RunPhase.TRAINING:
        reserve_assignments(transaction, spec, now)
    _advance_all(transaction, spec, now)


def _advance_all(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """Who is gone is waited for no longer, at any stage, and who has come may end a stall."""
    for stage in range(spec.swarm.stages):
        advance(transaction, spec, stage, now)
    resume(transaction, spec, now)
    _finish(transaction, spec, now)


def _finish(transaction: Transaction, spec: RunSpec, now: float) -> None:
    state = transaction.state
    all_decided = state.current_round > spec.rounds
    confirmed = all_decided and not unconfirmed(state, spec) and not unattested(state, spec)
    if state.phase is RunPhase.TRAINING and confirmed:
        transaction.add(RunFinished(now))
