"""Answers a question about a run from its state, its history and the events that the answer is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from coordinator.ops.explain.facts import MOST_SENTENCES, Facts, NumberedEvent, cut, say, told
from coordinator.ops.explain.now_answer import explain_now
from coordinator.ops.explain.past import Past
from coordinator.ops.explain.peer_answer import explain_peer
from coordinator.ops.explain.questions import (
    COMPARED_ROUNDS,
    AboutEvents,
    AboutNow,
    AboutPeer,
    AboutRound,
    Question,
    Span,
    question_of,
    round_asked,
    spans_of,
)
from coordinator.ops.explain.round_answer import explain_round
from coordinator.run.state.events import Event, PlanAdopted
from coordinator.run.state.state import State
from coordinator.run.state.text import counted
from coordinator.store.history import SqliteHistory
from coordinator.store.history_tables import JournalLine
from protocol.status import Explanation, Measurement, Sentence


class Read(Protocol):
    """As :meth:`coordinator.store.store.Store.read`."""

    def __call__(
        self, first: int, last: int, kinds: Collection[type[Event]] = ()
    ) -> Sequence[tuple[int, Event]]: ...


def explain(
    text: str,
    state: State,
    history: SqliteHistory,
    read: Read,
    measurements: Iterable[Measurement],
    now: float,
) -> Explanation:
    """The answer to a question. Bounded. Waits for a disk: it is for threads.

    Args:
        history: with the events that have led to `state`, and perhaps later ones.
        read: reads events of the log.
        now: seconds on the clock of the events.

    Raises:
        HetnodeError: as :func:`question_of`; NO_HISTORY; and what `read` raises.
    """
    past = Past(history, state, now)
    question = question_of(text, state, past)
    facts, spans = _facts(question, state, past, tuple(measurements), now)

    def events_of(spans: Iterable[Span]) -> Iterator[NumberedEvent]:
        for span in spans:
            for number, event in read(span.first, span.last, span.kinds):
                yield NumberedEvent(number, event)

    former = (
        Span(each.sequence, each.sequence) for each in facts.plans.values() if not state.plan_of(each.epoch)
    )
    plans = (each.event.plan for each in events_of(former) if isinstance(each.event, PlanAdopted))
    facts = replace(facts, events=tuple(events_of(spans)), former_plans=tuple(plans))
    found = _answer(question, facts)
    sentences = found.sentences[:MOST_SENTENCES]
    if left := len(found.sentences) - len(sentences):
        sentences = (*sentences, say(f"{counted(left, 'more sentence')} would follow"))
    return Explanation(cut(found.title), sentences)


def _facts(
    question: Question, state: State, past: Past, measurements: tuple[Measurement, ...], now: float
) -> tuple[Facts, tuple[Span, ...]]:
    """What the history says for `question`, and the events of the log that the answer needs."""
    asked = round_asked(past, question, state) if state.plans else None
    rounds = past.rounds_before(asked.number, COMPARED_ROUNDS) if asked is not None else ()
    epochs = {state.epoch, *(each.epoch for each in rounds)}
    starts: tuple[JournalLine, ...] = ()
    if asked is not None:
        epochs |= {asked.epoch, asked.epoch - 1}
        starts = past.starts(asked.first, asked.last)
    line = past.paused()
    paused = line.sequence if line else None
    facts = Facts(state, now, measurements, rounds, asked, past.plans(epochs), paused, starts)
    return facts, spans_of(question, past, asked, rounds, paused)


def _answer(question: Question, facts: Facts) -> Explanation:
    match question:
        case AboutRound():
            return explain_round(facts)
        case AboutPeer(peer=peer):
            return explain_peer(facts, peer)
        case AboutEvents():
            return explain_events(facts)
        case AboutNow():
            return explain_now(facts)


def explain_events(facts: Facts) -> Explanation:
    """What each event says, with its time."""

    def sentence(each: NumberedEvent) -> Sentence:
        at = datetime.fromtimestamp(each.event.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return say(f"{at} UTC: {told(each.event)}", each.number)

    count = len(facts.events)
    title = f"Event {facts.events[0].number}" if count == 1 else counted(count, "event")
    return Explanation(title, tuple(map(sentence, facts.events)))
