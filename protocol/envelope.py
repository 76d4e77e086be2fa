"""Signatures of what travels: payload descriptors and DHT records, verified against the peer id alone.

A peer id is the base58 form of the identity multihash of a libp2p ed25519 public key, so it embeds the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.types import PayloadDescriptor, PeerId

# multihash "identity", 36 bytes: protobuf PublicKey{Type: Ed25519, Data: 32 bytes}
_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))

Signer = Callable[[bytes], bytes]


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p peer id of a raw 32-byte ed25519 public key."""
    if len(public_key) != 32:
        raise ValueError(f"an ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of(peer: str) -> bytes:
    """The raw ed25519 public key embedded in `peer`. ValueError if `peer` is not such an id."""
    if len(peer) > 64:
        raise ValueError("not an ed25519 peer id: too long")
    raw = base58.b58decode(peer)
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"'{peer}' is not an ed25519 peer id")
    return raw[len(_PEER_ID_PREFIX) :]


def is_signed_by(peer: str, message: bytes, signature: bytes) -> bool:
    """Whether `signature` over `message` was made with the key of `peer`. False for any malformed input."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


def descriptor_message(descriptor: PayloadDescriptor) -> bytes:
    """The bytes that the owner signs: every field but the signature, in canonical JSON."""
    fields = asdict(descriptor)
    del fields["signature"]
    return b"hetnode payload 1\n" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def sign_descriptor(descriptor: PayloadDescriptor, sign: Signer) -> PayloadDescriptor:
    """`descriptor` with the signature of its owner's key, which `sign` applies."""
    return replace(descriptor, signature=sign(descriptor_message(descriptor)))


def is_authentic(descriptor: PayloadDescriptor) -> bool:
    """Whether the descriptor was signed by the peer that it names as owner."""
    return is_signed_by(descriptor.owner, descriptor_message(descriptor), descriptor.signature)


def record_message(record: bytes) -> bytes:
    """The bytes that a peer signs for its DHT record (`record` is the serialized PeerRecord)."""
    return b"hetnode record 1\n" + record
