"""Decides commands: ``decide(state, command, now)`` returns events, and a refusal if there is one.

The function is pure: the same arguments always give the same outcome. Each command has one rule: in
coordinator.membership or coordinator.run.rounds, or, where it is the operator's, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from coordinator import pausing
from coordinator.changing import change_run
from coordinator.membership import invites, naming, owners, presence, reachability
from coordinator.membership.evaluations import take_evaluation
from coordinator.membership.joining import SPEED_SECONDS, join, start_run
from coordinator.membership.open_places import ask_place
from coordinator.membership.scores import weigh
from coordinator.placement.repair import repair
from coordinator.placement.reservations import reserve_assignments
from coordinator.rollback import roll_back
from coordinator.run.rounds.attestation import attest, unattested, unconfirmed
from coordinator.run.rounds.rounds import advance, arbitrate, offer, report, resume, withhold
from coordinator.run.state import commands, events
from coordinator.run.state.commands import Command
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Step, Transaction
from protocol.errors import HetnodeError
from protocol.status import ModelEvaluation, RunPhase

_MEMBERSHIP_EVENTS = {
    events.PeerJoined,
    events.AddressesChanged,
    events.PeerLeft,
    events.PeerDraining,
    events.PeerLost,
}


@dataclass(frozen=True)
class Applied:
    """The state after a command, its events, and its refusal if there is one.

    Events of a refused command count, too: `state` contains them.
    """

    state: State
    steps: tuple[Step, ...] = ()
    refusal: HetnodeError | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(step.event for step in self.steps)


def decide(state: State, command: Command, now: float) -> Applied:
    """The outcome of `command` at time `now`, in seconds on the clock of the events. Never raises."""
    transaction = Transaction(state, now)
    try:
        _RULES[type(command)](transaction, command)
        _follow_up(transaction, command)
    except HetnodeError as refusal:
        # Strikes and divergences that a rule added before its refusal must not get lost.
        return Applied(transaction.state, tuple(transaction.steps), refusal)
    return Applied(transaction.state, tuple(transaction.steps))


def _tick(transaction: Transaction, command: commands.Tick) -> None:
    any_lost = presence.remove_silent_peers(transaction, command)
    state = transaction.state
    # Later ticks would repeat the same search: all speeds have arrived by then, or will not arrive.
    may_start = state.phase is RunPhase.GATHERING and transaction.now < state.latest_at + 2 * SPEED_SECONDS
    if may_start and not any_lost:
        start_run(transaction)


def _join(transaction: Transaction, command: commands.Join) -> None:
    naming.check_name(command.name)
    join(transaction, command)
    naming.take_name(transaction, command.peer, command.name)


def _tell_own_relay(transaction: Transaction, command: commands.TellOwnRelay) -> None:
    uplinks = {command.endpoint: command.uplink} if command.uplink else {}
    if transaction.state.own_uplinks != uplinks:
        transaction.add(events.OwnRelayTold(transaction.now, command.endpoint, command.uplink))


def _appoint_arbiter(transaction: Transaction, command: commands.AppointArbiter) -> None:
    if transaction.state.arbiter != command.peer:
        transaction.add(events.ArbiterAppointed(transaction.now, command.peer))


_RULES: dict[type[Command], Callable[[Transaction, Any], None]] = {
    commands.Start: lambda transaction, command: transaction.add(
        events.CoordinatorStarted(transaction.now, max(transaction.state.term, command.term))
    ),
    commands.TellOwnRelay: _tell_own_relay,
    commands.AppointArbiter: _appoint_arbiter,
    commands.Tick: _tick,
    commands.CreateInvite: invites.create,
    commands.RevokeInvite: invites.revoke,
    commands.Enroll: invites.enroll,
    commands.AskPlace: ask_place,
    commands.Ban: presence.ban,
    commands.Unban: presence.unban,
    commands.Unname: naming.unname,
    commands.Join: _join,
    commands.BindOwner: owners.bind,
    commands.Heartbeat: presence.heartbeat,
    commands.UpdateAddresses: reachability.update_addresses,
    commands.ReportLink: reachability.report_link,
    commands.Leave: presence.leave,
    commands.Drain: presence.drain,
    commands.Retreat: presence.retreat,
    commands.Offer: offer,
    commands.Await: withhold,
    commands.Report: report,
    commands.Arbitrate: arbitrate,
    commands.Attest: attest,
    commands.Weigh: weigh,
    commands.RaiseAlarm: pausing.raise_alarm,
    commands.PauseRun: pausing.pause,
    commands.ResumeRun: pausing.resume,
    commands.ChangeRun: change_run,
    commands.RollBack: roll_back,
    ModelEvaluation: take_evaluation,
}
assert _RULES.keys() == set(get_args(Command)), "each kind of command has one rule"


def _follow_up(transaction: Transaction, command: Command) -> None:
    """Do what has become possible by the events of `command`: fill vacancies, end waiting, end the run."""
    kinds = {type(event) for event in transaction.events}
    membership_changed = not kinds.isdisjoint(_MEMBERSHIP_EVENTS)
    if events.AddressesChanged in kinds and transaction.state.phase is RunPhase.GATHERING:
        start_run(transaction)
    if membership_changed and transaction.state.phase is RunPhase.TRAINING:
        reserve_assignments(transaction)  # a peer that came or left may make room for a spare
    # Offers and reports advance their stage themselves, also if they have found a divergence.
    has_diverged = isinstance(command, commands.Attest) and events.AnchorDiverged in kinds
    is_unlinked = not kinds.isdisjoint({events.PeerRetreated, events.LinkFailed})
    if membership_changed or has_diverged or is_unlinked or isinstance(command, commands.Tick):
        repair(transaction)
        # A round does not wait for a peer that is gone, has diverged or retreated, nor beyond a deadline.
        for stage in range(transaction.state.stages):
            advance(transaction, stage)
    elif isinstance(command, commands.Attest):
        repair(transaction)  # a peer that has caught up can take the seat of a lost member
    else:
        return  # nothing else can end a stall or the run, and these checks cost time on every heartbeat
    resume(transaction)
    _finish(transaction)


def _finish(transaction: Transaction) -> None:
    state = transaction.state
    all_decided = state.current_round > state.spec.rounds
    if not all_decided or state.phase is not RunPhase.TRAINING:
        return
    # Nodes serve each other until then: members that are behind get what they lack, in bounded time.
    is_late = transaction.now - state.began_at > state.spec.timing.decide
    # The last anchor of every stage must have a holder that attested it, or its result could be lost.
    if (is_late or next(unconfirmed(state), None) is None) and not unattested(state):
        transaction.add(events.RunFinished(transaction.now))
