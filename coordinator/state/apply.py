"""Applies events to the state: the state is the result of all events so far.

The longer changes are in apply_peers, apply_plans and apply_rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import assert_never

from coordinator.state import apply_peers, apply_plans, apply_rounds, events
from coordinator.state.events import Event
from coordinator.state.state import LastSeen, State
from protocol.status import RunPhase


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
    match event:
        case events.CoordinatorStarted() | events.OwnRelayTold():
            return _start(state, event)
        case events.PeerJoined():
            return apply_peers.join(state, event)
        case events.RoleChanged():
            return apply_peers.change_role(state, event)
        case events.AddressesChanged() | events.LinkFailed():
            return apply_peers.change_connection(state, event)
        case events.PeerSeen():
            # `last_seen` is the one part of the state that a restart loses.
            seen = LastSeen(event.at, event.round_number, event.inner_step, has_sent_heartbeat=True)
            return replace(state, last_seen={**state.last_seen, event.peer: seen})
        case events.PeerMeasured():
            return apply_peers.measure(state, event)
        case events.PeerDraining():
            return apply_peers.drain(state, event.peer)
        case events.PeerLeft() | events.PeerLost():
            return apply_peers.leave(state, event.peer, isinstance(event, events.PeerLeft) and event.finished)
        case events.PeerRetreated():
            return apply_peers.retreat(state, event)
        case events.PeerBanned():  # a PeerLeft event follows for a live peer
            return replace(state, banned={**state.banned, event.peer: event.reason})
        case events.PeerUnbanned():
            return apply_peers.unban(state, event.peer)
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
        case events.PlanAdopted():
            return apply_plans.adopt(state, event.plan, event.at)
        case events.PayloadOffered():
            return apply_rounds.offer(state, event)
        case events.PayloadWithheld():
            return apply_rounds.withhold(state, event)
        case events.GroupClosed():
            return apply_rounds.close_group(state, event)
        case events.HoldingsReported():
            return apply_rounds.report(state, event)
        case events.PayloadRejected():
            return apply_rounds.reject(state, event)
        case events.ArbiterAppointed() | events.PayloadsContested() | events.PayloadArbitrated():
            return apply_rounds.arbitrate(state, event)
        case events.RoundCommitted() | events.RoundAborted():
            return apply_rounds.decide(state, event.at, event.decision)
        case events.DigestAttested():
            return apply_rounds.attest(state, event)
        case events.AnchorDiverged():
            return apply_rounds.diverge(state, event)
        case events.RunFinished():
            return replace(state, phase=RunPhase.FINISHED, finished_at=event.at)
        case _:
            assert_never(event)


def _start(state: State, event: events.CoordinatorStarted | events.OwnRelayTold) -> State:
    if isinstance(event, events.CoordinatorStarted):
        return replace(state, started_at=event.at)
    return replace(state, own_uplinks={event.endpoint: event.uplink} if event.uplink else {})
