"""What the run waits for, since when, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from coordinator.ops.explain.facts import Facts, duration, middle, rounds_before, say, times
from coordinator.ops.explain.predictions import outlook_of, prediction_sentences
from coordinator.placement.reservations import is_spare
from coordinator.run.rounds.deadlines import closes_at
from coordinator.run.rounds.phases import expected_seconds
from coordinator.run.rounds.rounds import is_stalled
from coordinator.run.state import events
from coordinator.run.state.cause_text import alarm_text
from coordinator.run.state.text import counted, listed, short
from coordinator.status.messages import run_message
from protocol.roles import POLICIES
from protocol.status import Explanation, RunPhase, Sentence
from protocol.types import Replica

_MOST_REPLICAS = 4
_SHORT = 1.0


def explain_now(facts: Facts) -> Explanation:
    state = facts.state
    message = run_message(state)
    title = f"{message[:1].upper()}{message[1:]}"
    if state.phase is not RunPhase.TRAINING:
        return Explanation(title, tuple(_gathering(facts)) if state.phase is RunPhase.GATHERING else ())
    sentences = [*_since(facts), *_missing(facts), *_progress(facts), *_aborts(facts), *_idle(facts)]
    outlook = outlook_of(facts)
    if outlook is not None:
        sentences += prediction_sentences(facts, outlook)
    elif state.current_round <= state.spec.rounds and not is_stalled(state):
        sentences.append(say("No speed is measured yet, so nothing can be predicted"))
    return Explanation(title, tuple(sentences))


def _gathering(facts: Facts) -> Iterator[Sentence]:
    for number, event in [*facts.of_kind(events.CoordinatorStarted)][:1]:
        yield say(f"The coordinator has waited for {duration(facts.now - event.at)}", number)
    for number, joined in [*facts.of_kind(events.PeerJoined)][-1:]:
        ago = duration(facts.now - joined.at)
        noun = POLICIES[joined.role].noun
        yield say(f"The last peer, {short(joined.peer)}, joined {ago} ago as a {noun}", number)
    yield say("'hetnode invite create' lets more peers in")


def _since(facts: Facts) -> Iterator[Sentence]:
    """Since when it waits for what the title says, by the event that began the wait."""
    state, asked = facts.state, facts.asked
    if (alarm := state.open_alarm) is not None:
        yield say(f"There is an alarm: {alarm_text(alarm.reason, alarm.last_healthy)}")
    if state.pause is not None:
        for number, event in facts.of_kind(events.RunPaused):
            if number == facts.paused:
                ago = duration(facts.now - event.at)
                yield say(f"It was paused {ago} ago; 'hetnode run resume' lets it go on", number)
    if asked is None or state.is_held:
        return
    own = facts.in_round(asked)
    if is_stalled(state):
        for each in reversed(own):
            if isinstance(each.event, events.PeerLost | events.PeerLeft | events.PeerRetreated):
                ago = duration(facts.now - each.event.at)
                peer = short(each.event.peer)
                yield say(f"It waits since {peer} went, {ago} ago", each.number)
                break
        yield say("It goes on by itself when such a peer has joined and caught up")
        return
    for each in reversed(own):
        if isinstance(each.event, events.GroupClosed):
            if not state.is_decided(each.event.stage, asked.number):
                ago = duration(facts.now - each.event.at)
                yield say(f"The group of stage {each.event.stage} was closed {ago} ago", each.number)
            return
    offers = [each for each in own if isinstance(each.event, events.PayloadOffered)]
    if offers:
        closes = closes_at(state)
        until = "" if closes is None else f"; it waits at most {duration(max(0.0, closes - facts.now))} more"
        ago = duration(facts.now - offers[0].event.at)
        yield say(f"The first payload of this round was offered {ago} ago{until}", offers[0].number)


def _missing(facts: Facts) -> Iterator[Sentence]:
    """The replicas that have not answered, those that are late first."""
    state = facts.state
    if state.current_round > state.spec.rounds or not state.plans or state.is_held:
        return
    waiting = [
        each for each in state.complete_replicas(state.current_round) if each.index not in state.answered
    ]
    elapsed = facts.now - state.began_at
    late = [(elapsed - expected_seconds(state, each), each) for each in waiting]
    for lateness, replica in sorted(late, key=lambda each: (-each[0], each[1].index))[:_MOST_REPLICAS]:
        expected = expected_seconds(state, replica)
        if lateness > _SHORT and expected < inf:
            yield say(
                f"{replica.name} has trained for {duration(elapsed)} and usually needs {duration(expected)}"
                f"{_whereabouts(facts, replica)}",
                *_began(facts),
            )
        elif state.answered and expected == inf:
            yield say(
                f"{replica.name} has not offered a payload yet{_whereabouts(facts, replica)}", *_began(facts)
            )
    interval = state.spec.timing.heartbeat_of(state.live)
    late_members = [
        f"{short(member.peer)} ({duration(silent)})"
        for replica in waiting
        for member in replica.members
        if (silent := facts.now - state.last_seen[member.peer].at) > 2.5 * interval
    ]
    if late_members:
        yield say(
            f"No sign of life for some time from {listed(late_members)}; after "
            f"{state.spec.timing.lost_after:g} s a peer counts as lost",
            *_began(facts),
        )


def _whereabouts(facts: Facts, replica: Replica) -> str:
    """How far its slowest member is in the round, by its heartbeats."""
    seen = [facts.state.last_seen[member.peer] for member in replica.members]
    here = [each.inner_step for each in seen if each.round_number == facts.state.current_round]
    return f"; it is in step {min(here)} of {facts.state.spec.inner.steps}" if here else ""


def _began(facts: Facts) -> tuple[int, ...]:
    """The event that ended the round before."""
    if facts.asked is None:
        return ()
    return (max(1, facts.asked.first - (facts.asked.number > 1)),)


def _progress(facts: Facts) -> Iterator[Sentence]:
    asked = facts.asked
    usual = middle(each.seconds for each in facts.rounds)
    if asked is None or facts.state.current_round > facts.state.spec.rounds or facts.state.is_held:
        return
    if usual is None:
        yield say(f"Round {asked.number} has run for {duration(asked.seconds)}", *_began(facts))
        return
    before = rounds_before(len(facts.rounds))
    slow = f", {times(asked.seconds / usual)} that" if usual and asked.seconds > usual else ""
    yield say(
        f"Round {asked.number} has run for {duration(asked.seconds)}{slow}; {before} took {duration(usual)} "
        "(median)",
        *_began(facts),
    )


def _aborts(facts: Facts) -> Iterator[Sentence]:
    # A rollback is decided as an abort.
    restored = facts.state.restored
    aborted = [each for each in facts.rounds if each.is_aborted and each.number not in restored]
    if not aborted:
        return
    names = listed([str(each.number) for each in aborted], most=8)
    yield say(
        f"Of the last {counted(len(facts.rounds), 'round')}, {len(aborted)} had an aborted stage: {names}; "
        f"'hetnode explain {aborted[-1].number}' says why",
        *(each.last for each in aborted),
    )


def _idle(facts: Facts) -> Iterator[Sentence]:
    """The peers that are here and do not train."""
    state = facts.state
    if state.current_round > state.spec.rounds:
        return
    idle = [each for each in state.staying if not state.takes_part(each.peer, state.plans[-1].from_round)]
    if not idle:
        return
    spares = [each for each in idle if is_spare(state, each)]
    names = listed([short(each.peer) for each in idle])
    kept = f", {len(spares)} of them without an assignment" if spares else ""
    verb = "is" if len(idle) == 1 else "are"
    yield say(
        f"{counted(len(idle), 'peer')} {verb} here and {'does' if len(idle) == 1 else 'do'} not train{kept}: "
        f"{names}; 'hetnode explain {short(idle[0].peer)}' says why"
    )
