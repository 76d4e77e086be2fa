"""Why a round took as long as it did, or why it was aborted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from coordinator.ops.explain.known import SHORT, Known
from coordinator.ops.explain.late_replicas import waits
from coordinator.ops.explain.round_story import RoundStory
from coordinator.ops.explain.statements import Code, say
from coordinator.store.history_answers import StageRound
from coordinator.store.history_tables import Contribution, Kind, Omission, StageOutcome, Standing
from coordinator.store.omissions import why_not
from protocol.status import Statement
from protocol.types import PeerId

_MOST_NAMED = 5
"""Payloads that a round tells one by one."""
_OUTCOMES = {
    StageOutcome.COMMITTED: Code.COMMITTED,
    StageOutcome.ABORTED: Code.ABORTED,
    StageOutcome.SKIPPED: Code.SKIPPED,
}


def explain_round(known: Known, number: int) -> Iterator[Statement]:
    """The title, then the statements."""
    times, _ = known.times(number)
    if number < known.state.current_round and (times is None or not times.is_decided):
        # Unknown here: the folder is an older copy, and a later round goes on from what peers hold.
        number = min((each for each in known.state.restored if each > number), default=number)
    story = RoundStory(known, number)
    if (restored := known.state.restored.get(number)) is not None:
        # No peer trains in a rollback, so the time of that round says nothing.
        yield say(Code.ROLLBACK, rounds=(number, restored))
        yield from story.told(Kind.ROLLED_BACK, Kind.PLAN)
        yield from _pauses(story)
        return
    yield story.times.compared(story.before)
    yield from _outcome(story)
    yield from story.told(Kind.ALARM)
    yield from _more_time(story)
    for line in story.lines:
        if line.kind is Kind.STARTED and (line.seconds or 0.0) > SHORT:
            yield say(Code.RESTARTED, line.sequence - 1, line.sequence, seconds=line.seconds)
    yield from _pauses(story)
    yield from waits(story)
    for stage in story.stages:
        yield from _gathering(story, stage)
    yield from story.told(Kind.CONTESTED, Kind.ARBITRATED)
    phases: dict[str, Any] = {name: seconds for name, seconds in story.times.phases.items() if seconds}
    if phases:
        yield say(Code.TIMES, *story.marks, **phases)
    yield from _not_counted(story)
    yield from story.told(Kind.PLAN)
    yield from _remedy(story)


def _outcome(story: RoundStory) -> Iterator[Statement]:
    alike: dict[tuple[StageOutcome, str], list[StageRound]] = defaultdict(list)
    for each in story.stages:
        if each.summary.outcome in _OUTCOMES:
            alike[each.summary.outcome, each.summary.reason or ""].append(each)
    for (outcome, reason), stages in sorted(alike.items()):
        yield say(
            _OUTCOMES[outcome],
            *(each.summary.decided_sequence for each in stages),
            stages=[each.summary.stage for each in stages],
            all=len(stages) == story.known.state.stages,
            detail=reason,
        )


def _more_time(story: RoundStory) -> Iterator[Statement]:
    """The phase that took most more than usual."""
    worst, extra = story.worst
    whole = story.times.seconds - (story.usual_seconds or 0.0)
    if story.before and whole > SHORT and extra > SHORT:
        seconds, usual = story.times.phases[worst], story.usual(worst) or 0.0
        yield say(Code.MORE_TIME, *story.marks, detail=worst, extra=extra, seconds=seconds, usual=usual)


def _pauses(story: RoundStory) -> Iterator[Statement]:
    """Pauses of the run before the round: the round counts from the end of the one before."""
    lines = story.known.lines(1, story.times.last, Kind.PAUSED, Kind.RESUMED)
    for i, line in enumerate(lines):
        if line.kind is Kind.PAUSED and line.round_number == story.number:
            end = next((each for each in lines[i:] if each.kind is Kind.RESUMED), None)
            until = story.times.ended_at if end is None else end.at
            cited = line.sequence, end.sequence if end else None
            seconds = until - max(line.at, story.times.began_at)
            yield say(Code.STOOD_STILL, *cited, detail=line.text, seconds=seconds)


def _gathering(story: RoundStory, stage: StageRound) -> Iterator[Statement]:
    """Who gathered the payloads of a stage slowly, or never reported."""
    row, seconds = stage.summary, story.times.phases["group"]
    if row.closed_at is None:
        return
    offered = [each for each in stage.contributions if each.nbytes is not None]
    missing = [each.peer for each in offered if each.reported_at is None]
    waited = (row.decided_at or row.closed_at) - row.closed_at
    reports = sorted(
        (each.reported_at, each.peer, each.reported_sequence) for each in offered if each.reported_at
    )
    if missing and waited > SHORT:
        cited = row.closed_sequence, row.decided_sequence
        yield say(Code.NO_REPORT, *cited, stages=(row.stage,), peers=missing, seconds=waited)
    elif len(reports) > 1 and story.is_unusual("group"):
        (before, _, one), (last, peer, other) = reports[-2:]
        if last - row.closed_at > 0.5 * seconds and last - before > 0.1 * seconds:
            estimates = story.known.state.estimates.get(peer)
            uplink = estimates.capacity.uplink if estimates else None
            downlink = estimates.capacity.downlink or None if estimates else None
            yield say(
                Code.LAST_REPORT,
                one,
                other,
                stages=(row.stage,),
                peers=(peer,),
                lag=last - before,
                uplink=uplink,
                downlink=downlink,
            )


def _not_counted(story: RoundStory) -> Iterator[Statement]:
    """Payloads that were offered and are in no decision, and why; one statement for each owner and cause."""
    alike: dict[tuple[PeerId, str], list[Contribution]] = defaultdict(list)
    for stage in story.stages:
        for part in stage.contributions:
            if part.standing is Standing.LEFT_OUT and part.cause != Omission.DECISION:
                alike[part.peer, why_not(part)].append(part)
    for (owner, why), parts in [*alike.items()][:_MOST_NAMED]:
        numbers = (each for part in parts for each in (part.offered_sequence, part.cause_sequence))
        replicas, stages = [parts[0].replica], [part.stage for part in parts]
        yield say(Code.NOT_COUNTED, *numbers, replicas=replicas, peers=(owner,), stages=stages, detail=why)
    if len(alike) > _MOST_NAMED:
        yield say(Code.MORE, count=len(alike) - _MOST_NAMED)


def _remedy(story: RoundStory) -> Iterator[Statement]:
    """What can be done; one statement at most."""
    timing = story.known.state.spec.timing
    worst, extra = story.worst
    if extra < SHORT:
        # Nothing is unusual; still the round may wait for slow replicas each time.
        is_long = story.times.phases["offer"] >= max(SHORT, 0.2 * story.times.seconds)
        worst = "offer" if is_long else "decision"
    lost = [each.sequence for each in story.lines if each.kind is Kind.LOST]
    rejected = [each.sequence for each in story.lines if each.kind in (Kind.REJECTED, Kind.STRIKE)]
    if lost:
        yield say(Code.REMEDY, *lost, detail="lost", seconds=timing.lost_after)
    elif rejected:
        yield say(Code.REMEDY, *rejected, detail="rejected")
    elif worst != "decision":
        yield say(Code.REMEDY, detail=worst, factor=timing.straggler)
