""":func:`apply` moves the state from event to event; the state is whatever the events so far lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import reduce
from typing import assert_never

from coordinator.state.events import (
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
from coordinator.state.state import KEPT_ROUNDS, Assignment, Invitation, LastSeen, Peer, Round, State
from protocol.status import RunPhase
from protocol.types import (
    Decision,
    Estimates,
    ExchangeGroup,
    Lifecycle,
    Part,
    PeerId,
    Plan,
    ReservedAssignment,
)


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
            seen = LastSeen(event.at, event.round_number, event.inner_step, has_sent_heartbeat=True)
            return replace(state, last_seen={**state.last_seen, event.peer: seen})
        case PeerMeasured():
            return replace(
                state,
                estimates={**state.estimates, event.peer: event.estimates},
                tellings={**state.tellings, event.peer: (_tellings(state, event.peer) + 1, event.at)},
            )
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
            return _reserve(state, event.place)
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
            round_state = state.round_of(event.stage, event.round_number)
            return _with_round(
                state, event, replace(round_state, withheld=round_state.withheld | {event.peer})
            )
        case GroupClosed():
            return _close(state, event)
        case HoldingsReported():
            return _report(state, event)
        case PayloadRejected():
            round_state = state.round_of(event.stage, event.round_number)
            reasons = {**round_state.rejections.get(event.owner, {}), event.peer: event.reason}
            rejections = {**round_state.rejections, event.owner: reasons}
            return _with_round(state, event, replace(round_state, rejections=rejections))
        case PeerStruck():
            rounds = (*state.strikes.get(event.peer, ()), event.round_number)
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
            return replace(state, phase=RunPhase.FINISHED, finished_at=event.at)
        case _:
            assert_never(event)


class Transaction:
    """A state in the making: what one command decides, event by event, each seen by the next step."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)


def _tellings(state: State, peer: PeerId) -> int:
    return state.tellings.get(peer, (0, 0.0))[0]


def _join(state: State, event: PeerJoined) -> State:
    """A peer that comes back starts anew: what it held before says nothing of it now."""
    arrival = state.arrivals + 1
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
        tellings={**state.tellings, event.peer: (0, event.at)},
        reservations={each: place for each, place in state.reservations.items() if each != event.peer},
        synced={each: rounds for each, rounds in state.synced.items() if each != event.peer},
        diverged=frozenset(found for found in state.diverged if found[0] != event.peer),
    )


def _gone(state: State, peer: PeerId, finished: bool) -> State:
    known = state.peers[peer]
    gone = replace(known, lifecycle=Lifecycle.GONE, finished=finished)
    state = replace(state, peers={**state.peers, peer: gone})
    drained = known.lifecycle is Lifecycle.DRAINING
    if finished or (drained and _has_done_its_part(state, peer)):
        return state
    state = _unseat(state, peer)
    return state if drained else _lapse(state, peer)


def _has_done_its_part(state: State, peer: PeerId) -> bool:
    """Whether no later plan seats `peer`, and its stages of the current round are decided."""
    if not state.plans:
        return True
    assignment = state.assignment(peer, state.current_round)
    decided = assignment is None or all(
        (stage, state.current_round) in state.decisions for stage in assignment.member.stages
    )
    return decided and peer not in state.assignments[state.plans[-1].epoch]


def _lapse(state: State, peer: PeerId) -> State:
    times, last = state.lapses.get(peer, (0, 0))
    if last == state.current_round:  # one trouble of a round shows in several ways
        return state
    return replace(state, lapses={**state.lapses, peer: (times + 1, state.current_round)})


def _retreat(state: State, event: PeerRetreated) -> State:
    absent = state.absent.get(event.epoch, frozenset())
    replica = state.assignments[event.epoch][event.peer].replica
    is_newest = event.epoch == state.plans[-1].epoch
    # Nobody is to blame for the loss of a neighbour.
    if is_newest and not any(member.peer in absent for member in replica.members):
        state = _lapse(state, event.peer)
    state = _unseat(state, event.peer, event.epoch)
    times, last = state.retreats.get(replica.index, (0, 0))
    if last != state.current_round:  # its members give up one after the other
        retreats = {**state.retreats, replica.index: (times + 1, state.current_round)}
        state = replace(state, retreats=retreats)
    has_later_seat = not is_newest and event.peer in state.assignments[state.plans[-1].epoch]
    return state if has_later_seat else _sync(state, event.peer)


def _unseat(state: State, peer: PeerId, only: int | None = None) -> State:
    """Its seats in the plans that still run, or in that of epoch `only`, count no longer."""
    if not state.plans:
        return state
    running = range(state.plan_for(state.current_round).epoch, len(state.plans) + 1)
    absent = {
        epoch: state.absent.get(epoch, frozenset()) | {peer}
        for epoch in running
        if peer in state.assignments[epoch] and only in (None, epoch)
    }
    return replace(state, absent={**state.absent, **absent}) if absent else state


