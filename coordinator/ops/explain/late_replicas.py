"""Which replicas offered late or nothing in a round, and why."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.facts import (
    duration,
    gigaflops,
    middle,
    plan_number,
    say,
    told,
)
from coordinator.ops.explain.predictions import step_sentence
from coordinator.ops.explain.round_story import MOST_NAMED, SHORT, SLOW, Answer, RoundStory
from coordinator.run.state import events
from coordinator.run.state.state import State
from coordinator.run.state.text import listed, short
from protocol.status import Sentence
from protocol.types import PeerId, Replica


def interruptions(story: RoundStory) -> Iterator[Sentence]:
    """Starts of the coordinator within the round."""
    for start in story.facts.starts:
        if (start.seconds or 0.0) > SHORT:
            yield say(
                f"The coordinator started again, or its machine had stood still: nothing is in the log for "
                f"{duration(start.seconds or 0.0)} before that, and deadlines count from there",
                start.sequence - 1,
                start.sequence,
            )


def pauses(story: RoundStory) -> Iterator[Sentence]:
    """Pauses of the run before the round: the round counts from the end of the one before."""
    resumed = story.of(events.RunResumed)
    for number, event in story.facts.of_kind(events.RunPaused):
        if event.from_round == story.number:
            end = next(((at, each.at) for at, each in resumed if at > number), None)
            until = story.marks.decided_at if end is None else end[1]
            cited = (number,) if end is None else (number, end[0])
            paused, stood = told(event), until - max(event.at, story.marks.began_at)
            yield say(
                f"{paused[:1].upper()}{paused[1:]}; it stood still for {duration(stood)}",
                *cited,
            )


def waits(story: RoundStory) -> Iterator[Sentence]:
    """The replicas that offered late or nothing, and why."""
    answers = sorted(story.answers.items(), key=lambda each: (each[1].seconds, each[0]))
    silent = [index for index in story.replicas if index not in story.answers]
    for index in silent[:MOST_NAMED]:
        yield from _why_silent(story, story.replicas[index])
    if not answers:
        return
    index, last = answers[-1]
    others = [answer.seconds for _, answer in answers[:-1]]
    usual, replica = story.usual(index), story.replicas[index]
    compared = "" if usual is None else f"; in the rounds before it took {duration(usual)} (median)"
    if others:
        lag = last.seconds - others[-1]
        if lag > max(SHORT, 0.1 * last.seconds):
            yield say(
                f"{replica.name} was last: it offered {duration(last.seconds)} after the round began, "
                f"{duration(lag)} after {story.replicas[answers[-2][0]].name}{compared}",
                last.number,
                answers[-2][1].number,
            )
            yield from _why_slow(story, replica, last, middle(others) or 0.0)
    elif usual is not None and last.seconds > SLOW * usual and last.seconds - usual > SHORT:
        yield say(
            f"{replica.name} offered {duration(last.seconds)} after the round began{compared}", last.number
        )
        yield from _why_slow(story, replica, last, usual)


def _why_silent(story: RoundStory, replica: Replica) -> Iterator[Sentence]:
    happened = story.about(replica)
    name = f"{replica.name} ({listed([short(member.peer) for member in replica.members])})"
    members = {member.peer for member in replica.members}
    withheld = [number for number, event in story.of(events.PayloadWithheld) if event.peer in members]
    if happened:
        first = happened[0]
        seconds = duration(first.event.at - story.marks.began_at)
        cause = f"{seconds} after the round began, {told(first.event)}"
        yield say(f"{name} offered nothing: {cause}", *(each.number for each in happened))
    elif withheld:
        yield say(f"{name} had trained too little of its inner phase to offer a payload", *withheld)
    elif story.is_decided:
        closed = story.numbers(events.GroupClosed, events.RoundAborted)
        usual = story.usual(replica.index)
        compared = "" if usual is None else f"; in the rounds before it took {duration(usual)} (median)"
        yield say(f"{name} offered nothing before the round closed{compared}", *closed)


def _why_slow(story: RoundStory, replica: Replica, answer: Answer, others: float) -> Iterator[Sentence]:
    """What is known of a replica that offered late, in comparison with the others."""
    usual = story.usual(replica.index)
    for each in story.about(replica)[:3]:
        seconds = duration(each.event.at - story.marks.began_at)
        yield say(f"In this round, {seconds} after it began: {told(each.event)}", each.number)
    former = story.facts.plan_of(story.plan.epoch - 1)
    if story.plan.from_round == story.number:
        members = [member.peer for member in replica.members]
        was = (
            next((each for each in former.replicas if each.index == replica.index), None) if former else None
        )
        if was is None or [member.peer for member in was.members] != members:
            what = "its first round, so it started processes and opened links"
            what = what if was is None else "its first round with these members, so links were opened"
            yield say(f"It was {what} (plan {story.plan.epoch})", *plan_number(story.facts, story.plan.epoch))
    measured = _measured_share(story, replica)
    if measured:
        yield say(measured, answer.number)
    if usual is not None and usual > SLOW * others and answer.seconds < SLOW * usual:
        yield say(f"It is always slower than the others, which took {duration(others)}", answer.number)
    yield from _slow_machines(story, replica, answer)
    spec = story.state.spec
    counts = {index: spec.microbatches_of(each) for index, each in story.replicas.items()}
    if len(set(counts.values())) > 1:
        most = max(count for index, count in counts.items() if index != replica.index)
        yield say(
            f"It trains {counts[replica.index]} microbatches in a step, the others at most {most}",
            *plan_number(story.facts, story.plan.epoch),
        )
    if step := step_sentence(story.facts, replica):
        yield say(f"Prediction: {step}", answer.number)


def _measured_share(story: RoundStory, replica: Replica) -> str:
    """How much of the inner phase the members computed, if they have measured this round."""
    members = {member.peer for member in replica.members}
    found = [
        each
        for each in story.facts.measurements
        if each.peer in members and each.round_number == story.number and each.inner_seconds > 0
    ]
    if not found:
        return ""
    busy = max(found, key=lambda each: each.compute_seconds)
    return (
        f"Of the {duration(busy.inner_seconds)} of its inner phase, {short(busy.peer)} computed for "
        f"{duration(busy.compute_seconds)}"
    )


def _slow_machines(story: RoundStory, replica: Replica, answer: Answer) -> Iterator[Sentence]:
    state = story.state
    members = {member.peer for member in replica.members}
    others = [
        member.peer
        for each in story.replicas.values()
        for member in each.members
        if each.index != replica.index and len(each.members) == len(replica.members)
    ]
    usual = middle(flops for each in others if (flops := _flops(state, each)))
    for peer in members if usual else ():
        flops = _flops(state, peer)
        if flops and usual and flops * SLOW < usual:
            yield say(
                f"{short(peer)} computes at {gigaflops(flops)}; the median of the members of the other "
                f"replicas of its kind is {gigaflops(usual)}",
                answer.number,
            )


def _flops(state: State, peer: PeerId) -> float:
    known = state.estimates.get(peer)
    return known.capacity.flops if known else 0.0
