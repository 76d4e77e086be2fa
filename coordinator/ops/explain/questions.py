"""Which questions there are, and which events of the log each needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from coordinator.ops.explain.past import Past, RoundMarks
from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId

MOST_CHARACTERS = 600
"""Of a question."""
MOST_ASKED_EVENTS = 64
MOST_READ = 10_000
"""Events that one question reads of one round."""
MOST_READ_BEFORE = 10_000
"""Offers that it reads of the rounds before."""
COMPARED_ROUNDS = 16
"""Decided rounds before the one that is asked for, whose times are compared."""
COMPARED_OFFERS = 4
"""Of these, the rounds whose offers are read."""
_EVENT = re.compile(r"events?((?:[\s,]+\d{1,15})+)")


@dataclass(frozen=True)
class AboutNow:
    """What does the run wait for, and what would make it faster?"""


@dataclass(frozen=True)
class AboutRound:
    """Why did this round take so long, or why was it aborted?"""

    number: int


@dataclass(frozen=True)
class AboutPeer:
    """What does this peer do, and why does it not train?"""

    peer: PeerId


@dataclass(frozen=True)
class AboutEvents:
    """What do these events of the log say?"""

    numbers: tuple[int, ...]


Question = AboutNow | AboutRound | AboutPeer | AboutEvents


@dataclass(frozen=True)
class Span:
    """Events `first` to `last` of the log, those of `kinds` alone if there are any."""

    first: int
    last: int
    kinds: frozenset[type[Event]] = frozenset()


def question_of(text: str, state: State, past: Past) -> Question:
    """A question: "now", the number of a round, "event N ..." or a peer by name or by an end of its id.

    Raises HetnodeError BAD_OPTION for a round, an event or a peer that the run does not have, and for an end
    that several peers share.
    """
    text = text[: MOST_CHARACTERS + 1].strip()
    if text.lower() in ("", "now"):
        return AboutNow()
    if found := _EVENT.fullmatch(text.lower()):
        numbers = tuple(dict.fromkeys(int(each) for each in re.findall(r"\d+", found[1])))
        if len(numbers) > MOST_ASKED_EVENTS:
            raise _bad(f"{len(numbers)} events are more than {MOST_ASKED_EVENTS}.")
        if wrong := [each for each in numbers if not 1 <= each <= past.length]:
            raise _bad(f"There is no event {wrong[0]}: the log has {past.length} so far.")
        return AboutEvents(numbers)
    if re.fullmatch(r"(round\s*)?\d{1,9}", text.lower()):
        return _about_round(int(re.findall(r"\d+", text)[0]), state, past)
    return AboutPeer(_peer(text, state))


def _about_round(number: int, state: State, past: Past) -> AboutRound:
    if not state.plans:
        raise _bad("The run has no round yet: it waits for its first peers.")
    most = min(state.current_round, state.spec.rounds)
    if not 1 <= number <= most:
        raise _bad(f"There is no round {number} so far: rounds 1 to {most} have begun.")
    return AboutRound(number)


def _peer(text: str, state: State) -> PeerId:
    known: Collection[PeerId] = dict.fromkeys((*state.peers, *state.enrolled, *state.banned))
    named = [peer for peer in known if state.name_of(peer) == text]
    if len(named) == 1:
        return named[0]
    part = text.removeprefix("..")
    found = [peer for peer in known if part and (peer.endswith(part) or peer.startswith(part))]
    exact = [peer for peer in found if peer == part]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"No peer of this run has {part[:64]!r} at the beginning or the end of its id.",
            "'hetnode status' shows the ends of the peers' ids. Ask for one of these, for a round by its "
            "number, or for 'now'.",
        )
    raise _bad(f"{len(found)} peers have {part[:64]!r} at the beginning or the end of their ids.")


def _bad(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_OPTION,
        cause,
        "Ask for 'now', the number of a round, the end of a peer's id, or 'event' and a number.",
    )


def round_asked(past: Past, question: Question, state: State) -> RoundMarks | None:
    """The round that the question is about, else the current one; the last one when all are decided."""
    current = min(state.current_round, state.spec.rounds)
    return past.round(question.number if isinstance(question, AboutRound) else current)


def spans_of(
    question: Question, past: Past, asked: RoundMarks | None, before: Sequence[RoundMarks], paused: int | None
) -> tuple[Span, ...]:
    """The events that the answer needs, in order. `before`: the rounds with which `asked` is compared."""
    if isinstance(question, AboutEvents):
        return tuple(Span(each, each) for each in question.numbers)
    if isinstance(question, AboutPeer):
        return tuple(Span(each, each) for each in past.of_peer(question.peer))
    if asked is None:
        # Nothing but joins and invites so far; their end says what the run waits for.
        return (Span(max(1, past.length - MOST_READ + 1), past.length, _GATHERING),)
    offers = [
        Span(max(each.first, each.last - MOST_READ_BEFORE // COMPARED_OFFERS), each.last, _COMPARED)
        for each in before[-COMPARED_OFFERS:]
    ]
    # Of a very long round the end: that is where it is decided.
    own = Span(max(asked.first, asked.last - MOST_READ + 1), asked.last, _OF_A_ROUND)
    is_earlier = paused is not None and paused < min(each.first for each in (*offers, own))
    return *((Span(paused, paused),) if paused is not None and is_earlier else ()), *offers, own


_COMPARED: frozenset[type[Event]] = frozenset({events.PayloadOffered, events.RunPaused})
_GATHERING: frozenset[type[Event]] = frozenset(
    {events.CoordinatorStarted, events.PeerJoined, events.PeerLeft, events.PeerLost}
)
_NOT_OF_A_ROUND: frozenset[type[Event]] = frozenset(
    {events.DigestAttested, events.PeerMeasured, events.InviteCreated, events.InviteRevoked, events.PeerSeen}
)
_OF_A_ROUND: frozenset[type[Event]] = frozenset(get_args(Event)) - _NOT_OF_A_ROUND
