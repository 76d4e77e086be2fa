"""Applies events to the state: the state is the result of all events so far.

The longer changes are in apply_peers, apply_plans and apply_rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, get_args

from coordinator.base.persistent_map import PersistentMap
from coordinator.base.replacing import replace
from coordinator.run.state import apply_peers, apply_plans, apply_rounds, events
from coordinator.run.state.events import Event
from coordinator.run.state.records import Alarm, LastSeen
from coordinator.run.state.state import State
from protocol.status import RunPhase
from protocol.types import Pause


def replay(state: State, events: Iterable[Event]) -> State:
    """`state` after all of `events`, in their order."""
    return reduce(apply, events, state)


def apply(state: State, event: Event) -> State:
    """`state` after `event`, which was decided on `state`. Never raises for such an event."""
    changed = _CHANGES[type(event)](state, event)
    # Heartbeats are not stored, so a replay without them must lead to the same state.
    is_newest = not isinstance(event, events.PeerSeen) and event.at > changed.latest_at
    return replace(changed, latest_at=event.at) if is_newest else changed


def _resume(state: State, event: events.RunResumed) -> State:
    """Phases and silences are counted without the pause, in which no peer could answer."""
    if state.is_held:
        state = replace(state, began_at=event.at, answered=PersistentMap())
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


def _see(state: State, event: events.PeerSeen) -> State:
    """A heartbeat changes `last_seen`, the one part of the state that a restart loses."""
    told = event.waits, event.kept, event.ahead
    seen = LastSeen(event.at, event.round_number, event.inner_step, True, *told)
    return replace(state, last_seen=state.last_seen.set(event.peer, seen))


_CHANGES: dict[type[Event], Callable[[State, Any], State]] = {
    events.CoordinatorStarted: lambda state, event: replace(state, started_at=event.at, term=event.term),
    events.OwnRelayTold: lambda state, event: replace(
        state, own_uplinks={event.endpoint: event.uplink} if event.uplink else {}
    ),
    events.PlanAdopted: apply_plans.adopt,
    events.AlarmRaised: lambda state, event: replace(
        state, alarm=Alarm(event.round_number, event.last_healthy, event.reason)
    ),
    events.RunChanged: lambda state, event: replace(
        state, changes=tuple(sorted((*state.changes, event.change), key=lambda each: each.from_round))
    ),
    events.ModelEvaluated: lambda state, event: replace(
        state, evaluations=state.evaluations.set(event.evaluation.key, event.evaluation)
    ),
    events.RunPaused: lambda state, event: replace(
        state, pause=Pause(event.from_round, event.by, event.reason)
    ),
    events.RunResumed: _resume,
    events.RunRolledBack: _roll_back,
    events.RunFinished: lambda state, event: replace(state, phase=RunPhase.FINISHED, finished_at=event.at),
    events.PeerJoined: apply_peers.join,
    events.RoleChanged: apply_peers.change_role,
    events.AddressesChanged: apply_peers.change_addresses,
    events.LinkFailed: apply_peers.fail_link,
    events.PeerSeen: _see,
    events.PeerMeasured: apply_peers.measure,
    events.PeerDraining: apply_peers.drain,
    events.PeerLeft: lambda state, event: apply_peers.leave(state, event.peer, event.finished),
    events.PeerLost: lambda state, event: apply_peers.leave(state, event.peer, finished=False),
    events.PeerNamed: apply_peers.rename,
    events.OwnerBound: apply_peers.bind_owner,
    events.PeerRetreated: apply_peers.retreat,
    events.PeerBanned: apply_peers.ban,
    events.PeerUnbanned: apply_peers.unban,
    events.PeerStruck: apply_peers.strike,
    events.PeerWeighed: apply_peers.weigh,
    events.PeerQuarantined: apply_peers.quarantine,
    events.InviteCreated: apply_peers.create_invitation,
    events.InviteUsed: apply_peers.use_invitation,
    events.InviteRevoked: apply_peers.revoke_invitation,
    events.PlaceAsked: apply_peers.ask_place,
    events.AssignmentReserved: apply_plans.reserve,
    events.PayloadOffered: apply_rounds.offer,
    events.PayloadWithheld: apply_rounds.withhold,
    events.GroupClosed: apply_rounds.close_group,
    events.HoldingsReported: apply_rounds.report,
    events.ResultReported: apply_rounds.report_result,
    events.PayloadRejected: apply_rounds.reject,
    events.ArbiterAppointed: lambda state, event: replace(state, arbiter=event.peer),
    events.PayloadsContested: apply_rounds.contest,
    events.PayloadArbitrated: apply_rounds.arbitrate,
    events.RoundDecided: apply_rounds.decide,
    events.DigestAttested: apply_rounds.attest,
    events.AnchorDiverged: apply_rounds.diverge,
}
"""By kind of event, what it changes."""
assert _CHANGES.keys() == set(get_args(Event)), "each kind of event changes something"
