"""The peer records in the DHT: one dictionary per run, in which each peer can write only its own entry.

The signature of a record covers the time at which it expires, and the DHT may not keep it longer. So an old
record cannot be restored: a newer one expires later and replaces it.
"""

from __future__ import annotations

from cryptography import x509
from hivemind.dht import DHT
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time

from protocol.errors import HetnodeError
from protocol.wire.records import MAX_SEALED_BYTES, open_record

_MAX_SUBKEY_BYTES = 80


def peers_key(run: str) -> str:
    """Key of the dictionary {peer id: sealed record} of `run`."""
    return f"{run}.peers"


class OwnRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no type information
    """Refuses a record under a run's key unless the peer in its subkey has signed it.

    That peer must be certified by `authority`, and the record must not live longer than the peer has signed.

    Every peer's DHT process calls this when it stores a record and when it reads one. All other keys are
    accepted, such as those of hivemind's matchmaking.
    """

    def __init__(self, run: str, authority: x509.Certificate) -> None:
        self._authority = authority
        self._key = DHTID.generate(source=peers_key(run))

    def validate(self, record: DHTRecord) -> bool:
        # DHTIDs are compared as numbers, because the same key may arrive padded with zero bytes.
        if DHTID.from_bytes(record.key) != self._key:
            return True
        # Before decoding, so that a large record costs no work. 16 bytes allow for MSGPack's framing.
        if len(record.subkey) > _MAX_SUBKEY_BYTES or len(record.value) > MAX_SEALED_BYTES + 16:
            return False
        try:
            peer = MSGPackSerializer.loads(record.subkey)
            sealed = MSGPackSerializer.loads(record.value)
            if not (isinstance(peer, str) and isinstance(sealed, bytes)):
                return False
            opened = open_record(sealed, peer, self._authority, get_dht_time())
        except (HetnodeError, ValueError):
            return False
        return bool(record.expiration_time <= opened.expires)


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
