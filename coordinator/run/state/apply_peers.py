"""Changes of the state when peers join, measure, leave, retreat, are unbanned or use an invite."""

from __future__ import annotations

from collections.abc import Set

from coordinator.base.replacing import replace
from coordinator.run.state import events
from coordinator.run.state.records import Break, FailedLink, Invitation, LastSeen, OpenPlace, Peer
from coordinator.run.state.state import APART_ROUNDS, State
from protocol.roles import POLICIES
from protocol.status import RunPhase
from protocol.trust.invite import OPEN_INVITE
from protocol.types import Estimates, Lifecycle, PeerId, Reachability


def join(state: State, event: events.PeerJoined) -> State:
    """A peer that comes back starts anew: it may have lost its anchors, its estimates and its stages."""
    arrival = state.arrivals + 1
    # Before the run starts there is no anchor to follow.
    lifecycle = Lifecycle.READY if state.phase is RunPhase.GATHERING else Lifecycle.SYNCING
    # In logs of earlier versions only peers with neighbours named an endpoint.
    claims_open = event.endpoint or not POLICIES[event.role].joins_pipelines
    peer = Peer(
        event.peer,
        event.role,
        event.capacity,
        event.endpoint,
        arrival,
        lifecycle,
        joined_at=event.at,
        reachability=event.reachability or (Reachability.OPEN if claims_open else Reachability.DIAL_ONLY),
        claimed=event.claimed or event.endpoint,
        problem=event.problem,
        role_reason=event.role_reason,
        waits_since=state.current_round,
    )
    return replace(
        state,
        arrivals=arrival,
        peers=state.peers.set(event.peer, peer),
        last_seen=state.last_seen.set(event.peer, LastSeen(event.at)),
        estimates=state.estimates.set(event.peer, Estimates(event.capacity)),
        report_times=state.report_times.set(event.peer, (0, event.at)),
        reservations=state.reservations.without(event.peer),
        promised=state.promised.without(event.peer),
        synced=state.synced.without(event.peer),
        diverged=frozenset(found for found in state.diverged if found[0] != event.peer),
        failed_links=_without(state, event.peer),
        breaks={peer: each for peer, each in state.breaks.items() if peer != event.peer},
    )


def change_role(state: State, event: events.RoleChanged) -> State:
    """The peer has another role; its reservation follows by itself."""
    known, has_started = state.peers[event.peer], state.phase is not RunPhase.GATHERING
    peer = replace(
        known,
        role=event.role,
        role_reason=event.reason,
        waits_since=state.current_round,
        role_changes=known.role_changes + has_started,
    )
    # A stage node builds its stages anew, so no plan may count on it before it attests them again.
    synced = state.synced.without(event.peer) if peer.policy.joins_pipelines else state.synced
    return replace(state, peers=state.peers.set(event.peer, peer), synced=synced)


def fail_link(state: State, event: events.LinkFailed) -> State:
    replica = state.assignments[event.epoch][event.peer].replica.index
    told = event.address, event.reason
    link = FailedLink(event.epoch, replica, state.current_round, *told, since=event.since)
    oldest = state.current_round - APART_ROUNDS
    known = {
        ends: each
        for ends, each in state.failed_links.items()
        if not each.is_of_frames or each.round_number > oldest
    }
    state = replace(state, failed_links={**known, (event.peer, event.neighbour): link})
    if link.is_of_frames:  # nobody knows which end is at fault: who delivers with others is forgiven
        state = count_failure(count_failure(state, event.peer), event.neighbour)
    return state


def change_addresses(state: State, event: events.AddressesChanged) -> State:
    peer = replace(
        state.peers[event.peer],
        endpoint=event.endpoint,
        reachability=event.reachability,
        claimed=event.claimed,
        problem=event.problem,
        moved_in=state.current_round,
    )
    failed_links = {
        ends: replace(link, is_moved=True) if event.peer in ends and not link.is_of_frames else link
        for ends, link in state.failed_links.items()
    }
    state = replace(state, peers=state.peers.set(event.peer, peer), failed_links=failed_links)
    return _excuse_neighbours(state, event.peer)


def _excuse_neighbours(state: State, moved: PeerId) -> State:
    """Members of the replica of a peer that has `moved`, if they failed in this round, have lost its link."""
    newest = state.plans[-1] if state.plans else None
    replica = newest.replica_of(moved) if newest else None
    if replica is None:
        return state
    failures = dict(state.failures)
    for member in replica.members:
        times, last = failures.get(member.peer, (0, 0))
        if member.peer != moved and times and last == state.current_round:
            failures[member.peer] = (times - 1, 0)
    return replace(state, failures={peer: each for peer, each in failures.items() if each[0]})


def _without(state: State, peer: PeerId) -> dict[tuple[PeerId, PeerId], FailedLink]:
    """The failed links that still matter when `peer` joins again."""
    return {ends: link for ends, link in state.failed_links.items() if peer not in ends or link.is_of_frames}


def measure(state: State, event: events.PeerMeasured) -> State:
    reports, _ = state.report_times.get(event.peer, (0, 0.0))
    return replace(
        state,
        estimates=state.estimates.set(event.peer, event.estimates),
        report_times=state.report_times.set(event.peer, (reports + 1, event.at)),
    )


def drain(state: State, event: events.PeerDraining) -> State:
    draining = replace(state.peers[event.peer], lifecycle=Lifecycle.DRAINING)
    return replace(state, peers=state.peers.set(event.peer, draining))