def _sync(state: State, peer: PeerId) -> State:
    known = state.peers[peer]
    if known.lifecycle is not Lifecycle.TRAINING:
        return state
    return replace(state, peers={**state.peers, peer: replace(known, lifecycle=Lifecycle.SYNCING)})


def _reserve(state: State, reservation: ReservedAssignment) -> State:
    others = {
        peer: former
        for peer, former in state.reservations.items()
        if peer != reservation.peer and former.slot != reservation.slot
    }
    former = state.reservations.get(reservation.peer)
    if former is not None and former.stages != reservation.stages:
        rounds = state.synced.get(reservation.peer, {})
        kept = {
            stage: n for stage, n in rounds.items() if stage in former.stages and stage in reservation.stages
        }
        state = replace(
            state,
            moved={**state.moved, reservation.peer: state.current_round},
            synced={**state.synced, reservation.peer: kept},
        )
    is_whole = len(reservation.stages) == state.stages
    layout = (reservation.stages,) if is_whole else state.layout(reservation.replica)
    return replace(
        state,
        reservations={**others, reservation.peer: reservation},
        layouts={reservation.replica: layout, **state.layouts},
    )


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
    assignments = {
        member.peer: Assignment(replica, position)
        for replica in plan.replicas
        for position, member in enumerate(replica.members)
    }
    # Who has no seat any more still ends the round that it is in.
    is_later = plan.from_round > state.current_round > 0
    busy = {each for each in state.peers if is_later and state.takes_part(each, state.current_round)}
    peers = _with_lifecycles(state, assignments.keys(), assignments.keys() | busy)
    layouts = {replica.index: tuple(each.stages for each in replica.members) for replica in plan.replicas}
    state = replace(
        state,
        phase=RunPhase.TRAINING,
        peers=peers,
        reservations=_reservations_under(state, assignments),
        plans=(*state.plans, plan),
        assigned_replicas=state.assigned_replicas | {replica.index for replica in plan.replicas},
        layouts={**state.layouts, **layouts},
        tuned_at=plan.from_round if _is_tuned(state, plan, assignments) else state.tuned_at,
        current_round=state.current_round or plan.from_round,
    )
    round_number = state.current_round
    if plan.from_round == round_number:
        rounds = {key: round_state for key, round_state in state.rounds.items() if key[1] != round_number}
        state = replace(state, began_at=at, opened_at=None, rounds=rounds)
    running = state.plan_for(round_number).epoch
    oldest = state.plan_for(round_number - KEPT_ROUNDS).epoch
    return replace(
        state,
        assignments={epoch: each for epoch, each in state.assignments.items() if epoch >= oldest}
        | {plan.epoch: assignments},
        absent={epoch: each for epoch, each in state.absent.items() if epoch >= running},
    )


def _with_lifecycles(state: State, seated: Set[PeerId], training: Set[PeerId]) -> dict[PeerId, Peer]:
    """The peers, those `seated` in training and all but those `training` following."""
    peers = dict(state.peers)
    for each in state.peers.values():
        if each.is_staying and each.lifecycle is not Lifecycle.TRAINING and each.peer in seated:
            peers[each.peer] = replace(each, lifecycle=Lifecycle.TRAINING)
        elif each.is_staying and each.lifecycle is not Lifecycle.SYNCING and each.peer not in training:
            peers[each.peer] = replace(each, lifecycle=Lifecycle.SYNCING)
    return peers


def _reservations_under(
    state: State, assignments: Mapping[PeerId, Assignment]
) -> dict[PeerId, ReservedAssignment]:
    """Each assigned peer that stays has its assignment reserved.

    A peer whose former reservation went to another peer becomes a spare: it gets a reservation that became
    free, with the same stages, if there is one. So does a peer that is gone, for when it comes back.
    """
    reservations = {
        peer: ReservedAssignment(
            peer, assignment.replica.index, assignment.position, assignment.member.stages
        )
        for peer, assignment in assignments.items()
        if state.peers[peer].is_staying
    }
    taken = {reservation.slot for reservation in reservations.values()}
    former = [state.reservations[peer] for peer in reservations if peer in state.reservations]
    free = sorted((each for each in former if each.slot not in taken), key=lambda each: each.slot)
    for peer, reservation in sorted(state.reservations.items()):
        if peer in reservations:
            continue
        if reservation.slot not in taken:
            reservations[peer] = reservation
            continue
        found = next((each for each in free if each.stages == reservation.stages), None)
        if found is not None:
            free.remove(found)
            reservations[peer] = replace(found, peer=peer)
    return reservations


def _is_tuned(state: State, plan: Plan, assignments: Mapping[PeerId, Assignment]) -> bool:
    """Whether `plan` does otherwise with members that could have gone on as they did, or shares work anew."""
    if not state.plans:
        return False
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())
    later = {replica.index: replica for replica in plan.replicas}
    kept = [(each, later[each.index]) for each in newest.replicas if each.index in later]
    exchanged = any(
        before.peer != after.peer and before.peer not in absent and state.peers[before.peer].is_staying
        for one, other in kept
        for before, after in zip(one.members, other.members, strict=True)
    )
    shares = any(
        one.microbatches != other.microbatches
        for one, other in kept
        if not any(member.peer in absent for member in one.members)
    )
    return exchanged or (shares and len(kept) == len(newest.replicas) == len(plan.replicas))


