"""How an event changes the state: the state is the result of all events so far.

The changes are grouped by what they concern: apply_peers, apply_plans and apply_rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import assert_never

from coordinator.state import apply_peers, apply_plans, apply_rounds
from coordinator.state.events import (
    AnchorDiverged,
    AssignmentReserved,
    CoordinatorStarted,
    DigestAttested,
    Event,
    GroupClosed,
    HoldingsReported,
    InviteCreated,
    InviteRevoked,
    InviteUsed,
    PayloadOffered,
    PayloadRejected,
    PayloadWithheld,
    PeerBanned,
    PeerDraining,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerMeasured,
    PeerQuarantined,
    PeerRetreated,
    PeerSeen,
    PeerStruck,
    PeerUnbanned,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from coordinator.state.state import LastSeen, State
from protocol.status import RunPhase
from protocol.types import Lifecycle


def replay(state: State, events: Iterable[Event]) -> State:
    """`state` after all of `events`, in their order."""
    return reduce(apply, events, state)


def apply(state: State, event: Event) -> State:
    """`state` after `event`. Every event that was decided on `state` can be applied to it."""
    changed = _changed(state, event)
    # Heartbeats are not stored, so they must not change what a replay leads to.
    is_newest = not isinstance(event, PeerSeen) and event.at > changed.latest_at
    return replace(changed, latest_at=event.at) if is_newest else changed


def _changed(state: State, event: Event) -> State:  # noqa: PLR0911, PLR0912
    match event:
        case CoordinatorStarted():
            return replace(state, started_at=event.at)
        case PeerJoined():
            return apply_peers.join(state, event)
        case PeerSeen():
            seen = LastSeen(event.at, event.round_number, event.inner_step, has_sent_heartbeat=True)
            return replace(state, last_seen={**state.last_seen, event.peer: seen})
        case PeerMeasured():
            return apply_peers.measure(state, event)
        case PeerDraining():
            draining = replace(state.peers[event.peer], lifecycle=Lifecycle.DRAINING)
            return replace(state, peers={**state.peers, event.peer: draining})
        case PeerLeft():
            return apply_peers.leave(state, event.peer, event.finished)
        case PeerLost():
            return apply_peers.leave(state, event.peer, finished=False)
        case PeerRetreated():
            return apply_peers.retreat(state, event)
        case PeerBanned():
            return replace(state, banned={**state.banned, event.peer: event.reason})
        case PeerUnbanned():
            return apply_peers.unban(state, event.peer)
        case PeerStruck():
            rounds = (*state.strikes.get(event.peer, ()), event.round_number)
            return replace(state, strikes={**state.strikes, event.peer: rounds})
        case PeerQuarantined():
            quarantined = state.quarantined | {event.peer}
            return replace(apply_peers.leave(state, event.peer, finished=False), quarantined=quarantined)
        case InviteCreated() | InviteUsed() | InviteRevoked():
            return apply_peers.change_invitation(state, event)
        case AssignmentReserved():
            return apply_plans.reserve(state, event.reservation)
        case PlanAdopted():
            return apply_plans.adopt(state, event.plan, event.at)
        case PayloadOffered():
            return apply_rounds.offer(state, event)
        case PayloadWithheld():
            return apply_rounds.withhold(state, event)
        case GroupClosed():
            return apply_rounds.close_group(state, event)
        case HoldingsReported():
            return apply_rounds.report(state, event)
        case PayloadRejected():
            return apply_rounds.reject(state, event)
        case RoundCommitted() | RoundAborted():
            return apply_rounds.decide(state, event.at, event.decision)
        case DigestAttested():
            return apply_rounds.attest(state, event)
        case AnchorDiverged():
            return apply_rounds.diverge(state, event)
        case RunFinished():
            return replace(state, phase=RunPhase.FINISHED, finished_at=event.at)
        case _:
            assert_never(event)
