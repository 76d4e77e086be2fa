"""Decides commands: ``decide(state, spec, command, now)`` returns events, and a refusal if there is one.

The function is pure: the same arguments always give the same outcome. Each command has one rule, in
coordinator.membership or coordinator.rounds.
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
from coordinator.state import commands, events
from coordinator.state.commands import Command
from coordinator.state.events import Event
from coordinator.state.state import State
from coordinator.state.transaction import Transaction
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import RunPhase

_MEMBERSHIP_EVENTS = {events.PeerJoined, events.PeerLeft, events.PeerDraining, events.PeerLost}


@dataclass(frozen=True)
class Outcome:
    """The events of a command, and its refusal if there is one. Events of a refused command count, too."""

    events: tuple[Event, ...]
    refusal: HetnodeError | None = None


def decide(state: State, spec: RunSpec, command: Command, now: float) -> Outcome:
    """The outcome of `command` at time `now`, in seconds on the clock of the events. Never raises."""
    transaction = Transaction(state)
    try:
        _apply_rule(transaction, spec, command, now)
        _follow_up(transaction, spec, command, now)
    except HetnodeError as refusal:
        # Strikes and divergences that a rule added before its refusal must not get lost.
        return Outcome(tuple(transaction.events), refusal)
    return Outcome(tuple(transaction.events))


def _apply_rule(  # noqa: PLR0912
    transaction: Transaction, spec: RunSpec, command: Command, now: float
) -> None:
    match command:
        case commands.Start():
            transaction.add(events.CoordinatorStarted(now))
        case commands.CreateInvite():
            invites.create(transaction, command, now)
        case commands.RevokeInvite():
            invites.revoke(transaction, command, now)
        case commands.Enroll():
            invites.enroll(transaction, command, now)
        case commands.Join():
            join(transaction, spec, command, now)
        case commands.Heartbeat():
            heartbeat(transaction, command, now)
        case commands.Leave():
            leave(transaction, spec, command, now)
        case commands.Drain():
            drain(transaction, command, now)
        case commands.Retreat():
            retreat(transaction, command, now)
        case commands.Ban():
            ban(transaction, command, now)
        case commands.Unban():
            unban(transaction, command, now)
        case commands.Offer():
            offer(transaction, spec, command, now)
        case commands.Await():
            withhold(transaction, spec, command, now)
        case commands.Report():
            report(transaction, spec, command, now)
        case commands.Attest():
            attest(transaction, command, now)
        case commands.Tick():
            _tick(transaction, spec, now)
        case _:
            assert_never(command)


def _tick(transaction: Transaction, spec: RunSpec, now: float) -> None:
    any_lost = remove_silent_peers(transaction, spec, now)
    state = transaction.state
    # Later ticks would repeat the same search: all speeds have arrived by then, or will not arrive.
    may_start = state.phase is RunPhase.GATHERING and now < state.latest_at + 2 * SPEED_SECONDS
    if may_start and not any_lost:
        start_run(transaction, spec, now)


def _follow_up(transaction: Transaction, spec: RunSpec, command: Command, now: float) -> None:
    """Do what has become possible by the events of `command`: fill vacancies, end waiting, end the run."""
    kinds = {type(event) for event in transaction.events}
    membership_changed = not kinds.isdisjoint(_MEMBERSHIP_EVENTS)
    if membership_changed and transaction.state.phase is RunPhase.TRAINING:
        reserve_assignments(transaction, spec, now)  # a peer that came or left may make room for a spare
    # Offers and reports advance their stage themselves, also if they have found a divergence.
    has_diverged = isinstance(command, commands.Attest) and events.AnchorDiverged in kinds
    has_retreated = events.PeerRetreated in kinds
    if membership_changed or has_diverged or has_retreated or isinstance(command, commands.Tick):
        # A round does not wait for a peer that is gone, has diverged or retreated, nor beyond a deadline.
        for stage in range(spec.swarm.stages):
            advance(transaction, spec, stage, now)
    elif not isinstance(command, commands.Attest):
        return  # nothing else can end a stall or the run, and these checks cost time on every heartbeat
    resume(transaction, spec, now)
    _finish(transaction, spec, now)


def _finish(transaction: Transaction, spec: RunSpec, now: float) -> None:
    state = transaction.state
    all_decided = state.current_round > spec.rounds
    # The last anchor of every stage must have a holder that attested it, or its result could be lost.
    confirmed = all_decided and not unconfirmed(state, spec) and not unattested(state, spec)
    if state.phase is RunPhase.TRAINING and confirmed:
        transaction.add(events.RunFinished(now))
