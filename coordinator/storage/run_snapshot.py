"""A snapshot of a run after a row of its event log, as bytes that the coordinator has signed.

The log is the truth. A snapshot that is damaged, of another key, of another run, or of a program with other
sources is refused, and the whole log is replayed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from hashlib import sha256

from coordinator.explain.log_index import IndexRecord
from coordinator.history.ledger import LedgerRecord
from coordinator.state.program import program_hash
from coordinator.state.record_codec import pack, unpack
from coordinator.state.state import State
from protocol.trust.envelope import Signer, is_signed_by, snapshot_message
from protocol.types import PeerId

MOST_BYTES = 1 << 30
"""Of a snapshot before its compression."""
_MAGIC = b"hetnode run snapshot 1\n"
_SIGNATURE = 64
_LEVEL = 1
"""Of the compression: numbers are left, which higher levels hardly make shorter."""


@dataclass(frozen=True)
class RunSnapshot:
    """What a coordinator knows after the first `rows` rows of a log, the last of which has `row_hash`.

    `decisions` are those of :attr:`coordinator.storage.decision_log.DecisionLog.numbers`.
    """

    rows: int
    row_hash: bytes
    state: State
    index: IndexRecord
    decisions: bytes
    ledger: LedgerRecord


@dataclass(frozen=True)
class _Head:
    """What the content is, before it is read."""

    program: str
    run: str
    spec: str


def write_snapshot(snapshot: RunSnapshot, sign: Signer) -> bytes:
    """The bytes of `snapshot`. Its records never change, so another thread may call this.

    ValueError for one that has no bytes, such as one with an integer beyond 64 bits.
    """
    state = snapshot.state
    head = pack(_Head, _Head(program_hash(), state.run, state.spec.hash))
    body = pack(RunSnapshot, snapshot)
    if len(body) > MOST_BYTES:
        raise ValueError(f"it has {len(body)} bytes, more than {MOST_BYTES}")
    content = len(head).to_bytes(4, "little") + head + zlib.compress(body, _LEVEL)
    return _MAGIC + sign(snapshot_message(sha256(content).digest())) + content


def read_snapshot(data: bytes, coordinator: PeerId, spec_hash: str, run: str) -> RunSnapshot:
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
    if found.program != program_hash():
        raise ValueError("another version of hetnode wrote it")
    return unpack(RunSnapshot, _inflated(content[4 + size :]))


def _inflated(packed: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("it is damaged: a part is missing, or something is added")
    return body
