"""Questions to a run whose events are in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.ops.explain.explain import explain
from coordinator.ops.explain.facts import MOST_CHARACTERS, MOST_CITED, MOST_SENTENCES
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.status import Explanation, Measurement
from tests.support.history import stored, write_history


class Asked:
    """Answers from the events so far, and what the events are. `read_numbers`: the events that were read."""

    def __init__(self, state: State, events: Iterable[Event], now: float) -> None:
        self.state, self.now = state, now
        self.log = stored(events)
        self.read_numbers: set[int] = set()

    def __call__(self, question: object, measurements: Sequence[Measurement] = ()) -> Explanation:
        with TemporaryDirectory() as folder:
            history = write_history(Path(folder, "history.sqlite"), self.state.spec, self.log)
            return explain(str(question), self.state, history, self.read, measurements, self.now)

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        found = [(number, self.log[number - 1]) for number in range(first, last + 1)]
        found = [each for each in found if not kinds or isinstance(each[1], tuple(kinds))]
        self.read_numbers |= {number for number, _ in found}
        return found

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
        *range(1, min(state.current_round, state.spec.rounds) + 1 if state.plans else 0),
        *state.peers,
        f"event {' '.join(map(str, range(max(1, len(ask.log) - 60), len(ask.log) + 1)))}",
    ]
    for question in questions:
        check_bounded(ask, ask(question))
