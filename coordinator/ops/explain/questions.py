"""Which questions there are."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.short_id import named_by
from protocol.types import PeerId

MOST_CHARACTERS = 600
"""Of a question."""
MOST_ASKED_EVENTS = 64
_EVENT = re.compile(r"events?((?:[\s,]+\d{1,15})+)")


@dataclass(frozen=True)
class Question:
    """What is asked: why a round took so long or was aborted, why a peer does not train, what events say.

    Without any of these: what the run waits for, and what would make it faster.
    """

    round_number: int = 0
    peer: PeerId | None = None
    events: tuple[int, ...] = ()


def question_of(text: str, state: State, events: int) -> Question:
    """A question: "now", the number of a round, "event N ..." or a peer by name or by an end of its id.

    `events`: how many the log has. Raises HetnodeError BAD_OPTION for a round, an event or a peer that the
    run does not have, and for an end that several peers share.
    """
    text = text[: MOST_CHARACTERS + 1].strip()
    if text.lower() in ("", "now"):
        return Question()
    if found := _EVENT.fullmatch(text.lower()):
        numbers = tuple(dict.fromkeys(int(each) for each in re.findall(r"\d+", found[1])))
        if len(numbers) > MOST_ASKED_EVENTS:
            raise _bad(f"{len(numbers)} events are more than {MOST_ASKED_EVENTS}.")
        if wrong := [each for each in numbers if not 1 <= each <= events]:
            raise _bad(f"There is no event {wrong[0]}: the log has {events} so far.")
        return Question(events=numbers)
    if re.fullmatch(r"(round\s*)?\d{1,9}", text.lower()):
        return Question(_round(int(re.findall(r"\d+", text)[0]), state))
    return Question(peer=_peer(text, state))


def _round(number: int, state: State) -> int:
    if not state.plans:
        raise _bad("The run has no round yet: it waits for its first peers.")
    most = min(state.current_round, state.spec.rounds)
    if not 1 <= number <= most:
        raise _bad(f"There is no round {number} so far: rounds 1 to {most} have begun.")
    return number


def _peer(text: str, state: State) -> PeerId:
    known: Collection[PeerId] = dict.fromkeys((*state.peers, *state.enrolled, *state.banned))
    named = [peer for peer in known if state.name_of(peer) == text]
    if len(named) == 1:
        return named[0]
    if (found := PeerId(named_by(text, known, "peers"))) in known:
        return found
    raise _bad(f"No peer of this run has {text[:64]!r} at the beginning or the end of its id.")


def _bad(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_OPTION,
        cause,
        "Ask for 'now', the number of a round, the end of a peer's id, or 'event' and a number.",
    )
