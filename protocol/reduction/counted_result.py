"""What the members of a reduction hold, hash and serve: the result, and who is in each of its sums.

Magic, version, the number of members and of parts, for each part a bit for each member in canonical order
(the first one lowest, in whole bytes), then the result (protocol.reduction.parts). The hash covers who is in
which sum, because error feedback depends on that, too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ErrorCode, HetnodeError
from protocol.reduction.partition import PartRange
from protocol.reduction.parts import ReductionLayout, ranges_of

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"hncr"
_VERSION = 1


@dataclass(frozen=True)
class CountedResult:
    """The result of a round, and who is in it.

    Attributes:
        members: of the group, at least 1.
        senders: by part, the positions in the group of the members whose parts are in the sum, ascending.
        result: as protocol.reduction.parts.join_parts makes it.
    """

    members: int
    senders: tuple[tuple[int, ...], ...]
    result: bytes

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(_MAGIC, _VERSION, self.members, len(self.senders))
        return b"".join((header, *(mask_of(each, self.members) for each in self.senders), self.result))

    @classmethod
    def from_bytes(cls, layout: ReductionLayout, data: bytes) -> CountedResult:
        """What a member of any group has served. The values of the result are not read.

        Raises HetnodeError PAYLOAD_CORRUPT for what no member can have.
        """
        if len(data) < _HEADER.size:
            raise _corrupt(f"It has {len(data)} bytes, less than a header.")
        magic, version, members, parts = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise _corrupt("It does not begin as a result of a group does.")
        size = mask_nbytes(members)
        start = _HEADER.size + parts * size
        # Before anything is made of the numbers: the bytes must be there.
        if not members or not 0 < parts <= layout.chunks.total or start >= len(data):
            raise _corrupt(f"It has {len(data)} bytes for {parts} parts and {members} members.")
        result = data[start:]
        if len(ranges_of(layout, result)) != parts:
            raise _corrupt(f"Its result does not have the {parts} parts that it names.")
        try:
            senders = tuple(
                senders_of(data[first : first + size], members) for first in range(_HEADER.size, start, size)
            )
        except ValueError as error:
            raise _corrupt(f"{error}.") from None
        return cls(members, senders, result)

    def counts(self, position: int) -> bool:
        """Whether any part of the member at `position` is in the result."""
        return any(position in each for each in self.senders)

    def uncounted(self, layout: ReductionLayout, position: int) -> tuple[PartRange, ...]:
        """The parts of the payload of the member at `position` that are not in the result."""
        ranges = ranges_of(layout, self.result)
        return tuple(
            part for part, senders in zip(ranges, self.senders, strict=True) if position not in senders
        )


def most_nbytes(parameters: int) -> int:
    """An upper bound of the bytes of any result, and of any payload, of so many parameters."""
    return 8 * parameters + (1 << 20)  # a float32 value and an int32 index each, and the headers


def mask_nbytes(members: int) -> int:
    """Length of :func:`mask_of`."""
    return -(-members // 8)


def mask_of(positions: Sequence[int], members: int) -> bytes:
    """A bit for each of `members`, the first one lowest, in whole bytes."""
    return sum(1 << position for position in positions).to_bytes(mask_nbytes(members), "little")


def senders_of(mask: bytes, members: int) -> tuple[int, ...]:
    """The positions in a mask, ascending. Raises ValueError for none, and for one that does not exist."""
    bits = int.from_bytes(mask, "little")
    if len(mask) < mask_nbytes(members) or not 0 < bits < 1 << members:
        raise ValueError(f"A part counts none of {members} members, or others")
    return tuple(each for each in range(members) if bits >> each & 1)


def _corrupt(cause: str) -> HetnodeError:
    remedy = "It is not applied. The other members have to update their programs."
    return HetnodeError(ErrorCode.PAYLOAD_CORRUPT, f"A result cannot be used. {cause}", remedy)
