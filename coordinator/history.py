""":func:`apply` moves the state from event to event; the state is whatever the events so far lead to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import assert_never

from coordinator.events import (
    AnchorDiverged,
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
    PlaceGiven,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from coordinator.state import KEPT_ROUNDS, Invitation, Peer, Phase, Pulse, Round, Seat, State
from protocol.types import Decision, Estimates, Group, Lifecycle, Part, PeerId, Place, Plan


def replay(state: State, events: Iterable[Event]) -> State:
    """`state` after all of `events`, in their order."""
    return reduce(apply, events, state)


def apply(state: State, event: Event) -> State:
    """`state` after `event`. Total: any event that was decided on `state` can be applied to it."""
    moved = _moved(state, event)
    is_newest = not isinstance(event, PeerSeen) and event.at > moved.latest_at
    return replace(moved, latest_at=event.at) if is_newest else moved


def _moved(state: State, event: Event) -> State:  # noqa: PLR0911, PLR0912
    match event:
        case CoordinatorStarted():
            return replace(state, started_at=event.at)
        case PeerJoined():
            return _join(state, event)
        case PeerSeen():
            pulse = Pulse(event.at, event.round, event.inner_step, beating=True)
            return replace(state, pulses={**state.pulses, event.peer: pulse})
        case PeerMeasured():
            return replace(state, estimates={**state.estimates, event.peer: event.estimates})
        case PeerDraining():
            draining = replace(state.peers[event.peer], lifecycle=Lifecycle.DRAINING)
            return replace(state, peers={**state.peers, event.peer: draining})
        case PeerLeft():
            return _gone(state, event.peer, event.finished)
        case PeerLost():
            return _gone(state, event.peer, finished=False)
        case PeerRetreated():
            return _retreat(state, event)
        case PlaceGiven():
            return _place(state, event.place)
        case InviteCreated() | InviteUsed() | InviteRevoked():
            return _invitation(state, event)
        case PeerBanned():
            return replace(state, banned={**state.banned, event.peer: event.reason})
        case PeerUnbanned():
            return _unbanned(state, event.peer)
        case PlanAdopted():
            return _adopt(state, event.plan, event.at)
        case PayloadOffered():
            return _offer(state, event)
        case PayloadWithheld():
            round = state.round(event.stage, event.round)
            return _with_round(state, event, replace(round, withheld=round.withheld | {event.peer}))
        case GroupClosed():
            return _close(state, event)
        case HoldingsReported():
            return _report(state, event)
        case PayloadRejected():
            round = state.round(event.stage, event.round)
            reasons = {**round.rejections.get(event.owner, {}), event.peer: event.reason}
            rejections = {**round.rejections, event.owner: reasons}
            return _with_round(state, event, replace(round, rejections=rejections))
        case PeerStruck():
            rounds = (*state.strikes.get(event.peer, ()), event.round)
            return replace(state, strikes={**state.strikes, event.peer: rounds})
        case PeerQuarantined():
            quarantined = state.quarantined | {event.peer}
            return replace(_gone(state, event.peer, finished=False), quarantined=quarantined)
        case RoundCommitted() | RoundAborted():
            return _decided(state, event.at, event.decision)
        case DigestAttested():
            return _attest(state, event)
        case AnchorDiverged():
            return _diverge(state, event)
        case RunFinished():
            return replace(state, phase=Phase.FINISHED, finished_at=event.at)
        case _:
            assert_never(event)


class Draft:
    """A state in the making: what one command decides, event by event, each seen by the next step."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)


def _join(state: State, event: PeerJoined) -> State:
    """A peer that comes back starts anew: what it held before says nothing of it now."""
    arrival = state.arrivals + 1
    lifecycle = Lifecycle.READY if state.phase is Phase.GATHERING else Lifecycle.SYNCING
    peer = Peer(event.peer, event.role, event.capacity, event.endpoint, arrival, lifecycle)
    return replace(
        state,
        arrivals=arrival,
        peers={**state.peers, event.peer: peer},
        pulses={**state.pulses, event.peer: Pulse(event.at)},
        estimates={**state.estimates, event.peer: Estimates(event.capacity)},
        places={each: place for each, place in state.places.items() if each != event.peer},
        synced={each: rounds for each, rounds in state.synced.items() if each != event.peer},
        diverged=frozenset(found for found in state.diverged if found[0] != event.peer),
    )


