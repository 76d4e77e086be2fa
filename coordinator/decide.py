"""What a command leads to: ``decide(state, command, now) -> events, and the refusal if there is one``.

Pure: the clock is an argument, and the same state, command and time always give the same outcome. Each
command has one rule, in coordinator.membership or coordinator.rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from coordinator.membership import invites
from coordinator.membership.heartbeats import heartbeat, remove_silent_peers
from coordinator.membership.joining import SPEED_SECONDS, join, start_run
from coordinator.membership.leaving import ban, drain, leave, retreat, unban
from coordinator.placement.vacancies import reserve_assignments
from coordinator.rounds.attestation import attest, unattested, unconfirmed
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
    CoordinatorStarted,
    Event,
    PeerDraining,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerRetreated,
    RunFinished,
)
from coordinator.state.state import State
from coordinator.state.transaction import Transaction
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import RunPhase

_MEMBERSHIP_EVENTS = (PeerJoined, PeerLeft, PeerDraining, PeerLost)


@dataclass(frozen=True)
class Outcome:
    """The events of a command, and its refusal if there is one. The events count also where it is refused."""

    events: tuple[Event, ...]
    refusal: HetnodeError | None = None


def decide(state: State, spec: RunSpec, command: Command, now: float) -> Outcome:
    """What `command` leads to at time `now` (seconds, on the clock of the recorded events). Never raises."""
    transaction = Transaction(state)
    try:
        _apply_rule(transaction, spec, command, now)
        _follow_up(transaction, spec, command, now)
    except HetnodeError as refusal:
        return Outcome(tuple(transaction.events), refusal)
    return Outcome(tuple(transaction.events))


def _apply_rule(  # noqa: PLR0912
    transaction: Transaction, spec: RunSpec, command: Command, now: float
) -> None:
    match command:
        case Start():
            transaction.add(CoordinatorStarted(now))
        case CreateInvite():
            invites.create(transaction, command, now)
        case RevokeInvite():
            invites.revoke(transaction, command, now)
        case Enroll():
            invites.enroll(transaction, command, now)
        case Join():
            join(transaction, spec, command, now)
        case Heartbeat():
            heartbeat(transaction, command, now)
        case Leave():
            leave(transaction, spec, command, now)
        case Drain():
            drain(transaction, command, now)
        case Retreat():
            retreat(transaction, command, now)
        case Ban():
            ban(transaction, command, now)
        case Unban():
            unban(transaction, command, now)
        case Offer():
            offer(transaction, spec, command, now)
        case Await():
            withhold(transaction, spec, command, now)
        case Report():
            report(transaction, spec, command, now)
        case Attest():
            attest(transaction, command, now)
        case Tick():
            _tick(transaction, spec, now)
        case _:
            assert_never(command)


def _tick(transaction: Transaction, spec: RunSpec, now: float) -> None:
    any_lost = remove_silent_peers(transaction, spec, now)
    state = transaction.state
    # Later nothing is new: the speeds that the start waits for have been reported by then, or never will be.
    may_start = state.phase is RunPhase.GATHERING and now < state.latest_at + 2 * SPEED_SECONDS
    if may_start and not any_lost:
        start_run(transaction, spec, now)


def _follow_up(transaction: Transaction, spec: RunSpec, command: Command, now: float) -> None:
    """What is due after the rule of `command`.

    A peer that came or left may open a position for a spare. A round no longer waits for a peer that is gone
    or has diverged. A peer that came or has caught up may end a stall, and the last attestation ends the run.
    """
    events = transaction.events
    membership_changed = any(isinstance(event, _MEMBERSHIP_EVENTS) for event in events)
    if membership_changed and transaction.state.phase is RunPhase.TRAINING:
        reserve_assignments(transaction, spec, now)
    has_diverged = isinstance(command, Attest) and any(isinstance(event, AnchorDiverged) for event in events)
    has_retreated = any(isinstance(event, PeerRetreated) for event in events)
    if membership_changed or has_diverged or has_retreated or isinstance(command, Tick):
        for stage in range(spec.swarm.stages):
            advance(transaction, spec, stage, now)
    elif not isinstance(command, Attest):
        return
    resume(transaction, spec, now)
    _finish(transaction, spec, now)


def _finish(transaction: Transaction, spec: RunSpec, now: float) -> None:
    state = transaction.state
    all_decided = state.current_round > spec.rounds
    confirmed = all_decided and not unconfirmed(state, spec) and not unattested(state, spec)
    if state.phase is RunPhase.TRAINING and confirmed:
        transaction.add(RunFinished(now))
