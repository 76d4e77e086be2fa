"""The answers about the rounds, each built once for all members that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import Committed, Decision, ExchangeGroup, PayloadDescriptor
from protocol.wire.convert.fields import shortened
from protocol.wire.convert.payloads import decision_to_pb, group_to_pb
from protocol.wire.groups import at_positions, group_digest, pack, positions_of

_KEPT = 64
"""Groups, and decisions, whose answers are kept: members ask for those of a few rounds.

Of most of them that is the packed answer alone: it has a tenth of the size of the message that is packed.
"""

R = TypeVar("R")
A = TypeVar("A")


class _GroupAnswers:
    """The answers about one group, each made when it is first asked for."""

    def __init__(self, group: ExchangeGroup) -> None:
        self.descriptors = group.descriptors
        self._group = group

    @cached_property
    def digest(self) -> bytes:
        return group_digest(self.descriptors)

    @cached_property
    def whole(self) -> pb.MatchReply:
        return group_to_pb(self._group)

    @cached_property
    def packed(self) -> pb.MatchReply:
        return pb.MatchReply(packed=pack(group_to_pb(self._group)))


class _DecisionAnswers:
    """The answers about one decision, each made when it is first asked for."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._by_group: dict[bytes, bytes | None] = {}

    @cached_property
    def whole(self) -> pb.DecisionReply:
        return decision_to_pb(self._decision)

    @cached_property
    def packed(self) -> pb.DecisionReply:
        return pb.DecisionReply(packed=pack(decision_to_pb(self._decision)))

    def to_member(self, group: Held) -> pb.DecisionReply:
        """For a member of a group that holds a part of it."""
        decision = self._decision
        if not isinstance(decision, Committed) or decision.result is not None:
            return self.packed  # positions say nothing of a rollback or of a result
        if group.digest not in self._by_group:
            counted = tuple(entry.descriptor for entry in decision.entries)
            self._by_group[group.digest] = positions_of(group.descriptors, counted)
        counts = self._by_group[group.digest]
        if not counts or int.from_bytes(counts, "little") & ~int.from_bytes(group.positions, "little"):
            return self.packed  # it must fetch payloads, and needs their holders
        return pb.DecisionReply(
            stage=decision.stage,
            round=decision.round_number,
            committed=True,
            next_epoch=decision.next_epoch,
            reason=shortened(decision.reason),
            counted=counts,
        )


@dataclass(frozen=True)
class Held:
    """What a member holds of the payloads of a group, which has this digest."""

    descriptors: tuple[PayloadDescriptor, ...]
    digest: bytes
    positions: bytes

    @property
    def held(self) -> tuple[PayloadDescriptor, ...]:
        """Raises HetnodeError BAD_REQUEST for positions that do not fit the group."""
        return at_positions(self.descriptors, self.positions)


class RoundMessages:
    """The answers of one coordinator."""

    def __init__(self) -> None:
        self._groups = _Newest(_GroupAnswers)
        self._decisions = _Newest(_DecisionAnswers)

    def of_group(self, group: ExchangeGroup, packs: bool) -> pb.MatchReply:
        answers = self._groups.of(group)
        return answers.packed if packs else answers.whole

    def of_decision(self, decision: Decision, packs: bool, member: Held | None = None) -> pb.DecisionReply:
        """`member`: what the caller holds, if it has said so by positions."""
        answers = self._decisions.of(decision)
        if member is not None:
            return answers.to_member(member)
        return answers.packed if packs else answers.whole

    def held(self, state: State, request: pb.ReportRequest) -> Held:
        """What a member reports by positions. Raises GROUP_UNKNOWN if its group is not that of the round."""
        group = state.round_of(request.stage, request.round).group
        answers = None if group is None else self._groups.of(group)
        if answers is None or answers.digest != request.group:
            raise HetnodeError(
                ErrorCode.GROUP_UNKNOWN,
                f"The payloads of stage {request.stage} in round {request.round} are reported by their "
                "positions in another group than that of the coordinator.",
                "No action is needed: a node then names the payloads themselves.",
            )
        return Held(answers.descriptors, answers.digest, request.positions)


class _Newest(Generic[R, A]):
    """What `make` has made of the newest records."""

    def __init__(self, make: Callable[[R], A]) -> None:
        self._make = make
        self._made: dict[int, tuple[R, A]] = {}

    def of(self, record: R) -> A:
        # By identity: records never change, and to compare two costs more than most answers.
        found = self._made.get(id(record))
        if found is None:
            found = self._made[id(record)] = record, self._make(record)
            if len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]
        return found[1]