def _gone(state: State, peer: PeerId, finished: bool) -> State:
    gone = replace(state.peers[peer], lifecycle=Lifecycle.GONE, finished=finished)
    state = replace(state, peers={**state.peers, peer: gone})
    return state if finished else _unseat(state, peer)


def _retreat(state: State, event: PeerRetreated) -> State:
    state = _unseat(state, event.peer, event.epoch)
    place = state.places.get(event.peer)
    if place is not None:
        times, last = state.retreats.get(place.replica, (0, 0))
        if last != state.current_round:  # its members give up one after the other
            retreats = {**state.retreats, place.replica: (times + 1, state.current_round)}
            state = replace(state, retreats=retreats)
    return _sync(state, event.peer) if event.epoch == state.plans[-1].epoch else state


def _unseat(state: State, peer: PeerId, only: int | None = None) -> State:
    """Its seats in the plans that still run, or in that of epoch `only`, count no longer."""
    if not state.plans:
        return state
    running = range(state.plan_for(state.current_round).epoch, len(state.plans) + 1)
    absent = {
        epoch: state.absent.get(epoch, frozenset()) | {peer}
        for epoch in running
        if peer in state.seats[epoch] and only in (None, epoch)
    }
    return replace(state, absent={**state.absent, **absent}) if absent else state


def _sync(state: State, peer: PeerId) -> State:
    known = state.peers[peer]
    if known.lifecycle is not Lifecycle.TRAINING:
        return state
    return replace(state, peers={**state.peers, peer: replace(known, lifecycle=Lifecycle.SYNCING)})


def _place(state: State, place: Place) -> State:
    where = (place.replica, place.position)
    others = {
        peer: former
        for peer, former in state.places.items()
        if peer != place.peer and (former.replica, former.position) != where
    }
    return replace(state, places={**others, place.peer: place})


def _unbanned(state: State, peer: PeerId) -> State:
    """The quarantine and its strikes are forgiven, too."""
    banned = {each: reason for each, reason in state.banned.items() if each != peer}
    strikes = {each: rounds for each, rounds in state.strikes.items() if each != peer}
    return replace(state, banned=banned, strikes=strikes, quarantined=state.quarantined - {peer})


def _invitation(state: State, event: InviteCreated | InviteUsed | InviteRevoked) -> State:
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


def _adopt(state: State, plan: Plan, at: float) -> State:
    """The first plan starts round 1; one for the current round starts that round anew."""
    seats = {
        member.peer: Seat(replica, position)
        for replica in plan.replicas
        for position, member in enumerate(replica.members)
    }
    peers = dict(state.peers)
    for each in state.peers.values():
        lifecycle = Lifecycle.TRAINING if each.peer in seats else Lifecycle.SYNCING
        if each.is_live and each.lifecycle not in (lifecycle, Lifecycle.DRAINING):
            peers[each.peer] = replace(each, lifecycle=lifecycle)
    places = {
        peer: Place(peer, seat.replica.index, seat.position, seat.member.stages)
        for peer, seat in seats.items()
    }
    state = replace(
        state,
        phase=Phase.TRAINING,
        peers=peers,
        places={**state.places, **places},
        plans=(*state.plans, plan),
        seated=state.seated | {replica.index for replica in plan.replicas},
        current_round=state.current_round or plan.from_round,
    )
    number = state.current_round
    if plan.from_round == number:
        rounds = {key: round for key, round in state.rounds.items() if key[1] != number}
        state = replace(state, began_at=at, opened_at=None, rounds=rounds)
    running = state.plan_for(number).epoch
    oldest = state.plan_for(number - KEPT_ROUNDS).epoch
    return replace(
        state,
        seats={epoch: each for epoch, each in state.seats.items() if epoch >= oldest} | {plan.epoch: seats},
        absent={epoch: each for epoch, each in state.absent.items() if epoch >= running},
    )


