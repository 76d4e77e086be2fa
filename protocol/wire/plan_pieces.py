"""A plan as its difference from the plan before: most replicas of a large swarm stay as they are.

The coordinator signs the bytes of the whole plan, so the receiver puts these together and verifies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protocol.errors import HetnodeError, faulty_peer
from protocol.pb import hetnode_pb2 as pb

MOST_PLAN_BYTES = 16 << 20
"""Of a plan that is put together. One of 10,000 peers is smaller."""
_WORTH = 0.5
"""Pieces are sent if they take at most this share of the bytes of the plan."""


def pieces_of(former: bytes, newer: bytes) -> list[pb.PlanPiece]:
    """The serialized plan `newer` in pieces; empty if they would save too little.

    Both are what protocol.wire.records.seal_plan gives.
    """
    pieces = [
        pb.PlanPiece(literal=piece)
        if isinstance(piece, bytes)
        else pb.PlanPiece(offset=piece[0], length=piece[1])
        for piece in _difference(former, newer)
    ]
    return pieces if sum(piece.ByteSize() for piece in pieces) <= _WORTH * len(newer) else []


def plan_from_pieces(former: bytes, pieces: Iterable[pb.PlanPiece]) -> bytes:
    """The inverse of :func:`pieces_of`.

    Raises HetnodeError BAD_REQUEST for pieces outside `former`, and for more than MOST_PLAN_BYTES.
    """
    found, nbytes = [], 0
    for piece in pieces:
        part = piece.literal or former[piece.offset : piece.offset + piece.length]
        nbytes += len(part)
        if not piece.literal and len(part) != piece.length:
            raise _bad("it has bytes that the former plan has not")
        if nbytes > MOST_PLAN_BYTES:
            raise _bad(f"it has more than {MOST_PLAN_BYTES} bytes")
        found.append(part)
    return b"".join(found)


def _difference(former: bytes, newer: bytes) -> list[bytes | tuple[int, int]]:
    """Literal bytes, or offset and length of bytes of `former`; together they are `newer`."""
    known = dict(_replicas(former))
    found, done = list[bytes | tuple[int, int]](), 0
    for body, position in _replicas(newer):
        offset = known.get(body)
        if offset is None:
            continue
        between, last = newer[done:position], found[-1] if found else b""
        if isinstance(last, tuple) and former[sum(last) : offset] == between and sum(last) <= offset:
            found[-1] = last[0], offset + len(body) - last[0]  # neighbours in both plans
        else:
            found += [between, (offset, len(body))]
        done = position + len(body)
    return [piece for piece in (*found, newer[done:]) if piece]


def _replicas(plan: bytes) -> Iterator[tuple[bytes, int]]:
    """The bytes of each replica, and their position in those of the plan."""
    position = 0
    for replica in pb.Plan.FromString(plan).replicas:
        body = replica.SerializeToString(deterministic=True)
        position = plan.index(body, position)
        yield body, position
        position += len(body)


def _bad(cause: str) -> HetnodeError:
    return faulty_peer(f"A plan in pieces cannot be put together: {cause}.")
