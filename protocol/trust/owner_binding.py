"""What is told of an owner. Commands that only know this record need no cryptography, and start faster."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import PeerId


@dataclass(frozen=True)
class OwnerBinding:
    """That `peer` works for `owner`, an id of the same form. The signatures are ed25519, 64 bytes.

    Attributes:
        owner_signature, peer_signature: over :func:`binding_message`.
        release: the former owner's over :func:`release_message`; empty where `peer` has none.
    """

    peer: PeerId
    owner: PeerId
    owner_signature: bytes
    peer_signature: bytes
    release: bytes = b""