def _offer(state: State, event: PayloadOffered) -> State:
    descriptor = event.descriptor
    key = (descriptor.stage, descriptor.round_number)
    round_state = state.round_of(*key)
    offers = {**round_state.offers, descriptor.owner: descriptor}
    opened_at = event.at if state.opened_at is None else state.opened_at
    return replace(
        state, rounds={**state.rounds, key: replace(round_state, offers=offers)}, opened_at=opened_at
    )


def _close(state: State, event: GroupClosed) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    descriptors = (round_state.offers[owner] for owner in sorted(round_state.offers))
    agreeing = tuple(d for d in descriptors if d.anchor_digest == event.anchor_digest)
    group = ExchangeGroup(event.group_id, agreeing, event.seconds)
    return _with_round(state, event, replace(round_state, group=group, closed_at=event.at))


def _report(state: State, event: HoldingsReported) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    gathered_in = round_state.gathered_in
    if round_state.group is not None and round_state.closed_at >= state.started_at:
        gathered_in = max(gathered_in, event.at - round_state.closed_at)
    reports = {**round_state.reports, event.peer: frozenset(event.owners)}
    return _with_round(state, event, replace(round_state, reports=reports, gathered_in=gathered_in))


def _with_round(
    state: State,
    event: PayloadWithheld | GroupClosed | HoldingsReported | PayloadRejected,
    round_state: Round,
) -> State:
    return replace(state, rounds={**state.rounds, (event.stage, event.round_number): round_state})


def _decided(state: State, at: float, decision: Decision) -> State:
    round_number = decision.round_number
    state = replace(
        state,
        decisions={**state.decisions, (decision.stage, round_number): decision},
        committed=state.committed + decision.committed,
        opened_at=at if state.opened_at is None else state.opened_at,
    )
    if state.retreats or state.lapses:
        state = _forgive(state, decision)
    if any((stage, round_number) not in state.decisions for stage in range(state.stages)):
        return state
    oldest = round_number + 1 - KEPT_ROUNDS
    state = replace(
        state,
        current_round=round_number + 1,
        began_at=at,
        opened_at=None,
        rounds={key: round_state for key, round_state in state.rounds.items() if key[1] >= oldest},
    )
    digests = {key: digests for key, digests in state.digests.items() if state.keeps_digests(key[1])}
    newest = state.plans[-1]
    if newest.from_round == round_number + 1:
        assignments = state.assignments[newest.epoch]
        state = replace(state, peers=_with_lifecycles(state, frozenset(), assignments.keys()))
    return replace(state, digests=digests)


def _forgive(state: State, decision: Decision) -> State:
    """Whoever has contributed works."""
    assignments = {
        e.descriptor.owner: state.assignment(e.descriptor.owner, decision.round_number)
        for e in decision.entries
    }
    working = {assignment.replica.index for assignment in assignments.values() if assignment is not None}
    # A member with several stages has one payload for each.
    once = {
        p
        for p, assignment in assignments.items()
        if assignment is not None and decision.stage == assignment.member.stages.first
    }
    lapses = {
        peer: (times - (peer in once), last)
        for peer, (times, last) in state.lapses.items()
        if times > (peer in once)
    }
    retreats = {index: each for index, each in state.retreats.items() if index not in working}
    return replace(state, retreats=retreats, lapses=lapses)


def _attest(state: State, event: DigestAttested) -> State:
    """As if the digest were right: where it is not, the event that says so follows at once."""
    key = (event.stage, event.round_number, event.part)
    digests = state.digests.get(key, {})
    if digests.get(event.peer, event.digest) != event.digest:
        # Of two digests the one attested first is believed, and who changes its word comes last.
        digests = {peer: digest for peer, digest in digests.items() if peer != event.peer}
    state = replace(state, digests={**state.digests, key: {**digests, event.peer: event.digest}})
    if event.part == Part.STAGE:
        rounds = state.synced.get(event.peer, {})
        newest = max(event.round_number, rounds.get(event.stage, 0))
        state = replace(state, synced={**state.synced, event.peer: {**rounds, event.stage: newest}})
    if state.diverged:
        healed = {
            found
            for found in state.diverged
            if (found[0], found[1], found[3]) == (event.peer, event.stage, event.part)
            and found[2] <= event.round_number
        }
        state = replace(state, diverged=state.diverged - healed)
    return state


def _diverge(state: State, event: AnchorDiverged) -> State:
    found = (event.peer, event.stage, event.round_number, event.part)
    rounds = state.synced.get(event.peer, {})
    # Every member needs the embedding, whatever it hosts.
    still = {stage: n for stage, n in rounds.items() if event.part == Part.STAGE and stage != event.stage}
    state = replace(state, diverged=state.diverged | {found}, synced={**state.synced, event.peer: still})
    return _sync(_unseat(state, event.peer), event.peer)
