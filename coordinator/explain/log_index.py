"""Where in the event log the answers are: the events of each round, and the last events about each peer.

The log itself stays on disk. The index has a few numbers for each round and peer, so that a question reads
only the events that it is about, also after 10,000 rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from coordinator.state import events
from coordinator.state.event_codec import STORED_KINDS
from coordinator.state.events import Event
from protocol.types import PeerId

_KEPT: Mapping[type[Event], int] = {
    events.PeerJoined: 3,
    events.RoleChanged: 3,
    events.AddressesChanged: 2,
    events.PeerDraining: 1,
    events.PeerLeft: 2,
    events.PeerLost: 2,
    events.PeerRetreated: 3,
    events.LinkFailed: 3,
    events.AssignmentReserved: 1,
    events.PeerBanned: 1,
    events.PeerUnbanned: 1,
    events.PeerStruck: 16,
    events.PeerQuarantined: 1,
    events.AnchorDiverged: 2,
    events.PeerMeasured: 1,
    events.InviteUsed: 1,
}
"""The kinds of events about one peer, and how many of each are kept for it."""


_KEPT_STARTS = 64


@dataclass(frozen=True, slots=True)
class RoundMarks:
    """When a round went from one phase to the next; times in seconds on the clock of the events.

    The times of `closed_at` and `reported_at` are those of the stage that was decided last. A phase that did
    not take place has no length: its time is that of the phase before.

    Attributes:
        first, last: numbers of the first event after the round before, and of the decision that ended it.
        began_at: the end of the round before, or the first plan.
        offered_at: the first offer at any stage.
        closed_at: the group was closed.
        reported_at: the last report before the decision.
        is_committed: at least one stage committed payloads.
        is_aborted: at least one stage was aborted.
    """

    number: int
    first: int
    last: int
    began_at: float
    offered_at: float
    closed_at: float
    reported_at: float
    decided_at: float
    is_committed: bool = False
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


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the coordinator: the number of its event, and the seconds since the event before it."""

    number: int
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class AdoptedPlan:
    """The number of the event that adopted a plan, and the first round that runs under it."""

    number: int
    from_round: int


