"""What delayed the exchange of a round after its groups were closed, and which payloads did not count."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.facts import (
    duration,
    megabits,
    middle,
    say,
    stage_names,
)
from coordinator.ops.explain.round_story import MOST_NAMED, SHORT, SLOW, RoundStory
from coordinator.run.state import events
from coordinator.run.state.state import State
from coordinator.run.state.text import counted, listed, short
from protocol.status import Sentence
from protocol.types import Finding, PeerId


def gathering(story: RoundStory) -> Iterator[Sentence]:
    """Who gathered slowly, or never reported."""
    facts, state = story.facts, story.state
    usual = middle(each.phases[2] for each in facts.rounds)
    seconds = story.marks.phases[2]
    for number, group in story.of(events.GroupClosed):
        stage = group.stage
        reports = {
            event.peer: (event.at, reported)
            for reported, event in story.of(events.HoldingsReported)
            if event.stage == stage
        }
        missing = [peer for peer in story.offers_of(stage) if peer not in reports]
        decided = [(at, when) for at, when, decision in story.decisions if decision.stage == stage]
        waited = decided[0][1] - group.at if decided else 0.0
        if missing and waited > SHORT:
            names = listed([short(peer) for peer in missing])
            yield say(
                f"At stage {stage} the report of {names} never came; the decision came {duration(waited)} "
                "after the group was closed",
                number,
                decided[0][0],
            )
        elif len(reports) > 1 and seconds > SHORT and (usual is None or seconds > SLOW * usual):
            (before, one), (last, other) = sorted(reports.values())[-2:]
            if last - group.at > 0.5 * seconds and last - before > 0.1 * seconds:
                peer = next(peer for peer, found in reports.items() if found == (last, other))
                yield say(
                    f"At stage {stage}, {short(peer)} was the last to report the payloads, "
                    f"{duration(last - before)} after the one before{_line_of(state, peer)}",
                    one,
                    other,
                )


def _line_of(state: State, peer: PeerId) -> str:
    known = state.estimates.get(peer)
    if known is None or not known.capacity.downlink:
        return ""
    return f"; its line has {megabits(known.capacity.uplink)} up and {megabits(known.capacity.downlink)} down"


def arbitrations(story: RoundStory) -> Iterator[Sentence]:
    for number, contest in story.of(events.PayloadsContested):
        verdicts = [each for each in story.of(events.PayloadArbitrated) if each[1].stage == contest.stage]
        took = verdicts[-1][1].at - contest.at if verdicts else contest.seconds
        yield say(
            f"Too few peers reported {counted(len(contest.owners), 'payload')} of stage {contest.stage} as "
            f"held, so the coordinator fetched what it could itself; that took {duration(took)}",
            number,
            *(each for each, _ in verdicts),
        )


def not_counted(story: RoundStory) -> Iterator[Sentence]:
    """Payloads that were offered and are in no decision, and why; one sentence for each owner."""
    told_of: dict[tuple[PeerId, str], tuple[list[int], list[int]]] = {}
    for _, _, decision in sorted(story.decisions, key=lambda each: each[2].stage):
        stage = decision.stage
        counted_in = {entry.descriptor.owner for entry in decision.entries}
        for owner, offer in story.offers_of(stage).items():
            if owner in counted_in:
                continue
            why, cited = _why_not_counted(story, stage, owner)
            if why or decision.committed:
                stages, numbers = told_of.setdefault((owner, why), ([], []))
                stages.append(stage)
                numbers += [offer, *cited]
    for (owner, why), (stages, numbers) in list(told_of.items())[:MOST_NAMED]:
        replica = story.plan.replica_of(owner)
        name = f"{replica.name} ({short(owner)})" if replica else short(owner)
        cause = why or "too few peers of the group reported that they hold it"
        yield say(f"The payload of {name} for {stage_names(stages)} did not count: {cause}", *numbers)
    if len(told_of) > MOST_NAMED:
        yield say(f"{counted(len(told_of) - MOST_NAMED, 'more payload')} did not count")


def _why_not_counted(story: RoundStory, stage: int, owner: PeerId) -> tuple[str, list[int]]:
    """The reason in the events, or "" if there is none of its own; and the numbers of these events."""
    for number, judged in story.of(events.PayloadArbitrated):
        verdict = judged.verdict
        if (judged.stage, judged.owner) == (stage, owner) and verdict.finding is not Finding.HELD:
            reason = verdict.reason or verdict.finding.value
            return f"the coordinator could not use it: {reason}", [number]
    for number, diverged in story.of(events.AnchorDiverged):
        if (diverged.stage, diverged.peer) == (stage, owner):
            return "it started from another anchor than the others", [number]
    rejected = [
        (number, event)
        for number, event in story.of(events.PayloadRejected)
        if (event.stage, event.owner) == (stage, owner)
    ]
    if rejected:
        by = counted(len({event.peer for _, event in rejected}), "peer")
        return f"{by} rejected it: {rejected[0][1].reason}", [number for number, _ in rejected]
    return "", []
