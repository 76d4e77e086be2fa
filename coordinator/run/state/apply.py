"""Applies events to the state: the state is the result of all events so far.

The longer changes are in apply_peers, apply_plans and apply_rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import assert_never

from coordinator.run.state import apply_peers, apply_plans, apply_rounds, events
from coordinator.run.state.events import Event
from coordinator.run.state.persistent_map import PersistentMap
from coordinator.run.state.replacing import replace
from coordinator.run.state.state import Alarm, LastSeen, State
from protocol.status import RunPhase
from protocol.types import Pause


def replay(state: State, events: Iterable[Event]) -> State:
    """`state` after all of `events`, in their order."""
    return reduce(apply, events, state)


def apply(state: State, event: Event) -> State:
    """`state` after `event`, which was decided on `state`. Never raises for such an event."""
    changed = _changed(state, event)
    # Heartbeats are not stored, so a replay without them must lead to the same state.
    is_newest = not isinstance(event, events.PeerSeen) and event.at > changed.latest_at
    return replace(changed, latest_at=event.at) if is_newest else changed


def _changed(state: State, event: Event) -> State:  # noqa: PLR0911, PLR0912
    if isinstance(event, events.RunEvent):
        return _change_run(state, event)
    match event:
        case events.PeerJoined():
            return apply_peers.join(state, event)
        case events.RoleChanged():
            return apply_peers.change_role(state, event)
        case events.AddressesChanged() | events.LinkFailed():
            return apply_peers.change_connection(state, event)
        case events.PeerSeen():
            # `last_seen` is the one part of the state that a restart loses.
            seen = LastSeen(event.at, event.round_number, event.inner_step, True, event.waits, event.kept)
            return replace(state, last_seen=state.last_seen.set(event.peer, seen))
        case events.PeerMeasured():
            return apply_peers.measure(state, event)
        case events.PeerDraining():
            return apply_peers.drain(state, event.peer)
        case events.PeerLeft() | events.PeerLost():
            return apply_peers.leave(state, event.peer, isinstance(event, events.PeerLeft) and event.finished)
        case events.PeerNamed():
            return apply_peers.rename(state, event)
        case events.PeerRetreated():
            return apply_peers.retreat(state, event)
        case events.PeerBanned() | events.PeerUnbanned():
            return apply_peers.change_ban(state, event)
        case events.PeerStruck():
            rounds = (*state.strikes.get(event.peer, ()), event.round_number)
            return replace(state, strikes={**state.strikes, event.peer: rounds})
        case events.PeerQuarantined():
            quarantined = state.quarantined | {event.peer}
            return replace(apply_peers.leave(state, event.peer, finished=False), quarantined=quarantined)
        case events.InviteCreated() | events.InviteUsed() | events.InviteRevoked():
            return apply_peers.change_invitation(state, event)
        case events.AssignmentReserved():
            return apply_plans.reserve(state, event.reservation)
        case events.PayloadOffered():
            return apply_rounds.offer(state, event)
        case events.PayloadWithheld():
            return apply_rounds.withhold(state, event)
        case events.GroupClosed():
            return apply_rounds.close_group(state, event)
        case events.HoldingsReported():
            return apply_rounds.report(state, event)
        case events.ResultReported():
            return apply_rounds.report_result(state, event)
        case events.PayloadRejected():
            return apply_rounds.reject(state, event)
        case events.ArbiterAppointed() | events.PayloadsContested() | events.PayloadArbitrated():
            return apply_rounds.arbitrate(state, event)
        case events.RoundDecided():
            return apply_rounds.decide(state, event)
        case events.DigestAttested():
            return apply_rounds.attest(state, event)
        case events.AnchorDiverged():
            return apply_rounds.diverge(state, event)
        case _:
            assert_never(event)


def _change_run(state: State, event: events.RunEvent) -> State:  # noqa: PLR0911
    match event:
        case events.CoordinatorStarted():
            return replace(state, started_at=event.at)
        case events.OwnRelayTold():
            return replace(state, own_uplinks={event.endpoint: event.uplink} if event.uplink else {})
        case events.PlanAdopted():
            return apply_plans.adopt(state, event.plan, event.at)
        case events.AlarmRaised():
            return replace(state, alarm=Alarm(event.round_number, event.last_healthy, event.reason))
        case events.RunPaused():
            return replace(state, pause=Pause(event.from_round, event.by, event.reason))
        case events.RunResumed():
            return _resume(state, event.at)
        case events.RunRolledBack():
            return _roll_back(state, event)
        case events.RunFinished():
            return replace(state, phase=RunPhase.FINISHED, finished_at=event.at)


def _resume(state: State, at: float) -> State:
    """Nobody could answer during the pause, so neither phases nor silences contain it."""
    if state.is_held:
        state = replace(state, began_at=at, answered=PersistentMap())
    # Who resumes a run has seen its alarm.
    alarm = None if state.alarm is None else replace(state.alarm, is_over=True)
    return replace(state, pause=None, silences={}, alarm=alarm)


def _roll_back(state: State, event: events.RunRolledBack) -> State:
    """The replicas of this round train nothing that counts, so their silence says nothing."""
    round_number = event.round_number
    digests = {(each.stage, round_number, each.part): each.digest for each in event.digests}
    return replace(
        state,
        restored={**state.restored, round_number: event.restore_round},
        restored_digests={**state.restored_digests, **digests},
        silences={},
    )
