"""Answers a question about a run from its event log: :func:`prepare`, then :func:`answer`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from coordinator.explain.facts import MOST_SENTENCES, Facts, NumberedEvent, cut, say, told
from coordinator.explain.log_index import LogIndex
from coordinator.explain.now_answer import explain_now
from coordinator.explain.peer_answer import explain_peer
from coordinator.explain.questions import (
    AboutEvents,
    AboutNow,
    AboutPeer,
    AboutRound,
    Question,
    Span,
    question_of,
    round_asked,
    rounds_compared,
    spans_of,
)
from coordinator.explain.round_answer import explain_round
from coordinator.state.events import Event, PlanAdopted
from coordinator.state.state import State
from coordinator.state.text import counted
from protocol.status import Explanation, Measurement, Sentence


class Read(Protocol):
    """As :meth:`coordinator.storage.store.Store.read`."""

    def __call__(
        self, first: int, last: int, kinds: Collection[type[Event]] = ()
    ) -> Sequence[tuple[int, Event]]: ...


@dataclass(frozen=True)
class Prepared:
    """A question with a snapshot of what is known, and the events of the log that the answer needs.

    Attributes:
        plans: the events that adopted the plans that the answer needs and the state does not keep.
    """

    question: Question
    facts: Facts
    spans: tuple[Span, ...]
    plans: tuple[Span, ...]


def prepare(
    text: str, state: State, index: LogIndex, measurements: Iterable[Measurement], now: float
) -> Prepared:
    """Reads the question and keeps what it needs, which later events do not change. Quick.

    Args:
        index: of all events that have led to `state`.
        now: seconds on the clock of the events.

    Raises:
        HetnodeError: as :func:`question_of`.
    """
    question = question_of(text, state, index)
    asked = round_asked(index, question, now)
    rounds = rounds_compared(index, asked.number) if asked is not None else ()
    log = dict(index.plans), index.paused, tuple(index.starts)
    facts = Facts(state, now, tuple(measurements), rounds, asked, *log)
    return Prepared(question, facts, spans_of(question, state, index, now), _former_plans(facts, index))


def _former_plans(facts: Facts, index: LogIndex) -> tuple[Span, ...]:
    if facts.asked is None:
        return ()
    asked = index.epoch_of(facts.asked.number)
    needed = {asked, asked - 1, *(index.epoch_of(each.number) for each in facts.rounds)} & index.plans.keys()
    numbers = (index.plans[epoch].number for epoch in sorted(needed) if facts.state.plan_of(epoch) is None)
    return tuple(Span(number, number) for number in numbers)


def answer(prepared: Prepared, read: Read) -> Explanation:
    """The answer, from the events that `read` finds in the log. Bounded.

    Raises what `read` raises, and nothing else.
    """

    def events_of(spans: Iterable[Span]) -> Iterator[NumberedEvent]:
        for span in spans:
            for number, event in read(span.first, span.last, span.kinds):
                yield NumberedEvent(number, event)

    plans = tuple(
        each.event.plan for each in events_of(prepared.plans) if isinstance(each.event, PlanAdopted)
    )
    facts = replace(prepared.facts, events=tuple(events_of(prepared.spans)), former_plans=plans)
    found = _answer(prepared.question, facts)
    sentences = found.sentences[:MOST_SENTENCES]
    if left := len(found.sentences) - len(sentences):
        sentences = (*sentences, say(f"{counted(left, 'more sentence')} would follow"))
    return Explanation(cut(found.title), sentences)


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
