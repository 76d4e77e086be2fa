"""The two kinds of entries in the DHT, in dictionaries in which each peer can write only its own entry.

One dictionary of a run holds its peer records. The signature of a record covers the time at which it expires,
and the DHT may not keep it longer. So an old record cannot be restored: a newer one expires later and
replaces it. The other dictionaries hold the peers that look for a group: one flag for each peer, for seconds.
"""

from __future__ import annotations

import base58
from cryptography import x509
from hivemind.dht import DHT
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time

from node.exchange.hive.values import decode
from protocol.errors import HetnodeError
from protocol.wire.records import MAX_SEALED_BYTES, open_record

MAX_RECORD_SECONDS = 3600.0
"""Longest life of a peer record."""
MAX_GROUP_SECONDS = 60.0
"""Longest life of the flag of a peer that looks for a group. hivemind writes flags for 2 windows."""

_MAX_SUBKEY_BYTES = 80
_MAX_STAGES = 512  # of a run specification
_GROUPS = 8
_FLAGS = (b"\xc2", b"\xc3")  # False and True in MSGPack


def peers_key(run: str) -> str:
    """Key of the dictionary {peer id: sealed record} of `run`."""
    return f"{run}.peers"


def stage_prefix(run: str, stage: int) -> str:
    """The name of the peers of `stage` on the wire and in the DHT."""
    return f"{run}-stage-{stage}"


def group_bits(round_number: int) -> str:
    """The part of a group's key that names the round.

    Few keys per stage, so that every peer knows all keys of the run. A flag has expired long before the key
    is used again.
    """
    return f"{round_number % _GROUPS:b}"


def owner_of(subkey: bytes) -> str | None:
    """Id of the peer to which the entry under the encoded `subkey` belongs; None if it belongs to none."""
    if len(subkey) > _MAX_SUBKEY_BYTES:
        return None
    try:
        owner = decode(subkey)
    except ValueError:
        return None
    if isinstance(owner, bytes):  # hivemind's matchmaking writes peer ids so
        return base58.b58encode(owner).decode()
    return owner if isinstance(owner, str) else None


class KnownEntryValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no type information
    """Accepts the entries that hetnode itself writes, and nothing else.

    A record must be signed by the peer in its subkey, which `authority` has certified, and may live no longer
    than the peer has signed.

    Every peer's DHT process calls this when it stores an entry and when it reads one.
    """

    def __init__(self, run: str, authority: x509.Certificate) -> None:
        self._run, self._authority = run, authority
        self._peers = DHTID.generate(source=peers_key(run)).to_bytes()
        self._groups = frozenset(
            DHTID.generate(source=f"{stage_prefix(run, stage)}.0b{group_bits(group)}").to_bytes()
            for stage in range(_MAX_STAGES)
            for group in range(_GROUPS)
        )

    def validate(self, record: DHTRecord) -> bool:
        peer = owner_of(record.subkey)
        if peer is None:
            return False
        now = get_dht_time()
        if record.key == self._peers:
            return self._is_own_record(record, peer, now)
        is_flag = record.key in self._groups and record.value in _FLAGS
        return is_flag and now < record.expiration_time <= now + MAX_GROUP_SECONDS

    def _is_own_record(self, record: DHTRecord, peer: str, now: float) -> bool:
        # Before decoding, so that a large record costs no work. 16 bytes allow for MSGPack's framing.
        if len(record.value) > MAX_SEALED_BYTES + 16:
            return False
        try:
            sealed = decode(record.value)
            if not isinstance(sealed, bytes):
                return False
            opened = open_record(sealed, self._run, peer, self._authority, now)
        except (HetnodeError, ValueError):
            return False
        return bool(record.expiration_time <= min(opened.expires, now + MAX_RECORD_SECONDS))


def store(dht: DHT, run: str, peer: str, sealed: bytes, expires: float, deadline: float) -> bool:
    """Store this peer's sealed record until `expires` (Unix time). False if no DHT peer accepted it."""
    # Several processes write to the DHT's control pipe; a record this small is one atomic write (PIPE_BUF).
    future = dht.store(peers_key(run), sealed, expires, subkey=peer, return_future=True)
    return bool(future.result(deadline))


def find(dht: DHT, run: str, deadline: float) -> dict[str, bytes]:
    """The sealed records of `run`, not verified, by the peer in their subkey."""
    found = dht.get(peers_key(run), latest=True, return_future=True).result(deadline)
    if found is None or not isinstance(found.value, dict):
        return {}
    return {
        peer: entry.value
        for peer, entry in found.value.items()
        if isinstance(peer, str) and isinstance(entry.value, bytes)
    }
