"""What an answer is made from, and the phrases that the answers share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from coordinator.ops.explain.past import RoundMarks
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.run.state.text import listed
from coordinator.status.messages import event_message
from coordinator.store.history_tables import AdoptedPlan, JournalLine
from protocol.status import Measurement, Sentence
from protocol.types import Plan

MOST_SENTENCES = 32
MOST_CHARACTERS = 600
"""Of one sentence, in which a peer's own words may be."""
MOST_CITED = 12
"""Events that one sentence names."""
_PEER_ID = re.compile(r"\b(?:12D3Koo|Qm)[1-9A-HJ-NP-Za-km-z]{20,60}")

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class NumberedEvent:
    """An event and its number in the log; the first one is 1."""

    number: int
    event: Event


@dataclass(frozen=True)
class Facts:
    """What is known for one question.

    Attributes:
        now: seconds on the clock of the events.
        measurements: the newest of each member.
        rounds: the last decided rounds before the one that is asked for, the oldest first.
        asked: the round that is asked for, or the current one; None before the first plan.
        plans: by epoch, where the plan was adopted.
        paused: the number of the event that has paused the run; None if it is not paused.
        starts: of the coordinator in that round.
        events: those of the log that the question needs, in order.
        former_plans: those of the rounds above, and the one before that of `asked`, if not in `state`.
    """

    state: State
    now: float
    measurements: tuple[Measurement, ...]
    rounds: tuple[RoundMarks, ...]
    asked: RoundMarks | None
    plans: Mapping[int, AdoptedPlan]
    paused: int | None
    starts: tuple[JournalLine, ...]
    events: tuple[NumberedEvent, ...] = ()
    former_plans: tuple[Plan, ...] = ()

    def plan_of(self, epoch: int) -> Plan | None:
        """The plan of `epoch`; None if it is not one of those above."""
        return next((each for each in self.former_plans if each.epoch == epoch), self.state.plan_of(epoch))

    def plan_for(self, round_number: int) -> Plan:
        """The plan under which `asked` or one of `rounds` runs."""
        newest_first = sorted((*self.former_plans, *self.state.plans), key=lambda each: -each.epoch)
        begun = (each for each in newest_first if each.from_round <= round_number)
        return next(begun, newest_first[-1])

    def of_kind(self, *kinds: type[E]) -> Iterator[tuple[int, E]]:
        """Number and event of those events that are of one of `kinds`."""
        for each in self.events:
            if isinstance(each.event, kinds):
                yield each.number, each.event

    def in_round(self, marks: RoundMarks) -> list[NumberedEvent]:
        return [each for each in self.events if marks.first <= each.number <= marks.last]


def say(text: str, *numbers: int) -> Sentence:
    """A sentence that names the events `numbers`, cut to the bounds above, with a full stop."""
    text = cut(with_short_ids(text[: 2 * MOST_CHARACTERS]).rstrip(". "))
    return Sentence(f"{text}.", tuple(sorted(set(numbers)))[:MOST_CITED])


def cut(text: str) -> str:
    """`text` with at most MOST_CHARACTERS characters, all printable."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text[: MOST_CHARACTERS + 1])
    return clean if len(clean) <= MOST_CHARACTERS else f"{clean[: MOST_CHARACTERS - 4]} ..."


def told(event: Event) -> str:
    """What `event` says, with the ends of peer ids."""
    return with_short_ids(event_message(event))


def with_short_ids(text: str) -> str:
    return _PEER_ID.sub(lambda found: f"..{found[0][-8:]}", text)


def duration(seconds: float) -> str:
    """Such as "0.04 s", "4.2 s", "42 s", "3 min 20 s" or "2 h 5 min"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.{1 if seconds >= 0.995 else 2}f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def megabits(bytes_per_second: float) -> str:
    return f"{8e-6 * bytes_per_second:,.1f} Mb/s"


def gigaflops(flops: float) -> str:
    return f"{flops / 1e9:,.3g} GFLOP/s"


def middle(values: Iterable[float]) -> float | None:
    """The median; None without values."""
    known = list(values)
    return median(known) if known else None


def times(factor: float) -> str:
    """Such as "2.8 times"."""
    return f"{factor:.1f} times" if factor < 9.95 else f"{factor:.0f} times"


def rounds_before(count: int) -> str:
    return "the round before" if count == 1 else f"the {count} rounds before"


def plan_number(facts: Facts, epoch: int) -> tuple[int, ...]:
    """The event that adopted a plan."""
    return (facts.plans[epoch].sequence,) if epoch in facts.plans else ()


def stage_names(stages: list[int]) -> str:
    """Such as "stage 1" or "stages 0, 1"."""
    noun = "stage" if len(stages) == 1 else "stages"
    return f"{noun} {listed([str(each) for each in sorted(stages)], most=8)}"
