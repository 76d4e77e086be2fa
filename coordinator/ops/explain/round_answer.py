"""Why a round took as long as it did, or why it was aborted."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.exchange_answer import arbitrations, gathering, not_counted
from coordinator.ops.explain.facts import (
    Facts,
    duration,
    middle,
    rounds_before,
    say,
    stage_names,
    times,
)
from coordinator.ops.explain.late_replicas import interruptions, pauses, waits
from coordinator.ops.explain.round_story import SHORT, RoundStory
from coordinator.run.state import events
from protocol.math.turns import is_due
from protocol.status import Explanation, Sentence

_PHASES = (
    "training until the first payload was offered",
    "waiting for the payloads of the other replicas",
    "gathering the payloads",
    "deciding",
)


def explain_round(facts: Facts) -> Explanation:
    story = RoundStory(facts)
    if story.number in story.state.restored:
        return _rollback(story, story.state.restored[story.number])
    causes = [*interruptions(story), *pauses(story), *waits(story), *gathering(story), *arbitrations(story)]
    time = [*_where_the_time_went(story)]
    sentences = [
        *_outcome(story),
        *time[:-1],
        *causes,
        *time[-1:],
        *not_counted(story),
        *_stages(story),
        *_plans(story),
        *_remedies(story),
    ]
    return Explanation(_title(story), tuple(sentences))


def _rollback(story: RoundStory, restored: int) -> Explanation:
    """A round that restores anchors: nobody trains in it, so its time says nothing."""
    anchors = f"the anchors after round {restored}" if restored else "the initial parameters"
    cited = story.numbers(events.RunRolledBack)
    reason = next((event.reason for _, event in story.of(events.RunRolledBack)), "")
    why = f": {reason}" if reason else ""
    sentences = [say(f"The operator has rolled the run back, so it restores {anchors}{why}", *cited)]
    return Explanation(
        f"Round {story.number} is a rollback to round {restored}",
        (*sentences, *pauses(story), *_plans(story)),
    )


def _usual_seconds(story: RoundStory) -> float | None:
    return middle(each.seconds for each in story.facts.rounds)


def _title(story: RoundStory) -> str:
    marks, usual = story.marks, _usual_seconds(story)
    verb = "took" if story.is_decided else "has run for"
    title = f"Round {marks.number} {verb} {duration(marks.seconds)}"
    if usual:
        before = rounds_before(len(story.facts.rounds))
        factor = marks.seconds / usual
        compared = f"{times(factor)} the median" if not 0.9 < factor < 1.1 else "about the median"
        title += f", {compared} of {before} ({duration(usual)})"
    return title if story.is_decided else f"{title}, and is not decided"


def _outcome(story: RoundStory) -> Iterator[Sentence]:
    by_reason: dict[tuple[bool, str], list[tuple[int, int]]] = {}
    skipped: list[tuple[int, int]] = []
    for number, _, decision in story.decisions:
        has_turn = is_due(story.state.spec, decision.stage, decision.round_number)
        if decision.restore_round is not None or has_turn:
            by_reason.setdefault((decision.committed, decision.reason), []).append((decision.stage, number))
        else:
            skipped.append((decision.stage, number))
    for (committed, reason), found in sorted(by_reason.items()):
        stages = "every stage" if len(found) == story.state.stages else stage_names([s for s, _ in found])
        outcome = f"committed at {stages}" if committed else f"ABORTED at {stages}, so nothing counts there"
        yield say(f"It was {outcome}: {reason}", *(number for _, number in found))
    if skipped:
        stages = stage_names([stage for stage, _ in skipped])
        cited = [number for _, number in skipped]
        counts = "what was trained there counts in a later round"
        yield say(f"It skipped {stages}, without a turn: {counts}", *cited)
    for number, alarm in story.of(events.AlarmRaised):
        yield say(f"An alarm was raised about round {alarm.round_number}: {alarm.reason}", number)


def _where_the_time_went(story: RoundStory) -> Iterator[Sentence]:
    phases = story.marks.phases
    usual = [middle(each.phases[i] for each in story.facts.rounds) for i in range(len(phases))]
    cited = [answer.number for answer in sorted(story.answers.values(), key=lambda each: each.number)[:1]]
    cited += story.numbers(events.GroupClosed)[-1:]
    if story.is_decided:
        cited.append(story.marks.last)
    extra = [now - (before or 0.0) for now, before in zip(phases, usual, strict=True)]
    whole = story.marks.seconds - (_usual_seconds(story) or 0.0)
    worst = max(range(len(phases)), key=lambda i: extra[i])
    if story.facts.rounds and whole > SHORT and extra[worst] > SHORT:
        yield say(
            f"{duration(extra[worst])} more than usual went into {_PHASES[worst]}: "
            f"{duration(phases[worst])} instead of {duration(usual[worst] or 0.0)}",
            *cited,
        )
    parts = [f"{duration(seconds)} {name}" for seconds, name in zip(phases, _PHASES, strict=True) if seconds]
    if parts:
        yield say(f"Its time: {', '.join(parts)}", *cited)


def _stages(story: RoundStory) -> Iterator[Sentence]:
    """The stages, where one was decided clearly later than another."""
    decided = [(at, decision.stage, number) for number, at, decision in story.decisions]
    if len(decided) < 2:
        return
    (first, one, first_number), (last, other, last_number) = min(decided), max(decided)
    if last - first > max(SHORT, 0.1 * story.marks.seconds):
        yield say(
            f"Stage {other} was decided last, {duration(last - first)} after stage {one}",
            first_number,
            last_number,
        )


def _plans(story: RoundStory) -> Iterator[Sentence]:
    for number, event in story.of(events.PlanAdopted):
        plan = event.plan
        if plan.from_round == story.number:
            again = "It ran anew" if story.number > 1 else "It ran"
            yield say(f"{again} under plan {plan.epoch}: {plan.reason}", number)
        else:
            yield say(f"The next round got another plan, {plan.epoch}: {plan.reason}", number)


def _remedies(story: RoundStory) -> Iterator[Sentence]:
    """What can be done; one sentence."""
    timing = story.state.spec.timing
    lost = story.numbers(events.PeerLost)
    if lost:
        yield say(
            f"A peer that vanishes is missed after {timing.lost_after:g} s (timing.lost_after), and its "
            "round waits until then; a node that ends with 'hetnode leave' costs no such wait",
            *lost,
        )
        return
    phases, usual = story.marks.phases, [middle(e.phases[i] for e in story.facts.rounds) for i in range(4)]
    extra = [now - (before or 0.0) for now, before in zip(phases, usual, strict=True)]
    worst = max(range(len(phases)), key=lambda i: extra[i])
    if extra[worst] < SHORT:
        worst = 1  # nothing is unusual; still the round may wait for slow replicas each time
        if phases[worst] < max(SHORT, 0.2 * story.marks.seconds):
            return
    rejected = story.numbers(events.PayloadRejected, events.PeerStruck)
    if rejected:
        yield say(
            "A peer whose payloads are rejected should run the same version of hetnode as the others, on "
            "sound memory; 'hetnode peers ban' excludes it",
            *rejected,
        )
    elif worst == 1:
        share = (
            "the coordinator gives slow replicas fewer microbatches from a later round on (grouping.balance)"
            if story.state.spec.grouping.balance
            else "with grouping.balance slow replicas would get fewer microbatches"
        )
        yield say(
            f"A round waits for slow replicas up to {timing.straggler:g} times the time that half of them "
            f"need (timing.straggler); {share}. 'hetnode explain now' predicts what would be faster"
        )
    elif worst == 0:
        yield say("'hetnode explain now' predicts what would make the inner phase shorter")
    elif worst == 2:
        yield say(
            "Smaller payloads (outer.top_k, outer.quantizer) or faster lines would shorten the gathering"
        )
