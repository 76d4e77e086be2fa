"""What the events say about one round: who offered when, and what happened to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from coordinator.ops.explain.facts import Facts, NumberedEvent, middle
from coordinator.ops.explain.past import RoundMarks
from coordinator.run.state import events
from protocol.types import Decision, PeerId, Replica

E = TypeVar("E", bound=events.Event)

SLOW = 1.3
"""A time is unusual from this multiple of the usual one on."""
SHORT = 1.0
"""Seconds; a smaller difference is not worth a sentence."""
MOST_NAMED = 5
"""Replicas or payloads that a round tells one by one."""
_MEMBER_EVENTS = (
    events.PeerLost,
    events.PeerLeft,
    events.PeerRetreated,
    events.PeerQuarantined,
    events.AnchorDiverged,
    events.LinkFailed,
    events.AddressesChanged,
    events.PeerDraining,
    events.RoleChanged,
    events.PeerJoined,
)
"""What may keep a member from its round; what explains most comes first."""


@dataclass(frozen=True)
class Answer:
    """The first offer of a replica in a round: seconds after the round began, and its event."""

    seconds: float
    number: int


class RoundStory:
    """What the events say about one round, decided or not."""

    def __init__(self, facts: Facts) -> None:
        assert facts.asked is not None
        self.facts, self.state, self.marks = facts, facts.state, facts.asked
        self.number = self.marks.number
        self.is_decided = all(self.state.is_decided(stage, self.number) for stage in range(self.state.stages))
        self.own = facts.in_round(self.marks)
        self.plan = facts.plan_for(self.number)
        self.replicas = {each.index: each for each in self.plan.replicas}
        self.answers = self._answers(self.marks, self.own)
        earlier = [self._answers(each, facts.in_round(each)) for each in facts.rounds]
        self._before = {
            index: [found[index].seconds for found in earlier if index in found] for index in self.replicas
        }

    def _answers(self, marks: RoundMarks, own: list[NumberedEvent]) -> Mapping[int, Answer]:
        """By replica, its first offer of a round."""
        plan, found = self.facts.plan_for(marks.number), dict[int, Answer]()
        replica_of = {member.peer: each.index for each in plan.replicas for member in each.members}
        for each in own:
            if isinstance(each.event, events.PayloadOffered):
                index = replica_of.get(each.event.descriptor.owner)
                if index is not None and index not in found:
                    found[index] = Answer(each.event.at - marks.began_at, each.number)
        return found

    def usual(self, index: int) -> float | None:
        """Median seconds until the first offer of a replica in the rounds before; None if not known."""
        return middle(self._before.get(index, ()))

    def of(self, kind: type[E]) -> list[tuple[int, E]]:
        """Number and event of the events of one kind."""
        return [(each.number, each.event) for each in self.own if isinstance(each.event, kind)]

    def numbers(self, *kinds: type[events.Event]) -> list[int]:
        return [each.number for each in self.own if isinstance(each.event, kinds)]

    @property
    def decisions(self) -> list[tuple[int, float, Decision]]:
        """Number, time and decision of each stage, in the order of the log."""
        return [
            (each.number, each.event.at, each.event.decision)
            for each in self.own
            if isinstance(each.event, events.DecisionEvent)
        ]

    def about(self, replica: Replica) -> list[NumberedEvent]:
        """What happened to the members of a replica in the round, with what explains most first."""
        members = {member.peer for member in replica.members}
        found = []
        for each in self.own:
            if isinstance(each.event, _MEMBER_EVENTS) and not members.isdisjoint(peers_of(each.event)):
                found.append((_MEMBER_EVENTS.index(type(each.event)), each.number, each))
        return [each for _, _, each in sorted(found, key=lambda each: each[:2])]

    def offers_of(self, stage: int) -> Mapping[PeerId, int]:
        """The events of the offers of one stage, by owner."""
        return {
            event.descriptor.owner: number
            for number, event in self.of(events.PayloadOffered)
            if (event.descriptor.stage, event.descriptor.round_number) == (stage, self.number)
        }


def peers_of(event: events.Event) -> tuple[PeerId, ...]:
    """The peers that `event`, one of those that may keep a member from its round, concerns."""
    if isinstance(event, events.LinkFailed):
        return event.peer, event.neighbour
    peer: PeerId | None = getattr(event, "peer", None)
    return () if peer is None else (peer,)
