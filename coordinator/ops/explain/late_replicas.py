"""Which replicas offered late or nothing in a round, and why."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.known import SHORT, SLOW, middle
from coordinator.ops.explain.round_story import FirstOffer, RoundStory
from coordinator.ops.explain.statements import Code, nonfinite, say
from coordinator.store.history_tables import Standing
from protocol.math.turns import due_stages, rounds_behind
from protocol.status import Statement
from protocol.types import PeerId

_MOST_NAMED = 5
_MOST_EVENTS = 3


def waits(story: RoundStory) -> Iterator[Statement]:
    """The replicas that offered late, a part or nothing, and why; and members with values not finite."""
    yield from _nonfinite(story)
    yield from _broken(story)
    silent = [index for index in story.members if index not in story.offers]
    for index in silent[:_MOST_NAMED]:
        yield from _why_silent(story, index)
    if not story.offers:
        return
    *others, (index, last) = story.offers.items()
    usual = story.usual_offer(index)
    if others:
        before, offer = others[-1]
        lag, cited = last.seconds - offer.seconds, (last.sequence, offer.sequence)
        if lag > max(SHORT, 0.1 * last.seconds):
            yield say(Code.LAST, *cited, replicas=(index, before), seconds=last.seconds, lag=lag, usual=usual)
            yield from _why_slow(story, index, last, middle(each.seconds for _, each in others) or 0.0)
    elif usual is not None and last.seconds > SLOW * usual and last.seconds - usual > SHORT:
        yield say(Code.LAST, last.sequence, replicas=(index,), seconds=last.seconds, usual=usual)
        yield from _why_slow(story, index, last, usual)


def _nonfinite(story: RoundStory) -> Iterator[Statement]:
    """The members in which values became not finite: their replicas trained less, or offered nothing."""
    for each in [figures for figures in story.figures if figures.nonfinite_step][:_MOST_NAMED]:
        parts = (part for stage in story.stages for part in stage.contributions if part.peer == each.peer)
        cited = (part.offered_sequence for part in parts if part.standing is Standing.WITHHELD)
        yield nonfinite(each, *cited)


def _broken(story: RoundStory) -> Iterator[Statement]:
    """The replicas that have lost a member in the round, and what counts of the others."""
    state, plan = story.known.state, story.plan
    spec = state.spec_under(plan) if plan else state.spec
    for replica in plan.replicas if plan else ():
        members, lines = story.members[replica.index], story.about(replica.index)
        parts = [part for stage in story.stages for part in stage.contributions if part.peer in members]
        done = [part for part in parts if part.standing is Standing.COUNTED]
        gone = [stage for member in replica.members for stage in member.stages]
        gone = [
            stage for stage in due_stages(spec, story.number, gone) if stage not in {e.stage for e in done}
        ]
        if done and gone and lines and story.times.is_decided:
            whole = spec.samples_per_round(spec.microbatches_of(replica)) * spec.model.context
            steps = [
                spec.inner.steps * part.tokens / (whole * rounds_behind(spec, part.stage, story.number))
                for part in done
            ]
            yield say(
                Code.BROKEN,
                *(each.sequence for each in lines),
                replicas=(replica.index,),
                peers=dict.fromkeys(part.peer for part in done),
                stages=gone,
                done=round(max(steps)),
                steps=spec.inner.steps,
            )


def _why_silent(story: RoundStory, index: int) -> Iterator[Statement]:
    members, who = story.members[index], {"replicas": (index,), "peers": story.members[index]}
    parts = [part for stage in story.stages for part in stage.contributions if part.peer in members]
    withheld = [part.offered_sequence for part in parts if part.standing is Standing.WITHHELD]
    gone = next((part for part in parts if part.culprit is not None), None)
    measured = [each for each in story.figures if each.peer in members]
    if lines := story.about(index):
        yield say(Code.NO_OFFER, *(each.sequence for each in lines), detail=lines[0].text, **who)
    elif withheld:
        if not any(each.nonfinite_step for each in measured):
            yield say(Code.WITHHELD, *withheld, detail="", known=len(measured), **who)
    elif gone is not None:
        yield say(Code.NO_OFFER, gone.cause_sequence, detail=gone.detail or "", **who)
    elif story.times.is_decided:
        closed = (each.summary.closed_sequence or each.summary.decided_sequence for each in story.stages)
        yield say(Code.NO_OFFER, *closed, detail="", usual=story.usual_offer(index), **who)


def _why_slow(story: RoundStory, index: int, offer: FirstOffer, others: float) -> Iterator[Statement]:
    """What is known of a replica that offered late, in comparison with the others."""
    usual, cited, members = story.usual_offer(index), offer.sequence, story.members[index]
    yield from map(story.tell, story.about(index)[:_MOST_EVENTS])
    if story.former is not None and not {*story.former.get(index, ())} & {*members}:
        yield say(Code.FIRST_ROUND, cited, replicas=(index,))
    measured = [each for each in story.figures if each.peer in members and each.inner_seconds > 0]
    if measured:
        busy = max(measured, key=lambda each: each.compute_seconds)
        inner, compute = busy.inner_seconds, busy.compute_seconds
        yield say(Code.COMPUTED, cited, peers=(busy.peer,), inner=inner, compute=compute)
    if usual is not None and usual > SLOW * others and offer.seconds < SLOW * usual:
        yield say(Code.ALWAYS_SLOW, cited, replicas=(index,), seconds=others)
    speeds = {index: [_flops(story, peer) for peer in peers] for index, peers in story.members.items()}
    alike = (each for number, each in speeds.items() if number != index and len(each) == len(members))
    median = middle(flops for each in alike for flops in each if flops)
    for peer, flops in zip(members, speeds[index], strict=True):
        if flops and median and flops * SLOW < median:
            yield say(Code.FLOPS, cited, peers=(peer,), own=flops, usual=median)


def _flops(story: RoundStory, peer: PeerId) -> float:
    known = story.known.state.estimates.get(peer)
    return known.capacity.flops if known else 0.0
