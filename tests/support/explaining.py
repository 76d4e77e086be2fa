"""Questions to a run whose events are in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from coordinator.explain.explain import answer, prepare
from coordinator.explain.facts import MOST_CHARACTERS, MOST_CITED, MOST_SENTENCES
from coordinator.explain.log_index import LogIndex
from coordinator.state.events import Event, PeerSeen
from coordinator.state.state import State
from protocol.status import Explanation, Measurement


class Asked:
    """Answers from the events so far, and what the events are."""

    def __init__(self, state: State, events: Iterable[Event], now: float) -> None:
        self.state, self.now = state, now
        self.log = [event for event in events if not isinstance(event, PeerSeen)]
        self.index = LogIndex(state.spec.swarm.stages)
        for event in self.log:
            self.index.note(event)

    def __call__(self, question: object, measurements: Sequence[Measurement] = ()) -> Explanation:
        prepared = prepare(str(question), self.state, self.index, measurements, self.now)
        return answer(prepared, self.read)

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        found = [(number, self.log[number - 1]) for number in range(first, last + 1)]
        return [each for each in found if not kinds or isinstance(each[1], tuple(kinds))]

    def cited(self, explanation: Explanation, text: str) -> list[Event]:
        """The events of the one sentence that contains `text`."""
        (sentence,) = [each for each in explanation.sentences if text in each.text]
        return [self.log[number - 1] for number in sentence.events]


def text_of(explanation: Explanation) -> str:
    """The title and all sentences, one a line."""
    return "\n".join([explanation.title, *(each.text for each in explanation.sentences)])


def check_bounded(ask: Asked, found: Explanation) -> None:
    """The bounds of every answer, and that each event which it names is in the log."""
    assert len(found.sentences) <= MOST_SENTENCES + 1
    for each in found.sentences:
        assert each.text.isprintable()
        assert each.text
        assert len(each.text) <= MOST_CHARACTERS + 1
        assert len(each.events) <= MOST_CITED
        assert all(1 <= number <= len(ask.log) for number in each.events)
    assert found.title
    assert len(found.title) <= MOST_CHARACTERS


def check_all_answers(state: State, ask: Asked) -> None:
    """Every question about the run has a bounded answer."""
    questions = [
        "now",
        *range(1, min(len(ask.index.rounds) + 1, state.spec.rounds) + 1 if state.plans else 0),
        *state.peers,
        f"event {' '.join(map(str, range(max(1, len(ask.log) - 60), len(ask.log) + 1)))}",
    ]
    for question in questions:
        check_bounded(ask, ask(question))
