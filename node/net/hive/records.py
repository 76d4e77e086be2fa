"""The DHT's record of each peer: one dictionary per run, whose entries only their own peer can write."""

from __future__ import annotations

from hivemind.dht import DHT
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time

from protocol.errors import HetnodeError
from protocol.records import MAX_SEALED_BYTES, open_record

_MAX_SUBKEY_BYTES = 80


def peers_key(run: str) -> str:
    """Key of the dictionary {peer id: sealed record} of `run`."""
    return f"{run}.peers"


class OwnRecordValidator(RecordValidatorBase):
    """Refuses what a DHT peer stores or returns under a run's key unless the peer in the subkey signed it.

    Runs in the DHT process of every peer, on the way in and on the way out. Other keys, such as those of
    hivemind's matchmaking, are not its business.
    """

    def __init__(self, run: str) -> None:
        self._key = DHTID.generate(source=peers_key(run))

    def validate(self, record: DHTRecord) -> bool:
        # Compared as numbers: the same key may come padded with zero bytes.
        if DHTID.from_bytes(record.key) != self._key:
            return True
        if len(record.subkey) > _MAX_SUBKEY_BYTES or len(record.value) > MAX_SEALED_BYTES + 16:
            return False
        try:
            peer = MSGPackSerializer.loads(record.subkey)
            sealed = MSGPackSerializer.loads(record.value)
            if not (isinstance(peer, str) and isinstance(sealed, bytes)):
                return False
            open_record(sealed, peer)
        except (HetnodeError, ValueError):
            return False
        return True


def store(dht: DHT, run: str, peer: str, sealed: bytes, ttl: float, deadline: float) -> bool:
    """Store this peer's sealed record for `ttl` seconds. False when no DHT peer took it."""
    # Several processes write to the DHT's control pipe; a record this small arrives in one piece (PIPE_BUF).
    future = dht.store(peers_key(run), sealed, get_dht_time() + ttl, subkey=peer, return_future=True)
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