def _offer(state: State, event: PayloadOffered) -> State:
    descriptor = event.descriptor
    key = (descriptor.stage, descriptor.round)
    round = state.round(*key)
    offers = {**round.offers, descriptor.owner: descriptor}
    opened_at = event.at if state.opened_at is None else state.opened_at
    return replace(state, rounds={**state.rounds, key: replace(round, offers=offers)}, opened_at=opened_at)


def _close(state: State, event: GroupClosed) -> State:
    round = state.round(event.stage, event.round)
    descriptors = (round.offers[owner] for owner in sorted(round.offers))
    agreeing = tuple(d for d in descriptors if d.anchor_digest == event.anchor_digest)
    group = Group(event.group_id, agreeing, event.seconds)
    return _with_round(state, event, replace(round, group=group, closed_at=event.at))


def _report(state: State, event: HoldingsReported) -> State:
    round = state.round(event.stage, event.round)
    gathered_in = round.gathered_in
    if round.group is not None and round.closed_at >= state.started_at:
        gathered_in = max(gathered_in, event.at - round.closed_at)
    reports = {**round.reports, event.peer: frozenset(event.owners)}
    return _with_round(state, event, replace(round, reports=reports, gathered_in=gathered_in))


def _with_round(
    state: State, event: PayloadWithheld | GroupClosed | HoldingsReported | PayloadRejected, round: Round
) -> State:
    return replace(state, rounds={**state.rounds, (event.stage, event.round): round})


def _decided(state: State, at: float, decision: Decision) -> State:
    number = decision.round
    state = replace(
        state,
        decisions={**state.decisions, (decision.stage, number): decision},
        committed=state.committed + decision.committed,
        opened_at=at if state.opened_at is None else state.opened_at,
    )
    if state.retreats:
        places = (state.places.get(entry.descriptor.owner) for entry in decision.entries)
        working = {place.replica for place in places if place is not None}
        retreats = {index: each for index, each in state.retreats.items() if index not in working}
        state = replace(state, retreats=retreats)
    if any((stage, number) not in state.decisions for stage in range(state.stages)):
        return state
    oldest = number + 1 - KEPT_ROUNDS
    state = replace(
        state,
        current_round=number + 1,
        began_at=at,
        opened_at=None,
        rounds={key: round for key, round in state.rounds.items() if key[1] >= oldest},
    )
    digests = {key: digests for key, digests in state.digests.items() if state.keeps_digests(key[1])}
    return replace(state, digests=digests)


def _attest(state: State, event: DigestAttested) -> State:
    """As if the digest were right: where it is not, the event that says so follows at once."""
    key = (event.stage, event.round, event.part)
    digests = state.digests.get(key, {})
    if digests.get(event.peer, event.digest) != event.digest:
        # Of two digests the one attested first is believed, and who changes its word comes last.
        digests = {peer: digest for peer, digest in digests.items() if peer != event.peer}
    state = replace(state, digests={**state.digests, key: {**digests, event.peer: event.digest}})
    if event.part == Part.STAGE:
        rounds = state.synced.get(event.peer, {})
        newest = max(event.round, rounds.get(event.stage, 0))
        state = replace(state, synced={**state.synced, event.peer: {**rounds, event.stage: newest}})
    if state.diverged:
        healed = {
            found
            for found in state.diverged
            if (found[0], found[1], found[3]) == (event.peer, event.stage, event.part)
            and found[2] <= event.round
        }
        state = replace(state, diverged=state.diverged - healed)
    return state


def _diverge(state: State, event: AnchorDiverged) -> State:
    found = (event.peer, event.stage, event.round, event.part)
    rounds = state.synced.get(event.peer, {})
    # Every member needs the embedding, whatever it hosts.
    still = {stage: n for stage, n in rounds.items() if event.part == Part.STAGE and stage != event.stage}
    state = replace(state, diverged=state.diverged | {found}, synced={**state.synced, event.peer: still})
    return _sync(_unseat(state, event.peer), event.peer)
