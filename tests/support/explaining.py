"""Questions to a run whose events are in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coordinator.ops.explain.explain import MOST_STATEMENTS, explain
from coordinator.ops.explain.sentences import MOST_CHARACTERS
from coordinator.ops.explain.statements import MOST_CITED, Code
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from protocol.status import Explanation, Measurement, Statement
from protocol.types import PeerId
from tests.support.history import stored, write_history


class Asked:
    """Answers from the events so far, and what the events are. `read_numbers`: the events that were read."""

    def __init__(
        self, state: State, events: Iterable[Event], now: float, resting: Collection[PeerId] = ()
    ) -> None:
        self.state, self.now, self.resting = state, now, resting
        self.log = stored(events)
        self.read_numbers: set[int] = set()

    def __call__(self, question: object, measurements: Sequence[Measurement] = ()) -> Explanation:
        with self.history(measurements) as history:
            return self.answer(question, history)

    @contextmanager
    def history(self, measurements: Sequence[Measurement] = ()) -> Iterator[SqliteHistory]:
        """The history of the events so far, which several answers may share."""
        measured = [(self.now, each) for each in measurements]
        with TemporaryDirectory() as folder:
            yield write_history(Path(folder, "history.sqlite"), self.state.spec, self.log, measured)

    def answer(self, question: object, history: SqliteHistory) -> Explanation:
        return explain(str(question), self.state, history, self.read, self.now, self.resting)

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        self.read_numbers |= {*range(first, last + 1)}
        return [(number, self.log[number - 1]) for number in range(first, last + 1)]

    def cited(self, statement: Statement) -> list[Event]:
        """The events of a statement."""
        return [self.log[number - 1] for number in statement.events]


def said(explanation: Explanation, code: Code, **fields: Any) -> list[Statement]:
    """The statements, title included, with a code and with these fields and figures."""
    return [
        each
        for each in (explanation.title, *explanation.statements)
        if each.code == code and all(_value(each, name) == value for name, value in fields.items())
    ]


def _value(statement: Statement, name: str) -> Any:
    if name in Statement.__dataclass_fields__:
        return getattr(statement, name)
    figure = statement.figures.get(name)
    return None if figure is None else round(figure, 1)


def check_bounded(ask: Asked, found: Explanation) -> None:
    """The bounds of every answer, and that each event which it names is in the log."""
    assert len(found.statements) <= MOST_STATEMENTS + 1
    for each in (found.title, *found.statements):
        assert each.text.isprintable()
        assert each.text
        assert len(each.text) <= MOST_CHARACTERS + 1
        assert len(each.events) <= MOST_CITED
        assert all(1 <= number <= len(ask.log) for number in each.events)


def check_all_answers(state: State, ask: Asked) -> None:
    """Every question about the run has a bounded answer."""
    questions = [
        "now",
        *range(1, min(state.current_round, state.spec.rounds) + 1 if state.plans else 0),
        *state.peers,
        f"event {' '.join(map(str, range(max(1, len(ask.log) - 60), len(ask.log) + 1)))}",
    ]
    with ask.history() as history:
        for question in questions:
            check_bounded(ask, ask.answer(question, history))
