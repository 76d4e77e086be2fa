"""Messages about the payloads of an exchange group in few bytes: packed, or as positions in the group.

The descriptors of a large group take hundreds of kilobytes, and each of its members gets them and reports
them. So a member names the group by a digest, and payloads by their positions in the canonical order.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protocol.errors import HetnodeError, faulty_peer
from protocol.types import PayloadDescriptor

MOST_UNPACKED_BYTES = 16 << 20
"""Of a packed message. One of the largest group that the protocol admits is smaller."""

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """`message`, compressed with zlib."""
    return zlib.compress(message.SerializeToString())


def unpack(kind: type[M], data: bytes) -> M:
    """The inverse of :func:`pack`. Raises HetnodeError BAD_REQUEST for other bytes, and for too many."""
    reader = zlib.decompressobj()
    try:
        unpacked = reader.decompress(data, MOST_UNPACKED_BYTES)
    except zlib.error:
        raise _bad(f"a packed {kind.__name__} is damaged") from None
    if not reader.eof or reader.unused_data:
        raise _bad(f"a packed {kind.__name__} is too long, or is not whole")
    try:
        return kind.FromString(unpacked)
    except DecodeError:
        raise _bad(f"packed bytes are no {kind.__name__}") from None


def group_digest(descriptors: Sequence[PayloadDescriptor]) -> bytes:
    """Names a group by its payloads, in canonical order: sha-256 over their signatures."""
    # Each signature covers the other fields of its descriptor.
    return hashlib.sha256(b"".join(each.signature for each in descriptors)).digest()


def positions_of(group: Sequence[PayloadDescriptor], chosen: Collection[PayloadDescriptor]) -> bytes | None:
    """The bitmap of `chosen`: bit i of byte i // 8 (the lowest is 0) stands for ``group[i]``.

    None if one of them is not in the group.
    """
    owners = {each.owner: each for each in chosen}
    bits = found = 0
    for position, descriptor in enumerate(group):
        if owners.get(descriptor.owner) == descriptor:
            bits |= 1 << position
            found += 1
    return bits.to_bytes((len(group) + 7) // 8, "little") if found == len(chosen) else None


def at_positions(group: Sequence[PayloadDescriptor], bitmap: bytes) -> tuple[PayloadDescriptor, ...]:
    """The inverse of :func:`positions_of`. Raises HetnodeError BAD_REQUEST for the bitmap of another size."""
    bits = int.from_bytes(bitmap, "little")
    if len(bitmap) != (len(group) + 7) // 8 or bits >> len(group):
        raise _bad(f"{len(bitmap)} bytes of positions for a group of {len(group)} payloads")
    if bits == (1 << len(group)) - 1:
        return tuple(group)
    return tuple(each for position, each in enumerate(group) if bits >> position & 1)


def _bad(why: str) -> HetnodeError:
    return faulty_peer(f"A message from another peer is not valid: {why}.")
