"""The term of a coordinator: later after each take-over, 0 before all. Its proof ends the former ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from protocol.trust.envelope import Signer, is_signed_by, term_message

_NUMBER = struct.Struct("<Q")
MOST_BYTES = 128


@dataclass(frozen=True)
class Succession:
    """What a coordinator tells of itself and of the one that may follow it.

    Attributes:
        term: the proof of its term; empty in the first one.
        others: ``host:port`` of the API where the coordinator may be if it does not answer here.
        dht_peers: multiaddresses of its DHT peer.
    """

    term: bytes = b""
    others: tuple[str, ...] = ()
    dht_peers: tuple[str, ...] = ()


ALONE = Succession()
"""Of a coordinator in its first term, which has no standby."""


def next_term(term: int, now: float) -> int:
    """The term of a coordinator that takes over at Unix time `now` from one in `term`.

    Of two that do so side by side, the later one goes on.
    """
    return max(term + 1, int(now))


def proof_of(term: int, run: str, sign: Signer) -> bytes:
    """The proof, signed with the key of the run's coordinators, that `term` has begun; empty for term 0."""
    return _NUMBER.pack(term) + sign(term_message(run, term)) if term else b""


def term_in(proof: bytes) -> int:
    """The term that `proof` claims; 0 for bytes that cannot be a proof. The signature is not checked."""
    return int(_NUMBER.unpack_from(proof)[0]) if _NUMBER.size < len(proof) <= MOST_BYTES else 0


def is_proof(proof: bytes, run: str, coordinator: str) -> bool:
    """Whether the key of the peer id `coordinator` has signed for `run` what `proof` claims."""
    return is_signed_by(coordinator, term_message(run, term_in(proof)), proof[_NUMBER.size :])
