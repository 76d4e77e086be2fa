"""The hash chain of the event log: each row carries a hash over all rows up to it.

The first hash is sha-256 over the run's specification, each later one sha-256 over the hash before it and the
row as it is stored. So a row that was changed, removed, inserted or moved does not fit its hash.
"""

from __future__ import annotations

import hashlib


def first_hash(spec_json: str) -> bytes:
    """The hash before row 1 of the run with this specification."""
    return hashlib.sha256(b"hetnode event log 1\n" + spec_json.encode()).digest()


def next_hash(former: bytes, kind: str, body: str | bytes) -> bytes:
    """The hash of the row (`kind`, `body`) after the row with the hash `former`."""
    stored = body if isinstance(body, bytes) else body.encode()
    # No kind contains a tab: two different rows never give the same bytes.
    return hashlib.sha256(former + f"{kind}\t".encode() + stored).digest()
