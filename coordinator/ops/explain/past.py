"""What an answer needs of the run's past, from its history: the marks of rounds, and where events are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from coordinator.run.state.state import State
from coordinator.store.history import RoundSummary, SqliteHistory
from coordinator.store.history_tables import AdoptedPlan, JournalLine, Kind, Outcome
from protocol.types import PeerId

_KEPT: Mapping[Kind, int] = {
    Kind.JOINED: 3,
    Kind.ROLE: 3,
    Kind.ADDRESSES: 2,
    Kind.DRAINS: 1,
    Kind.LEFT: 2,
    Kind.LOST: 2,
    Kind.RETREATED: 3,
    Kind.LINK_FAILED: 3,
    Kind.RESERVED: 1,
    Kind.BANNED: 1,
    Kind.UNBANNED: 1,
    Kind.STRIKE: 16,
    Kind.QUARANTINED: 1,
    Kind.DIVERGED: 2,
}
"""The lines of a peer's journal of which an answer about it may speak, and how many of each."""
_MOST_LINES = 200


@dataclass(frozen=True, slots=True)
class RoundMarks:
    """When a round went from one phase to the next; times in seconds on the clock of the events.

    The times of `closed_at` and `reported_at` are those of the stage that was decided last. A phase that did
    not take place has no length: its time is that of the phase before.

    Attributes:
        epoch: of its plan.
        first, last: numbers of the first event after the round before, and of the decision that ended it.
        began_at: the end of the round before, or the first plan.
        offered_at: the first offer at any stage.
        closed_at: the group was closed.
        reported_at: the last report before the decision.
        is_aborted: at least one stage was aborted.
    """

    number: int
    epoch: int
    first: int
    last: int
    began_at: float
    offered_at: float
    closed_at: float
    reported_at: float
    decided_at: float
    is_aborted: bool = False

    @property
    def seconds(self) -> float:
        return self.decided_at - self.began_at

    @property
    def phases(self) -> tuple[float, float, float, float]:
        """Seconds of training, waiting for other offers, gathering payloads, and deciding."""
        times = (self.began_at, self.offered_at, self.closed_at, self.reported_at, self.decided_at)
        first, second, third, fourth = (max(0.0, end - start) for start, end in pairwise(times))
        return first, second, third, fourth


class Past:
    """The past of a run whose state is `state` at time `now`.

    Attributes:
        length: of the log; the number of its newest event.
    """

    def __init__(self, history: SqliteHistory, state: State, now: float) -> None:
        history.catch_up()
        self._history, self._state, self._now = history, state, now
        self.length = history.run().sequence

    def rounds_before(self, number: int, most: int) -> tuple[RoundMarks, ...]:
        """The marks of at most `most` decided rounds before round `number`, the oldest first."""
        found = self._history.rounds(number, most) if most and number > 1 else ()
        decided = [each for each in found if each.seconds is not None]
        return tuple(self._marks(each) for each in reversed(decided))

    def round(self, number: int) -> RoundMarks | None:
        """The marks of a round, as if it were decided now if it is not; None before it begins."""
        found = self._history.rounds(number + 1, 1)
        return self._marks(found[0]) if found and found[0].round_number == number else None

    def plans(self, epochs: Iterable[int]) -> Mapping[int, AdoptedPlan]:
        found = ((epoch, self._history.plan(epoch)) for epoch in set(epochs))
        return {epoch: plan for epoch, plan in found if plan is not None}

    def paused(self) -> JournalLine | None:
        """What has paused the run; None if it is not paused."""
        lines = self._history.journal(1, self.length, 1, (Kind.PAUSED,)) if self._state.pause else ()
        return lines[0] if lines else None

    def starts(self, first: int, last: int) -> tuple[JournalLine, ...]:
        """The starts of the coordinator between two events, with the seconds of silence before them."""
        lines = self._history.journal(first, last, kinds=(Kind.STARTED,))
        return tuple(each for each in lines if each.seconds is not None)

    def of_peer(self, peer: PeerId) -> tuple[int, ...]:
        """The numbers of the last events about `peer`, in order."""
        found = self._history.peer(peer, _MOST_LINES)
        if found is None:
            return ()
        numbers, counts = (
            {found.credit.sequence, *(each.sequence for each in found.estimates[-1:])},
            Counter[Kind](),
        )
        for line in found.changes:
            counts[line.kind] += 1
            if counts[line.kind] <= _KEPT.get(line.kind, 0):
                numbers.add(line.sequence)
        return tuple(sorted(numbers - {0}))

    def _marks(self, summary: RoundSummary) -> RoundMarks:
        number, began = summary.round_number, summary.first_began_at
        decided = None if summary.seconds is None else summary.began_at + summary.seconds
        at = self._now if decided is None else decided
        stages = sorted(
            summary.stages, key=lambda each: (each.decided_sequence or 0, each.closed_sequence or 0)
        )
        is_open = [each for each in stages if each.decided_at is None and each.closed_at is not None]
        last = stages[-1:] if decided is not None else is_open[:1]
        offers = [each.first_offer_at for each in stages if each.first_offer_at is not None]
        offered = min(offers, default=at)
        closed_at = last[0].closed_at if last else None
        reported_at = last[0].last_report_at if last else None
        closed = max(offered, at if closed_at is None else closed_at)
        unreported = at if closed_at is None else closed
        reported = max(closed, unreported if reported_at is None else reported_at)
        ended = max((each.decided_sequence or 0 for each in stages), default=0)
        # The event that ended the round before belongs to that round.
        first = summary.first_sequence + (number > 1)
        until = self.length if decided is None else ended
        times = began, offered, closed, reported, at
        is_aborted = any(each.outcome is Outcome.ABORTED for each in stages)
        return RoundMarks(number, summary.epoch, first, until, *times, is_aborted=is_aborted)
