"""What a peer does, and why it does not train."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.facts import (
    Facts,
    duration,
    gigaflops,
    megabits,
    middle,
    plan_number,
    say,
    told,
)
from coordinator.placement.reservations import Vacancies, is_spare
from coordinator.placement.rules import (
    is_synced,
    least_synced,
    obstacles,
    peer_rests_until,
    replica_rests_until,
)
from coordinator.run.membership.strikes import STRIKE_ROUNDS, STRIKES_TO_QUARANTINE
from coordinator.run.state import events
from coordinator.run.state.cause_text import cause_text
from coordinator.run.state.state import Peer, State
from coordinator.run.state.text import counted, short, stages_of
from coordinator.status.messages import peer_message, run_message
from protocol.math.batch import work_of
from protocol.roles import POLICIES
from protocol.spec.link import width_text
from protocol.status import Explanation, RunPhase, Sentence
from protocol.trust.public_name import name_as_text
from protocol.types import Lifecycle, PeerId, Plan, Reachability

_MOST_VACANCIES = 4
_UNUSUAL = 1.3
"""A speed is worth a sentence if it differs from that of the others by this factor."""


def explain_peer(facts: Facts, peer: PeerId) -> Explanation:
    known = facts.state.peers.get(peer)
    sentences = [
        *_exclusion(facts, peer),
        *([] if known is None else _standing(facts, known)),
        *([] if known is None else _connection(facts, known)),
        *_strikes(facts, peer),
        *([] if known is None else _comparison(facts, known)),
        *_history(facts),
    ]
    if known is None:
        where = "is banned" if peer in facts.state.banned else "was let into the run and has not joined it"
        return Explanation(f"Peer {peer} {where}", tuple(sentences))
    name = facts.state.name_of(peer)
    called = f" ({name_as_text(name)})" if name else ""
    return Explanation(f"Peer {peer}{called} {_where(facts.state, known)}", tuple(sentences))


def _where(state: State, known: Peer) -> str:  # noqa: PLR0911
    noun, peer = known.policy.noun, known.peer
    if peer in state.banned:
        return "is banned"
    if peer in state.quarantined:
        return "is in quarantine"
    if known.finished:
        return "has finished its work and left"
    if not known.is_live:
        return "is gone"
    if not known.policy.trains:
        return f"is a {noun}"
    if _trains(state, peer):
        assignment = state.assignment(peer, state.current_round)
        last = " and leaves after this round" if known.lifecycle is Lifecycle.DRAINING else ""
        return f"trains as a {noun} in {assignment}{last}"
    if known.lifecycle is Lifecycle.DRAINING:
        return "is about to leave"
    if state.phase is RunPhase.GATHERING:
        return f"waits as a {noun} for the run to begin"
    if state.phase is RunPhase.FINISHED:
        return f"is a {noun} of a finished run"
    return f"is a {noun} and does not train"


def _trains(state: State, peer: PeerId) -> bool:
    return (
        state.phase is RunPhase.TRAINING
        and state.current_round <= state.spec.rounds
        and state.takes_part(peer, state.current_round)
    )


def _numbers(facts: Facts, *kinds: type[events.Event]) -> list[int]:
    return [each.number for each in facts.events if isinstance(each.event, kinds)]


def _exclusion(facts: Facts, peer: PeerId) -> Iterator[Sentence]:
    state = facts.state
    if peer in state.banned:
        why = state.banned[peer] or "no reason was given"
        yield say(
            f"The operator has banned it: {why}; 'hetnode peers unban' lets it in again",
            *_numbers(facts, events.PeerBanned),
        )
    if peer in state.quarantined:
        yield say(
            f"It has had {STRIKES_TO_QUARANTINE} strikes within {STRIKE_ROUNDS} rounds, so it counts as gone "
            "and may not join; 'hetnode peers unban' ends that",
            *_numbers(facts, events.PeerQuarantined, events.PeerStruck),
        )


def _standing(facts: Facts, known: Peer) -> Iterator[Sentence]:
    """Why it does not train, the nearest cause first, and what has to happen."""
    state, peer = facts.state, known.peer
    if peer in state.excluded:
        return
    if not known.is_live:
        left = _numbers(facts, events.PeerLeft, events.PeerLost)[-1:]
        for each in facts.events:
            if each.number in left:
                ago = duration(facts.now - each.event.at)
                yield say(f"{told(each.event)}, {ago} ago", each.number)
        if not known.finished and state.phase is not RunPhase.FINISHED:
            yield say("It gets an assignment again when it joins again: 'hetnode join' on its machine", *left)
        return
    if known.lifecycle is Lifecycle.DRAINING:
        yield say("It has asked to leave, so no later plan assigns it", *_numbers(facts, events.PeerDraining))
    if known.role_reason:
        roles = _numbers(facts, events.RoleChanged, events.PeerJoined)[-1:]
        yield say(
            f"The coordinator has made it a {known.policy.noun}: {known.role_reason}; 'hetnode join --role' "
            "would bind it to one role",
            *roles,
        )
    if not known.policy.trains:
        return
    if state.phase is not RunPhase.TRAINING:
        yield say(f"The run is {run_message(state)}")
    elif not _trains(state, peer):
        yield from _why_not(facts, known)
    elif peer in state.assignments.get(state.plans[-1].epoch, {}):
        plan = state.plans[-1]
        yield say(f"Plan {plan.epoch} assigns it{_links(state, plan, peer)}", *plan_number(facts, plan.epoch))


def _links(state: State, plan: Plan, peer: PeerId) -> str:
    """The k of its links, such as "; its links: k = 8 of d = 128 upstream"; "" for a full replica."""
    replica = plan.replica_of(peer)
    if replica is None or not replica.links:
        return ""
    position, width = replica.position_of(peer), state.spec.model.width
    parts = []
    if position > 0:
        parts.append(f"{width_text([replica.links[position - 1].k], width)} upstream")
    if position < len(replica.links):
        parts.append(f"{width_text([replica.links[position].k], width)} downstream")
    return f"; its links: {', '.join(parts)}"


def _why_not(facts: Facts, known: Peer) -> Iterator[Sentence]:
    state, peer = facts.state, known.peer
    newest = state.plans[-1]
    yield from _absence(facts, known)
    if is_spare(state, known):
        vacancies = Vacancies(state).obstacles(known)
        joined = _numbers(facts, events.PeerJoined)[-1:]
        yield say("It is a spare: no assignment is reserved for it", *joined)
        for each in vacancies[:_MOST_VACANCIES]:
            yield say(f"It cannot have {each}", *joined)
        if len(vacancies) > _MOST_VACANCIES:
            yield say(f"It cannot have {len(vacancies) - _MOST_VACANCIES} more vacancies, either", *joined)
        if not vacancies:
            yield say("An assignment will be reserved for it at the end of this round", *joined)
        return
    reservation = state.reservations.get(peer)
    if reservation is None:
        return
    reserved = _numbers(facts, events.AssignmentReserved)[-1:]
    name = f"replica-{reservation.replica}"
    if state.takes_part(peer, newest.from_round):
        yield say(
            f"Plan {newest.epoch}, from round {newest.from_round} on, has it in {name}",
            *plan_number(facts, newest.epoch),
        )
        return
    yield say(f"It follows the rounds of {stages_of(reservation)} for {name}", *reserved)
    from_round = state.current_round
    if not is_synced(state, reservation, from_round):
        rounds, least = state.synced.get(peer, {}), least_synced(state, reservation, from_round)
        behind = [stage for stage in reservation.stages if rounds.get(stage, -1) < least]
        have = ", ".join(
            f"of stage {stage} {f'that after round {rounds[stage]}' if stage in rounds else 'none'}"
            for stage in behind[:_MOST_VACANCIES]
        )
        diverged = _numbers(facts, events.AnchorDiverged)
        yield say(
            f"It must catch up first: it has to attest the anchors after round {least}, and has attested "
            f"{have or 'an anchor that differs from that of the others'}",
            *reserved,
            *diverged,
        )
    if (rests := peer_rests_until(state, peer)) > from_round:
        failures = state.failures[peer][0]
        yield say(
            f"It rests until round {rests} after {counted(failures, 'failure')} in a row: each one but the "
            "first doubles the rest",
            *_numbers(facts, events.PeerRetreated, events.PeerLost),
        )
    if (rests := replica_rests_until(state, reservation.replica)) > from_round:
        yield say(f"{name} rests until round {rests}, because its members could not go on", *reserved)
    why = obstacles(state, from_round).get(reservation.replica)
    message = cause_text(why) if why else peer_message(state, peer)
    if message:
        yield say(message, *reserved)


def _absence(facts: Facts, known: Peer) -> Iterator[Sentence]:
    """How it lost the part that it had in the present plan."""
    state = facts.state
    if not state.plans or known.peer not in state.assignments.get(state.plans[-1].epoch, {}):
        return
    for each in facts.events:
        if isinstance(each.event, events.PeerRetreated) and each.event.epoch == state.plans[-1].epoch:
            yield say(
                f"It has given up its part in plan {each.event.epoch}: {each.event.reason}", each.number
            )
        elif isinstance(each.event, events.PeerLost) and each.event.at <= known.joined_at:
            silent = duration(each.event.silent_seconds)
            yield say(f"It was lost after {silent} of silence and has joined again since", each.number)
        elif isinstance(each.event, events.AnchorDiverged):
            yield say(told(each.event), each.number)


def _connection(facts: Facts, known: Peer) -> Iterator[Sentence]:
    state = facts.state
    addresses = _numbers(facts, events.PeerJoined, events.AddressesChanged)[-1:]
    if known.is_live and known.reachability is Reachability.DIAL_ONLY:
        why = f": {known.problem}" if known.problem else ""
        yield say(f"Others cannot dial it{why}", *addresses)
    for (one, other), link in state.failed_links.items():
        if known.peer in (one, other):
            failed = [
                number
                for number, event in facts.of_kind(events.LinkFailed)
                if (event.peer, event.neighbour) == (one, other)
            ]
            moved = "; one of the two has other addresses since, so the next plan tries again"
            yield say(
                f"Its link from {short(one)} to {short(other)} at {link.address} could not be opened in "
                f"round {link.round_number}: {link.reason}{moved if link.is_moved else ''}",
                *failed,
            )


def _strikes(facts: Facts, peer: PeerId) -> Iterator[Sentence]:
    recent = facts.state.strikes.get(peer, ())
    for number, event in facts.of_kind(events.PeerStruck):
        counts = (
            event.round_number in recent and event.round_number > facts.state.current_round - STRIKE_ROUNDS
        )
        over = "" if counts else " (it no longer counts)"
        yield say(f"It got a strike in round {event.round_number}{over}: {event.reason}", number)


def _comparison(facts: Facts, known: Peer) -> Iterator[Sentence]:
    """Its speed and its line against those of the live peers of its role."""
    state = facts.state
    if not known.is_live or not known.policy.trains:
        return
    own = state.estimates[known.peer].capacity
    others = [
        state.estimates[each.peer].capacity
        for each in state.peers.values()
        if each.is_live and each.role is known.role and each.peer != known.peer
    ]
    measured = _numbers(facts, events.PeerMeasured)[-1:]
    noun = f"the other {known.policy.noun}s"
    flops = middle(each.flops for each in others if each.flops)
    if own.flops and flops and not 1 / _UNUSUAL < own.flops / flops < _UNUSUAL:
        yield say(
            f"It computes at {gigaflops(own.flops)}; the median of {noun} is {gigaflops(flops)}", *measured
        )
    elif not own.flops:
        yield say("It has not measured its speed yet", *measured)
    uplink = middle(each.uplink for each in others if each.uplink)
    if own.uplink and uplink and not 1 / _UNUSUAL < own.uplink / uplink < _UNUSUAL:
        yield say(
            f"Its line has {megabits(own.uplink)} up; the median of {noun} is {megabits(uplink)}", *measured
        )
    assignment = state.assignment(known.peer, state.current_round)
    if assignment is None:
        return
    spent = {
        each.index: middle(
            seconds * work_of(state.spec, each) for seconds in state.phase_seconds.get(each.index, ())
        )
        for each in state.plan_for(state.current_round).replicas
    }
    mine = spent.get(assignment.replica.index)
    rest = middle(
        seconds for index, seconds in spent.items() if seconds and index != assignment.replica.index
    )
    if mine and rest and mine / rest > _UNUSUAL:
        yield say(
            f"{assignment.replica.name} needs {duration(mine)} from the beginning of a round to its payload; "
            f"the median of the others is {duration(rest)}",
            *measured,
        )


def _history(facts: Facts) -> Iterator[Sentence]:
    """Its last contribution, and how it came in."""
    for number, event in facts.of_kind(events.RoundCommitted):
        ago = duration(facts.now - event.at)
        yield say(
            f"Its last payload that counts is in the decision of round "
            f"{event.decision.round_number}, {ago} ago",
            number,
        )
    for number, joined in [*facts.of_kind(events.PeerJoined)][-1:]:
        ago, noun = duration(facts.now - joined.at), POLICIES[joined.role].noun
        yield say(f"It joined {ago} ago as a {noun}", number)
