"""Answers a question about a run from its state and its history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from coordinator.ops.explain.known import Known
from coordinator.ops.explain.now_answer import explain_now
from coordinator.ops.explain.peer_answer import explain_peer
from coordinator.ops.explain.questions import question_of
from coordinator.ops.explain.round_answer import explain_round
from coordinator.ops.explain.sentences import sentence
from coordinator.ops.explain.statements import Code, say
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.messages import event_message, event_peers
from coordinator.store.history import SqliteHistory
from protocol.status import Explanation, Statement
from protocol.types import PeerId

MOST_STATEMENTS = 32


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
    now: float,
    resting: Collection[PeerId] = (),
) -> Explanation:
    """The answer to a question. Bounded. Waits for a disk: it is for threads.

    Args:
        history: with the events that have led to `state`, and perhaps later ones.
        read: reads events of the log.
        now: seconds on the clock of the events.
        resting: the peers whose processes rest.

    Raises:
        HetnodeError: as :func:`question_of`; NO_HISTORY; and what `read` raises.
    """
    known = Known(state, history, now, resting)
    question = question_of(text, state, known.length)
    if question.events:
        title, *found = _events(question.events, read)
    elif question.peer is not None:
        title, *found = explain_peer(known, question.peer)
    elif question.round_number:
        title, *found = explain_round(known, question.round_number)
    else:
        title, *found = explain_now(known)
    if left := len(found) - MOST_STATEMENTS:
        found = found[:MOST_STATEMENTS] + ([say(Code.MORE, count=left)] if left > 0 else [])
    texts = (replace(each, text=f"{sentence(each)}.") for each in found)
    return Explanation(replace(title, text=sentence(title)), tuple(texts))


def _events(numbers: Sequence[int], read: Read) -> list[Statement]:
    """The title, then what each event says, with its time."""
    found = [(number, event) for each in numbers for number, event in read(each, each)]
    return [
        say(Code.EVENT, count=len(found)),
        *(
            say(Code.EVENT, number, peers=event_peers(event), detail=event_message(event), at=event.at)
            for number, event in found
        ),
    ]
