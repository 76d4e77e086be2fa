"""A snapshot of the state after a row of the event log, as bytes that the coordinator has signed.

The log is the truth. A snapshot that is damaged, of another key, of another run, or of a program with other
records or rules is refused, and the state is replayed from the log.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from hashlib import sha256

from coordinator.state.record_codec import layout, pack, unpack
from coordinator.state.state import State
from protocol.trust.envelope import Signer, is_signed_by, snapshot_message
from protocol.types import PeerId

RULES = 2
"""Raise this when the same events give another state, though its records have the same fields."""
MOST_BYTES = 1 << 30
"""Of a state before its compression."""
_MAGIC = b"hetnode state snapshot 1\n"
_SIGNATURE = 64
_LEVEL = 1
"""Of the compression: numbers are left, which higher levels hardly make shorter."""


@dataclass(frozen=True)
class StateSnapshot:
    """`state` after the first `rows` rows of a log, the last of which has `row_hash`."""

    rows: int
    row_hash: bytes
    state: State


@dataclass(frozen=True)
class _Head:
    """What the content is, before its state is read."""

    layout: str
    rules: int
    run: str
    spec: str


def write_snapshot(snapshot: StateSnapshot, sign: Signer) -> bytes:
    """The bytes of `snapshot`. The state never changes, so another thread may call this.

    ValueError for a state that has no bytes, such as one with an integer beyond 64 bits.
    """
    state = snapshot.state
    head = pack(_Head, _Head(layout(StateSnapshot), RULES, state.run, state.spec.hash))
    body = pack(StateSnapshot, snapshot)
    if len(body) > MOST_BYTES:
        raise ValueError(f"the state has {len(body)} bytes, more than {MOST_BYTES}")
    content = len(head).to_bytes(4, "little") + head + zlib.compress(body, _LEVEL)
    return _MAGIC + sign(snapshot_message(sha256(content).digest())) + content


def read_snapshot(data: bytes, coordinator: PeerId, spec_hash: str, run: str) -> StateSnapshot:
    """The inverse of :func:`write_snapshot`, for the run `run` with the spec of this hash.

    Compare the row hash with the log's: that ties the snapshot to it. ValueError, with the reason, for all
    bytes that `coordinator` has not signed, and for a snapshot of another run or of other records or rules.
    """
    start = len(_MAGIC) + _SIGNATURE
    if len(data) < start + 4 or not data.startswith(_MAGIC):
        raise ValueError("it is no snapshot of this version")
    signature, content = data[len(_MAGIC) : start], data[start:]
    if not is_signed_by(coordinator, snapshot_message(sha256(content).digest()), signature):
        raise ValueError("it is damaged, or not signed with the key of this coordinator")
    size = int.from_bytes(content[:4], "little")
    # Only now: what is signed was written by this coordinator, and takes no more memory than it did then.
    found = unpack(_Head, content[4 : 4 + size])
    if (found.run, found.spec) != (run, spec_hash):
        raise ValueError(f"it belongs to run {found.run}")
    if (found.layout, found.rules) != (layout(StateSnapshot), RULES):
        raise ValueError("another version of hetnode wrote it")
    return unpack(StateSnapshot, _inflated(content[4 + size :]))


def _inflated(packed: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("it is damaged: a part is missing, or something is added")
    return body
