"""What an answer is made from: the state of the run, and its history with the times of its rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from coordinator.ops.explain.statements import Code, say
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import RoundSummary
from coordinator.store.history_tables import JournalLine, Kind, StageOutcome
from protocol.status import Statement
from protocol.types import PeerId

COMPARED_ROUNDS = 16
"""Decided rounds before the one that is asked for, whose times are compared."""
PHASES = "inner", "offer", "group", "decision"
"""Training until the first offer, waiting for other offers, gathering payloads, deciding."""
SLOW = 1.3
"""A figure is unusual from this multiple of the usual one on."""
SHORT = 1.0
"""Seconds; a smaller difference is not worth a sentence."""


@dataclass(frozen=True)
class RoundTimes:
    """How long a round took, and where its time went; that of an open round as if it were decided now.

    The phases are those of the stage that was decided last. A phase that did not take place has no length.

    Attributes:
        first, last: numbers of the first event after the round before, and of the decision that ended it.
        phases: seconds, by the names of :data:`PHASES`.
        is_aborted: at least one stage was aborted.
    """

    number: int
    first: int
    last: int
    began_at: float
    ended_at: float
    phases: dict[str, float]
    is_decided: bool
    is_aborted: bool

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    def compared(self, before: Sequence[RoundTimes]) -> Statement:
        """How long the round took, in comparison with those before it."""
        return say(
            Code.ROUND,
            self.first - (self.number > 1),
            rounds=(self.number,),
            seconds=self.seconds,
            usual=middle(each.seconds for each in before),
            compared=len(before),
            decided=self.is_decided,
        )


class Known:
    """What is known for one question.

    Attributes:
        now: seconds on the clock of the events.
        resting: the peers whose processes rest.
        length: of the log: the number of its newest event in the history.
    """

    def __init__(
        self, state: State, history: SqliteHistory, now: float, resting: Collection[PeerId] = ()
    ) -> None:
        history.catch_up()
        self.state, self.history, self.now, self.resting = state, history, now, resting
        self.length = history.run().sequence

    @property
    def current(self) -> int:
        """The open round, or the last one."""
        return min(self.state.current_round, self.state.spec.rounds)

    def times(self, number: int) -> tuple[RoundTimes | None, tuple[RoundTimes, ...]]:
        """The times of a round, None before it begins; and of decided rounds before it, the oldest first."""
        found = self.history.rounds(number + 1, 1 + COMPARED_ROUNDS)
        times = [self._times(each) for each in reversed(found)]
        asked = times.pop() if times and times[-1].number == number else None
        return asked, tuple(each for each in times if each.is_decided)[-COMPARED_ROUNDS:]

    def lines(self, first: int, last: int, *kinds: Kind) -> tuple[JournalLine, ...]:
        """The journal's lines about the events `first` to `last`, in order."""
        return self.history.journal(first, last, kinds=kinds)

    def newest(self, kind: Kind) -> tuple[JournalLine, ...]:
        """The newest line of a kind, if there is one."""
        return self.history.journal(1, self.length, 1, (kind,))

    def told(self, line: JournalLine) -> Statement:
        """What a line of the journal says, and how long ago that was."""
        peers = (line.peer,) if line.peer else ()
        return say(Code.EVENT, line.sequence, peers=peers, detail=line.text, ago=self.now - line.at)

    def _times(self, summary: RoundSummary) -> RoundTimes:
        is_decided = summary.seconds is not None
        ended = summary.began_at + (summary.seconds or 0.0) if is_decided else self.now
        stages = sorted(
            summary.stages, key=lambda each: (each.decided_sequence or 0, each.closed_sequence or 0)
        )
        closed = [each for each in stages if each.decided_at is None and each.closed_at is not None]
        last = next(iter(stages[-1:] if is_decided else closed), None)
        offers = [each.first_offer_at for each in stages if each.first_offer_at is not None]
        closed_at = last.closed_at if last else None
        reported_at = last.last_report_at if last else None
        # A phase whose end is not known lasts to the end of the round; without reports, deciding took it all.
        marks = [summary.first_began_at, min(offers, default=ended)]
        marks.append(ended if closed_at is None else closed_at)
        marks.append(marks[-1] if reported_at is None else reported_at)
        for i in (1, 2, 3):
            marks[i] = max(marks[i], marks[i - 1])
        spans = (max(0.0, end - start) for start, end in pairwise((*marks, ended)))
        return RoundTimes(
            summary.round_number,
            # The event that ended the round before belongs to that round.
            summary.first_sequence + (summary.round_number > 1),
            max((each.decided_sequence or 0 for each in stages), default=0) if is_decided else self.length,
            summary.first_began_at,
            ended,
            dict(zip(PHASES, spans, strict=True)),
            is_decided,
            any(each.outcome is StageOutcome.ABORTED for each in stages),
        )


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None without any."""
    known = [each for each in values if each is not None]
    return median(known) if known else None
