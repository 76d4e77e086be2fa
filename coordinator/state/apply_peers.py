"""Changes of the state when peers join, measure, leave, retreat, are unbanned or use an invite."""

from __future__ import annotations

from dataclasses import replace

from coordinator.state.events import (
    InviteCreated,
    InviteRevoked,
    InviteUsed,
    PeerJoined,
    PeerMeasured,
    PeerRetreated,
)
from coordinator.state.state import Invitation, LastSeen, Peer, State
from protocol.status import RunPhase
from protocol.types import Estimates, Lifecycle, PeerId


def join(state: State, event: PeerJoined) -> State:
    """A peer that comes back starts anew: it may have lost its anchors, its estimates and its stages."""
    arrival = state.arrivals + 1
    # Before the run starts there is no anchor to follow.
    lifecycle = Lifecycle.READY if state.phase is RunPhase.GATHERING else Lifecycle.SYNCING
    peer = Peer(
        event.peer, event.role, event.capacity, event.endpoint, arrival, lifecycle, joined_at=event.at
    )
    return replace(
        state,
        arrivals=arrival,
        peers={**state.peers, event.peer: peer},
        last_seen={**state.last_seen, event.peer: LastSeen(event.at)},
        estimates={**state.estimates, event.peer: Estimates(event.capacity)},
        report_times={**state.report_times, event.peer: (0, event.at)},
        reservations={peer: each for peer, each in state.reservations.items() if peer != event.peer},
        synced={peer: rounds for peer, rounds in state.synced.items() if peer != event.peer},
        diverged=frozenset(found for found in state.diverged if found[0] != event.peer),
    )


def measure(state: State, event: PeerMeasured) -> State:
    reports, _ = state.report_times.get(event.peer, (0, 0.0))
    return replace(
        state,
        estimates={**state.estimates, event.peer: event.estimates},
        report_times={**state.report_times, event.peer: (reports + 1, event.at)},
    )


def leave(state: State, peer: PeerId, finished: bool) -> State:
    """The peer is gone. It counts as a failure unless its work was done or it drained."""
    known = state.peers[peer]
    gone = replace(known, lifecycle=Lifecycle.GONE, finished=finished)
    state = replace(state, peers={**state.peers, peer: gone})
    drained = known.lifecycle is Lifecycle.DRAINING
    if finished or (drained and _has_done_its_part(state, peer)):
        return state  # no replica has lost a member
    state = mark_absent(state, peer)
    # A drain was announced, so it is no failure even if the peer left before the end of its round.
    return state if drained else _count_failure(state, peer)


def retreat(state: State, event: PeerRetreated) -> State:
    """The peer gives up its assignment under one plan, and follows until a later plan assigns it."""
    absent = state.absent.get(event.epoch, frozenset())
    replica = state.assignments[event.epoch][event.peer].replica
    is_newest = event.epoch == state.plans[-1].epoch
    # After the loss of a neighbour, a retreat is not the fault of the peer. Neither is one under an old plan.
    if is_newest and not any(member.peer in absent for member in replica.members):
        state = _count_failure(state, event.peer)
    state = mark_absent(state, event.peer, event.epoch)
    times, last = state.retreats.get(replica.index, (0, 0))
    if last != state.current_round:  # the members of one replica retreat one after the other: count them once
        retreats = {**state.retreats, replica.index: (times + 1, state.current_round)}
        state = replace(state, retreats=retreats)
    is_assigned_later = not is_newest and event.peer in state.assignments[state.plans[-1].epoch]
    return state if is_assigned_later else follow(state, event.peer)


def mark_absent(state: State, peer: PeerId, only: int | None = None) -> State:
    """`peer` no longer takes part under the plans that still run, or under the plan of epoch `only`."""
    if not state.plans:
        return state
    # The plan of the current round, and perhaps one for the next round. Epochs count from 1.
    running = range(state.plan_for(state.current_round).epoch, len(state.plans) + 1)
    absent = {
        epoch: state.absent.get(epoch, frozenset()) | {peer}
        for epoch in running
        if peer in state.assignments[epoch] and only in (None, epoch)
    }
    return replace(state, absent={**state.absent, **absent})


def follow(state: State, peer: PeerId) -> State:
    """A training peer follows the rounds from now on. No effect on other peers."""
    known = state.peers[peer]
    if known.lifecycle is not Lifecycle.TRAINING:
        return state
    return replace(state, peers={**state.peers, peer: replace(known, lifecycle=Lifecycle.SYNCING)})


def unban(state: State, peer: PeerId) -> State:
    """The peer may come back. Its quarantine ends, too, and its strikes no longer count."""
    banned = {each: reason for each, reason in state.banned.items() if each != peer}
    strikes = {each: rounds for each, rounds in state.strikes.items() if each != peer}
    return replace(state, banned=banned, strikes=strikes, quarantined=state.quarantined - {peer})


def change_invitation(state: State, event: InviteCreated | InviteUsed | InviteRevoked) -> State:
    match event:
        case InviteCreated():
            invitation = Invitation(
                event.invite, event.secret_sha256, event.uses, event.expires_at, event.role
            )
        case InviteUsed():
            former = state.invitations[event.invite]
            invitation = replace(former, peers=(*former.peers, event.peer))
            state = replace(state, enrolled={**state.enrolled, event.peer: event.invite})
        case InviteRevoked():
            invitation = replace(state.invitations[event.invite], revoked=True)
    return replace(state, invitations={**state.invitations, event.invite: invitation})


def _has_done_its_part(state: State, peer: PeerId) -> bool:
    """Whether the newest plan does not assign `peer`, and its stages of the current round are decided."""
    if not state.plans:
        return True
    assignment = state.assignment(peer, state.current_round)
    decided = assignment is None or all(
        (stage, state.current_round) in state.decisions for stage in assignment.member.stages
    )
    # The plan may have been made before the drain was announced: then the next round waits for the peer.
    return decided and peer not in state.assignments[state.plans[-1].epoch]


def _count_failure(state: State, peer: PeerId) -> State:
    times, last = state.failures.get(peer, (0, 0))
    if last == state.current_round:  # one failure may be reported in several ways in the same round
        return state
    return replace(state, failures={**state.failures, peer: (times + 1, state.current_round)})