def leave(state: State, peer: PeerId, finished: bool) -> State:
    """The peer is gone. It counts as a failure unless its work was done or it drained."""
    known = state.peers[peer]
    gone = replace(known, lifecycle=Lifecycle.GONE, finished=finished)
    state = replace(state, peers=state.peers.set(peer, gone))
    drained = known.lifecycle is Lifecycle.DRAINING
    if finished or (drained and _has_done_its_part(state, peer)):
        return state  # no replica has lost a member
    state = mark_absent(state, peer)
    # A drain was announced, so it is no failure even if the peer left before the end of its round.
    return state if drained else count_failure(state, peer)


def retreat(state: State, event: events.PeerRetreated) -> State:
    """The peer gives up its assignment under one plan, and follows until a later plan assigns it."""
    absent = state.absent.get(event.epoch, frozenset())
    replica = state.assignments[event.epoch][event.peer].replica
    is_newest = event.epoch == state.plans[-1].epoch
    # After the loss of a neighbour, a retreat is not the fault of the peer. Neither is one under an old plan,
    # nor where a link could not be opened, which may be the fault of neither end, nor where another member
    # has other addresses now, so that its links have ended.
    has_links = not any(
        each.epoch == event.epoch and each.replica == replica.index for each in state.failed_links.values()
    )
    others = [state.peers[member.peer] for member in replica.members if member.peer != event.peer]
    has_peers = not any(each.peer in absent or each.moved_in == state.current_round for each in others)
    if is_newest and has_links and has_peers and event.peer not in absent:
        state = count_failure(state, event.peer)
    state = mark_absent(state, event.peer, event.epoch)
    state = replace(state, breaks={**state.breaks, event.peer: Break(event.at, event.steps, state.epoch)})
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
    # The plan of the current round, and perhaps one for the next round.
    running = range(state.plan_for(state.current_round).epoch, state.epoch + 1)
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
    waiting = replace(known, lifecycle=Lifecycle.SYNCING, waits_since=state.current_round)
    return replace(state, peers=state.peers.set(peer, waiting))


def rename(state: State, event: events.PeerNamed) -> State:
    return replace(state, names=state.names.set(event.peer, None if event.refused else event.name))


def bind_owner(state: State, event: events.OwnerBound) -> State:
    peer, owner = event.binding.peer, event.binding.owner
    return replace(state, owners=state.owners.set(peer, (*state.owners.get(peer, ()), owner)))


def ban(state: State, event: events.PeerBanned) -> State:
    """The peer is banned; a PeerLeft event follows if it is live."""
    return replace(state, banned={**state.banned, event.peer: event.reason})


def unban(state: State, event: events.PeerUnbanned) -> State:
    """The peer may come back. Its quarantine ends, too, and its strikes no longer count."""
    banned = {each: reason for each, reason in state.banned.items() if each != event.peer}
    strikes = {each: rounds for each, rounds in state.strikes.items() if each != event.peer}
    return replace(state, banned=banned, strikes=strikes, quarantined=state.quarantined - {event.peer})


def strike(state: State, event: events.PeerStruck) -> State:
    rounds = (*state.strikes.get(event.peer, ()), event.round_number)
    return replace(state, strikes={**state.strikes, event.peer: rounds})


def weigh(state: State, event: events.PeerWeighed) -> State:
    without = state.discounted - {event.peer}
    return replace(state, discounted=without if event.counts else without | {event.peer})


def quarantine(state: State, event: events.PeerQuarantined) -> State:
    quarantined = state.quarantined | {event.peer}
    return replace(leave(state, event.peer, finished=False), quarantined=quarantined)


def create_invitation(state: State, event: events.InviteCreated) -> State:
    told = event.invite, event.secret_sha256, event.uses, event.expires_at, event.role
    return _with_invitation(state, Invitation(*told))


def use_invitation(state: State, event: events.InviteUsed) -> State:
    former = state.invitations[event.invite]
    if event.peer in state.open_places:  # the operator vouches for it now
        state = _without_places(state, {event.peer})
    state = replace(state, enrolled=state.enrolled.set(event.peer, event.invite))
    return _with_invitation(state, replace(former, peers=(*former.peers, event.peer)))


def ask_place(state: State, event: events.PlaceAsked) -> State:
    """Who is new counts for nothing. A certificate outlives a place, so `enrolled` keeps who had one."""
    state, peer = _without_places(state, set(event.ended)), event.peer
    known = state.open_places.get(peer)
    place = OpenPlace(known.since if known else event.at, event.at, event.source, event.admitted)
    return replace(
        state,
        open_places={**state.open_places, peer: place},
        discounted=state.discounted if known else state.discounted | {peer},
        enrolled=state.enrolled.set(peer, OPEN_INVITE) if event.admitted else state.enrolled,
    )


def _without_places(state: State, peers: Set[PeerId]) -> State:
    places = {peer: each for peer, each in state.open_places.items() if peer not in peers}
    return replace(state, open_places=places, discounted=state.discounted - peers)


def revoke_invitation(state: State, event: events.InviteRevoked) -> State:
    return _with_invitation(state, replace(state.invitations[event.invite], revoked=True))


def _with_invitation(state: State, invitation: Invitation) -> State:
    return replace(state, invitations={**state.invitations, invitation.invite: invitation})


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


def count_failure(state: State, peer: PeerId) -> State:
    """`peer` has failed once more, and rests if that was not its first failure."""
    times, last = state.failures.get(peer, (0, 0))
    if last == state.current_round:  # one failure may be reported in several ways in the same round
        return state
    silence = state.silences.get(peer)
    times = silence.failures(times) if silence else times + 1
    return replace(state, failures={**state.failures, peer: (times, state.current_round)})
