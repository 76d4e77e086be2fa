"""The history of one round: when each replica offered, and the events of each peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from coordinator.ops.explain.known import PHASES, SHORT, SLOW, Known, middle
from coordinator.ops.explain.statements import Code, say
from coordinator.store.history_answers import RoundDetail
from coordinator.store.history_tables import JournalLine, Kind, Standing
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Statement
from protocol.types import PeerId

COMPARED_OFFERS = 4
"""Rounds before the one that is asked for, whose offers are compared."""
_OF_MEMBERS = (
    Kind.LOST,
    Kind.LEFT,
    Kind.RETREATED,
    Kind.QUARANTINED,
    Kind.DIVERGED,
    Kind.LINK_FAILED,
    Kind.ADDRESSES,
    Kind.DRAINS,
    Kind.ROLE,
    Kind.JOINED,
)
"""What may keep a member from its round; what explains most comes first."""


@dataclass(frozen=True)
class FirstOffer:
    """The first offer of a replica in a round: seconds after the round began, and its event."""

    seconds: float
    sequence: int


class RoundStory:
    """One round, decided or not. Raises HetnodeError NO_HISTORY before the history has it.

    Attributes:
        before: the times of the decided rounds before it.
        lines: of the journal, about the events of the round.
        offers: the first one of each replica, in the order of their times.
        members: of each replica of the round.
        former: of each replica of the round before; None for the first round.
        plan: that of the round; None where it is not kept any more.
    """

    def __init__(self, known: Known, number: int) -> None:
        times, self.before = known.times(number)
        detail = known.history.round(number)
        if times is None or detail is None:
            cause = f"The history of the run does not reach round {number} yet."
            raise HetnodeError(ErrorCode.NO_HISTORY, cause, "Ask again in a moment.")
        self.known, self.number, self.times, self.stages = known, number, times, detail.stages
        self.figures, self.lines = detail.members, known.lines(times.first, times.last)
        self.offers, self.plan = first_offers(detail), known.state.plan_of(detail.summary.epoch)
        replicas = self.plan.replicas if self.plan else ()
        self.members: Mapping[int, tuple[PeerId, ...]] = {
            each.index: tuple(member.peer for member in each.members) for each in replicas
        } or _owners(detail)
        found = (known.history.round(each.number) for each in self.before[-COMPARED_OFFERS:])
        earlier = [each for each in found if each is not None]
        self._offers_before = [first_offers(each) for each in earlier]
        self.former = _owners(earlier[-1]) if earlier else None

    @property
    def marks(self) -> list[int]:
        """The first offer, the close of the last group and the last decision."""
        found = [each.sequence for each in [*self.offers.values()][:1]]
        found += [each.summary.closed_sequence or 0 for each in self.stages[-1:]]
        return [*found, self.times.last] if self.times.is_decided else found

    @cached_property
    def usual_seconds(self) -> float | None:
        return middle(each.seconds for each in self.before)

    def usual(self, phase: str) -> float | None:
        return middle(each.phases[phase] for each in self.before)

    def usual_offer(self, index: int) -> float | None:
        """Median seconds until the first offer of a replica in the rounds before; None if not known."""
        return middle(each[index].seconds for each in self._offers_before if index in each)

    def is_unusual(self, phase: str) -> bool:
        seconds, usual = self.times.phases[phase], self.usual(phase)
        return seconds > SHORT and (usual is None or seconds > SLOW * usual)

    @cached_property
    def worst(self) -> tuple[str, float]:
        """The phase that took most more than usual, and the seconds of that."""
        extra = {name: self.times.phases[name] - (self.usual(name) or 0.0) for name in PHASES}
        return max(extra.items(), key=lambda each: each[1])

    def about(self, index: int) -> list[JournalLine]:
        """What happened to the members of a replica in the round, with what explains most first."""
        members = self.members[index]
        found = {e.sequence: e for e in self.lines if e.peer in members and e.kind in _OF_MEMBERS}
        return sorted(found.values(), key=lambda each: (_OF_MEMBERS.index(each.kind), each.sequence))

    def told(self, *kinds: Kind) -> Iterator[Statement]:
        """What the journal says of this round in the lines of some kinds."""
        return (self.tell(each) for each in self.lines if each.kind in kinds)

    def tell(self, line: JournalLine) -> Statement:
        """What a line of the journal says, with its time in the round."""
        peers, after = ((line.peer,) if line.peer else ()), max(0.0, line.at - self.times.began_at)
        return say(Code.EVENT, line.sequence, peers=peers, detail=line.text, after=after)


def first_offers(detail: RoundDetail) -> Mapping[int, FirstOffer]:
    """The first offer of each replica, in the order of their times."""
    found = sorted(
        (part.offered_at - detail.summary.first_began_at, part.offered_sequence or 0, part.replica or 0)
        for stage in detail.stages
        for part in stage.contributions
        if part.standing is not Standing.WITHHELD and part.offered_at is not None
    )
    first: dict[int, FirstOffer] = {}
    for seconds, sequence, replica in found:
        first.setdefault(replica, FirstOffer(seconds, sequence))
    return first


def _owners(detail: RoundDetail) -> dict[int, tuple[PeerId, ...]]:
    """The members of each replica that host the stages which the round exchanged."""
    found: dict[int, dict[PeerId, None]] = {}
    for stage in detail.stages:
        for part in stage.contributions:
            if part.replica is not None and part.replica >= 0:
                found.setdefault(part.replica, {})[part.peer] = None
    return {index: tuple(peers) for index, peers in found.items()}
