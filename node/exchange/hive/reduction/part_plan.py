"""Who reduces and who checks which parts in one round of a stage, and what a member has of it at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hivemind.p2p import PeerID

from node.exchange.hive.reduction.part_reducer import ReducedPart, answer_nbytes
from node.exchange.transfer import chunk_bytes
from protocol.codec.payload import decode
from protocol.errors import ErrorCode, HetnodeError
from protocol.reduction.counted_result import CountedResult
from protocol.reduction.partition import PartRange, checkers_of, group_shares, partition
from protocol.reduction.parts import ReductionLayout, join_parts
from protocol.types import ExchangeGroup, PeerId, ResultClaim

CHECK_ROUNDS = 32
"""Rounds in which a member checks the same other one. A change costs what both have held back."""
RETRY_SECONDS = 0.5
"""Between two attempts to reach a member."""


@dataclass(frozen=True)
class PartPlan:
    """Who reduces what in one round of a stage; all members have the same.

    Attributes:
        members: sorted by peer id, as text.
        weights: of their payloads, from the signed descriptors.
        ranges: by member, what it reduces; empty for those that reduce nothing.
        checkers: by member, the position of the one that checks what it reduces; None: nobody does.
    """

    layout: ReductionLayout
    members: tuple[PeerID, ...]
    weights: tuple[float, ...]
    ranges: tuple[PartRange, ...]
    checkers: tuple[int | None, ...]

    @classmethod
    def of_group(cls, layout: ReductionLayout, group: ExchangeGroup) -> PartPlan:
        """The plan that all members make of the same group of the coordinator.

        Members that others cannot dial reduce nothing. If no uplink is known, all others reduce equal parts.

        Raises ValueError if there is no such member, or an owner is not a peer id.
        """
        owners = [descriptor.owner for descriptor in group.descriptors]
        is_open = [line.is_open for line in group.lines] or [True] * len(owners)
        uplinks = [line.uplink for line in group.lines] or [0] * len(owners)
        weights = tuple(descriptor.weight for descriptor in group.descriptors)
        shares = group_shares(is_open, uplinks, layout.result.nbytes / layout.payload.nbytes)
        ranges = tuple(partition(layout.chunks.total, shares))
        round_number = max((descriptor.round_number for descriptor in group.descriptors), default=0)
        checkers = checkers_of(shares, is_open, round_number // CHECK_ROUNDS)
        return cls(layout, tuple(map(PeerID.from_base58, owners)), weights, ranges, checkers)

    @cached_property
    def parts(self) -> tuple[tuple[PartRange, ...], ...]:
        """By member: its range in parts of about one message each; hivemind reduces one after the other."""
        return tuple(tuple(self._parts_of(each)) for each in self.ranges)

    @property
    def all_parts(self) -> list[PartRange]:
        return [part for of_one in self.parts for part in of_one]

    def by_reducer(self, sent: Sequence[bytes]) -> list[list[bytes]]:
        """A payload that is cut into :attr:`all_parts`: by member, the parts that it reduces."""
        parts = iter(sent)
        return [[next(parts) for _ in of_one] for of_one in self.parts]

    def traffic(self, position: int) -> tuple[int, int]:
        """Bytes that a member sends and receives in a round: parts, and answers, without libp2p's own.

        Both also go to the checkers.
        """
        others, sent, received = len(self.members) - 1, 0, 0
        for reducer, (parts, checker) in enumerate(zip(self.parts, self.checkers, strict=True)):
            out = sum(self.layout.part_sent(part).nbytes for part in parts)
            back = sum(self.answer_nbytes(part) for part in parts)
            sent += others * back if reducer == position else out
            received += others * out if reducer == position else back
            if checker is None:
                continue
            if checker == position:
                received += others * out + back
            else:
                sent += out + back * (reducer == position)
        return sent, received

    def checked_by(self, position: int) -> int | None:
        """The position of the reducer that a member checks."""
        return self.checkers.index(position) if position in self.checkers else None

    def sums_message(self, group_id: bytes, reducer: int, answers: Sequence[bytes]) -> bytes:
        """What the checker of `reducer` signs: all of its answers of one round."""
        name: bytes = self.members[reducer].to_base58().encode()
        digest = hashlib.sha256(b"".join(answers)).digest()
        return b"hetnode sums 1\n" + group_id + b"\n" + name + b"\n" + digest

    def answer_nbytes(self, part: PartRange) -> int:
        """Length of every answer of the reducer of `part`."""
        return answer_nbytes(len(self.members), self.layout.part_reduced(part).nbytes)

    def read_answer(self, part: PartRange, data: bytes) -> ReducedPart:
        """Raises HetnodeError PAYLOAD_CORRUPT for what no reducer of `part` answers."""
        if len(data) != (nbytes := self.answer_nbytes(part)):
            raise _corrupt(f"It has {len(data)} bytes for a part of {nbytes}.")
        try:
            reduced = ReducedPart.from_bytes(data, len(self.members))
        except ValueError as error:
            raise _corrupt(f"{error}.") from None
        decode(self.layout.part_reduced(part), reduced.data)
        return reduced

    def _parts_of(self, whole: PartRange) -> list[PartRange]:
        if not len(whole):
            return []
        nbytes = max(self.layout.part_sent(whole).nbytes, self.layout.part_reduced(whole).nbytes)
        count = min(len(whole), -(-nbytes // chunk_bytes(len(self.members) - 1)))
        return [
            PartRange(whole.first_chunk + part.first_chunk, whole.first_chunk + part.last_chunk)
            for part in partition(len(whole), [1.0] * count)
        ]


@dataclass(frozen=True)
class Reduction:
    """What one member has at the end: a reduced part, or None where it is missing, for each of all parts.

    `unsigned_by` is the position of this member's checker if that has not signed.
    """

    plan: PartPlan
    parts: tuple[ReducedPart | None, ...]
    unsigned_by: int | None = None

    @property
    def result(self) -> bytes | None:
        """The result of the round; None if a part is missing."""
        found = [part.data for part in self.parts if part is not None]
        if len(found) < len(self.parts):
            return None
        return join_parts(self.plan.layout, found, self.plan.all_parts)

    @property
    def lacks(self) -> list[int]:
        """The positions of the reducers of whose parts at least one is missing, ascending."""
        owners = [position for position, parts in enumerate(self.plan.parts) for _ in parts]
        return sorted({owner for owner, part in zip(owners, self.parts, strict=True) if part is None})

    def to_bytes(self) -> bytes | None:
        """What members serve and hash (protocol.reduction.counted_result); None if a part is missing."""
        if (result := self.result) is None:
            return None
        senders = tuple(part.senders for part in self.parts if part is not None)
        return CountedResult(len(self.plan.members), senders, result).to_bytes()

    def claim(self, data: bytes) -> ResultClaim:
        """What a member that has all parts tells the coordinator; `data` are its bytes."""
        counted = {position for part in self.parts if part is not None for position in part.senders}
        left_out = (each for position, each in enumerate(self.plan.members) if position not in counted)
        without = tuple(PeerId(each.to_base58()) for each in left_out)
        return ResultClaim(hashlib.sha256(data).hexdigest(), len(data), without)


def _corrupt(cause: str) -> HetnodeError:
    remedy = "It is not applied. The other member has to update its program."
    return HetnodeError(ErrorCode.PAYLOAD_CORRUPT, f"A result cannot be used. {cause}", remedy)
