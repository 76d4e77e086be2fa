"""What the run waits for, since when, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from coordinator.ops.explain.known import SHORT, Known, RoundTimes
from coordinator.ops.explain.predictions import predictions
from coordinator.ops.explain.round_story import first_offers
from coordinator.ops.explain.statements import Code, say
from coordinator.placement.phases import expected_seconds
from coordinator.placement.reservations import is_spare
from coordinator.run.rounds.deadlines import closes_at
from coordinator.run.rounds.rounds import is_stalled
from coordinator.status.causes import alarm_cause, run_cause
from coordinator.status.messages import run_message
from coordinator.store.history_tables import Kind
from protocol.status import RunPhase, Statement

_MOST_REPLICAS = 4


def explain_now(known: Known) -> Iterator[Statement]:
    """The title, then the statements."""
    state = known.state
    yield say(Code.RUN, cause=run_cause(state, known.resting), detail=run_message(state, known.resting))
    if state.phase is RunPhase.GATHERING:
        yield from map(known.told, known.newest(Kind.JOINED))
        yield say(Code.REMEDY, detail="gathering")
    if state.phase is not RunPhase.TRAINING:
        return
    if (alarm := alarm_cause(state)) is not None:
        yield say(Code.CAUSE, *(each.sequence for each in known.newest(Kind.ALARM)), cause=alarm)
    if state.pause is not None:
        yield from map(known.told, known.newest(Kind.PAUSED))
        yield say(Code.REMEDY, detail="paused")
    asked, before = known.times(known.current)
    is_open = state.current_round <= state.spec.rounds and not state.is_held
    if asked is not None and is_open:
        yield from _since(known, asked)
        yield from _missing(known, asked)
        yield asked.compared(before)
    # A rollback is decided as an abort.
    if aborted := [each for each in before if each.is_aborted and each.number not in state.restored]:
        rounds = [each.number for each in aborted]
        yield say(Code.ABORTS, *(each.last for each in aborted), rounds=rounds, compared=len(before))
    if is_open:
        idle = [each for each in state.staying if not state.takes_part(each.peer, state.plans[-1].from_round)]
        if idle:
            spares = sum(is_spare(state, each) for each in idle)
            yield say(Code.IDLE, peers=[each.peer for each in idle], spares=spares)
        if not is_stalled(state):
            yield from predictions(known)


def _since(known: Known, asked: RoundTimes) -> Iterator[Statement]:
    """Since when it waits for what the title says, by the event that began the wait."""
    if is_stalled(known.state):
        gone = known.lines(asked.first, asked.last, Kind.LOST, Kind.LEFT, Kind.RETREATED)
        yield from map(known.told, gone[-1:])
        yield say(Code.REMEDY, detail="stalled")
        return
    detail = known.history.round(asked.number)
    stages = [each.summary for each in detail.stages] if detail else []
    closed = [(each.closed_sequence or 0, each) for each in stages if each.closed_at is not None]
    if closed:
        sequence, last = max(closed, key=lambda each: each[0])
        if last.decided_at is None:
            since = known.now - (last.closed_at or 0.0)
            yield say(Code.GROUP_CLOSED, sequence, stages=(last.stage,), ago=since)
    elif detail and (offers := first_offers(detail)):
        closes, first = closes_at(known.state), next(iter(offers.values()))
        remaining = None if closes is None else max(0.0, closes - known.now)
        since = known.now - asked.began_at - first.seconds
        yield say(Code.OFFERED, first.sequence, ago=since, remaining=remaining)


def _missing(known: Known, asked: RoundTimes) -> Iterator[Statement]:
    """The replicas that have not answered, those that are late first; then silent members."""
    state, began = known.state, asked.first - (asked.number > 1)
    waiting = [
        each for each in state.complete_replicas(state.current_round) if each.index not in state.answered
    ]
    elapsed = known.now - state.began_at
    late = sorted((-(elapsed - expected_seconds(state, each)), each.index, each) for each in waiting)
    for lateness, index, replica in late[:_MOST_REPLICAS]:
        usual = expected_seconds(state, replica)
        if -lateness > SHORT or (state.answered and usual == inf):
            seen = [state.last_seen[member.peer] for member in replica.members]
            here = [each.inner_step for each in seen if each.round_number == state.current_round]
            step, steps = min(here, default=None), state.spec.inner.steps
            yield say(
                Code.LATE, began, replicas=(index,), seconds=elapsed, usual=usual, step=step, steps=steps
            )
    interval = state.spec.timing.heartbeat_of(state.live)
    members = (member.peer for replica in waiting for member in replica.members)
    silent = {peer: known.now - state.last_seen[peer].at for peer in members}
    if quiet := [peer for peer, seconds in silent.items() if seconds > 2.5 * interval]:
        longest, lost_after = max(silent.values()), state.spec.timing.lost_after
        yield say(Code.SILENT, began, peers=quiet, seconds=longest, lost_after=lost_after)