@dataclass(frozen=True)
class IndexRecord:
    """All that an index knows. Kinds of events have their names in the log."""

    length: int = 0
    rounds: tuple[RoundMarks, ...] = ()
    plans: Mapping[int, AdoptedPlan] = field(default_factory=dict)
    paused: int | None = None
    starts: tuple[Start, ...] = ()
    newest_at: float | None = None
    peers: Mapping[PeerId, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    contributions: Mapping[PeerId, int] = field(default_factory=dict)
    began: tuple[int, float] | None = None
    offered_at: float | None = None
    closed: Mapping[int, float] = field(default_factory=dict)
    reported: Mapping[int, float] = field(default_factory=dict)
    outcomes: Mapping[int, bool | None] = field(default_factory=dict)


class LogIndex:
    """Fed with every stored event in order, from the first one on or from the first one after `former`.

    Attributes:
        length: events so far; the number of the newest one.
        rounds: of the decided rounds, in order.
        plans: by epoch.
        paused: the number of the event that paused the run; None while it is not paused.
        starts: the last starts of the coordinator, but for the first one.
    """

    def __init__(self, stages: int, former: IndexRecord = IndexRecord()) -> None:
        self._stages = stages
        self.length, self.paused = former.length, former.paused
        self.rounds, self.plans = list(former.rounds), dict(former.plans)
        self.starts = deque(former.starts, maxlen=_KEPT_STARTS)
        self._newest_at = former.newest_at
        kinds = {STORED_KINDS[kind]: kind for kind in _KEPT}
        self._peers: dict[PeerId, dict[type[Event], tuple[int, ...]]] = {
            peer: {kinds[name]: numbers for name, numbers in known.items()}
            for peer, known in former.peers.items()
        }
        self._contributions = dict(former.contributions)
        self._began = former.began
        """Number and time of the event that began the current round."""
        self._offered_at = former.offered_at
        self._closed, self._reported = dict(former.closed), dict(former.reported)
        self._outcomes = dict(former.outcomes)

    @property
    def known(self) -> IndexRecord:
        """What it knows; later events do not change it."""
        return IndexRecord(
            self.length,
            tuple(self.rounds),
            dict(self.plans),
            self.paused,
            tuple(self.starts),
            self._newest_at,
            {
                peer: {STORED_KINDS[kind]: numbers for kind, numbers in known.items()}
                for peer, known in self._peers.items()
            },
            dict(self._contributions),
            self._began,
            self._offered_at,
            dict(self._closed),
            dict(self._reported),
            dict(self._outcomes),
        )

    def note(self, event: Event) -> None:  # noqa: PLR0912
        """Count `event`, the next one of the log."""
        self.length += 1
        if isinstance(event, events.CoordinatorStarted) and self._newest_at is not None:
            self.starts.append(Start(self.length, max(0.0, event.at - self._newest_at)))
        self._newest_at = event.at
        match event:
            case events.PlanAdopted(plan=plan):
                self.plans[plan.epoch] = AdoptedPlan(self.length, plan.from_round)
                if self._began is None:
                    self._began = self.length, event.at
            case events.RunPaused():
                self.paused = self.length
            case events.RunResumed():
                self.paused = None
            case events.PayloadOffered(descriptor=descriptor):
                if descriptor.round_number == len(self.rounds) + 1 and self._offered_at is None:
                    self._offered_at = event.at
            case events.GroupClosed():
                self._closed[event.stage] = event.at
            case events.HoldingsReported():
                self._reported[event.stage] = event.at
            case (
                events.RoundCommitted(decision=decision)
                | events.RoundAborted(decision=decision)
                | events.StageSkipped(decision=decision)
            ):
                for entry in decision.entries:
                    self._contributions[entry.descriptor.owner] = self.length
                is_skipped = isinstance(event, events.StageSkipped)
                self._outcomes[decision.stage] = None if is_skipped else decision.committed
                if len(self._outcomes) == self._stages:
                    self._end_round(decision.stage, event.at)
            case _ if type(event) in _KEPT:
                self._note_peers(event)

    def current(self, now: float) -> RoundMarks | None:
        """The round that is not decided yet, as if it were decided at `now`; None before the first plan."""
        if self._began is None:
            return None
        open_stages = [stage for stage in self._closed if stage not in self._outcomes]
        return self._marks(open_stages[0] if open_stages else -1, now)

    def epoch_of(self, round_number: int) -> int:
        """The epoch of the plan under which `round_number` runs; that of the first one for earlier rounds."""
        newest_first = reversed(self.plans)
        begun = (epoch for epoch in newest_first if self.plans[epoch].from_round <= round_number)
        return next(begun, 1)

    def of_peer(self, peer: PeerId) -> tuple[int, ...]:
        """The numbers of the last events about `peer`, in order."""
        numbers = {number for kept in self._peers.get(peer, {}).values() for number in kept}
        if peer in self._contributions:
            numbers.add(self._contributions[peer])
        return tuple(sorted(numbers))

    def _note_peers(self, event: Event) -> None:
        kind = type(event)
        for peer in peers_of(event):
            kept = self._peers.setdefault(peer, {})
            kept[kind] = (*kept.get(kind, ()), self.length)[-_KEPT[kind] :]

    def _end_round(self, stage: int, at: float) -> None:
        assert self._began is not None, "a plan comes before the first decision"
        outcomes, marks = self._outcomes.values(), self._marks(stage, at)
        self.rounds.append(replace(marks, is_committed=True in outcomes, is_aborted=False in outcomes))
        self._began, self._offered_at = (self.length, at), None
        self._closed, self._reported, self._outcomes = {}, {}, {}

    def _marks(self, stage: int, at: float) -> RoundMarks:
        assert self._began is not None
        first, began_at = self._began
        offered = at if self._offered_at is None else self._offered_at
        closed = max(offered, self._closed.get(stage, at))
        reported = max(closed, self._reported.get(stage, at if stage not in self._closed else closed))
        number = len(self.rounds) + 1
        # The event that ended the round before belongs to that round.
        return RoundMarks(number, first + (number > 1), self.length, began_at, offered, closed, reported, at)


def peers_of(event: Event) -> tuple[PeerId, ...]:
    """The peers that `event`, one of the kinds above, concerns."""
    if isinstance(event, events.LinkFailed):
        return event.peer, event.neighbour
    if isinstance(event, events.AssignmentReserved):
        return (event.reservation.peer,)
    peer: PeerId | None = getattr(event, "peer", None)
    return () if peer is None else (peer,)
