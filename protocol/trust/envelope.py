"""Signatures of descriptors, DHT records, specs, plans and TLS keys, verified by the signer's peer id.

What a peer signs contains the id of the run, or the pin of its authority: it is not valid in another run.

A peer id is the base58 form of the identity multihash of an ed25519 public key, so it embeds the key.
"""

from __future__ import annotations

import json
import struct
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
    """The peer id of a raw 32-byte ed25519 public key."""
    if len(public_key) != 32:
        raise ValueError(f"an ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of(peer: str) -> bytes:
    """The raw ed25519 public key embedded in `peer`. ValueError if `peer` is not such an id."""
    # b58decode takes time quadratic in the length.
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
    fields["round"] = fields.pop("round_number")  # the name in the IDL is the one that is signed
    del fields["signature"]
    return b"hetnode payload 2\n" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def sign_descriptor(descriptor: PayloadDescriptor, sign: Signer) -> PayloadDescriptor:
    """`descriptor` with the signature of its owner's key."""
    return replace(descriptor, signature=sign(descriptor_message(descriptor)))


def is_authentic(descriptor: PayloadDescriptor, run: str) -> bool:
    """Whether the descriptor was signed for `run`, by the peer that it names as owner."""
    return descriptor.run == run and is_signed_by(
        descriptor.owner, descriptor_message(descriptor), descriptor.signature
    )


def misfit(descriptor: PayloadDescriptor, own: PayloadDescriptor) -> str:
    """The reason why `descriptor`, possibly a replay, cannot count in the round of `own`, or ""."""
    for name in ("run", "stage", "round_number", "codec"):
        theirs, ours = getattr(descriptor, name), getattr(own, name)
        if theirs != ours:
            return f"its {name.removesuffix('_number')} is {theirs} instead of {ours}"
    if descriptor.nbytes != own.nbytes:  # all payloads of a (stage, round) have one length
        return f"it has {descriptor.nbytes} bytes instead of {own.nbytes}"
    if descriptor.anchor_digest != own.anchor_digest:
        theirs, ours = descriptor.anchor_digest[:16], own.anchor_digest[:16]
        return f"it starts from the anchor {theirs} instead of {ours}"
    return ""


def record_message(run: str, record: bytes, expires: float) -> bytes:
    """The bytes that a peer signs for its PeerRecord in `run`, valid until `expires` (Unix time)."""
    return b"hetnode record 3\n" + run.encode() + b"\n" + struct.pack("<d", expires) + record


def spec_message(run: str, spec_json: str) -> bytes:
    """The bytes that the coordinator signs for the spec of `run` in canonical JSON."""
    return b"hetnode spec 2\n" + run.encode() + b"\n" + spec_json.encode()


def plan_message(run: str, plan: bytes) -> bytes:
    """The bytes that the coordinator signs for a plan of `run` (`plan` is the serialized Plan)."""
    return b"hetnode plan 1\n" + run.encode() + b"\n" + plan


def state_message(run: str, record: bytes) -> bytes:
    """The bytes that the coordinator signs for a checkpoint of `run` (a serialized StateRecord)."""
    return b"hetnode state 1\n" + run.encode() + b"\n" + record


def log_head_message(rows: int, row_hash: bytes) -> bytes:
    """The bytes that the coordinator signs for an event log of `rows` rows, the last with `row_hash`."""
    return b"hetnode log head 1\n" + struct.pack("<Q", rows) + row_hash


def term_message(run: str, term: int) -> bytes:
    """The bytes that a coordinator signs to show that it has taken `run` over for the `term`-th time."""
    return b"hetnode term 1\n" + run.encode() + b"\n" + struct.pack("<Q", term)


def enrollment_message(pin: bytes, tls_public_key: bytes, invite: str) -> bytes:
    """The bytes that a new peer signs to claim `tls_public_key` (DER) at the authority with this `pin`."""
    # Signed bytes keep their spelling.
    return b"hetnode enrolment 1\n" + pin + invite.encode() + b"\n" + tls_public_key


def renewal_message(pin: bytes, tls_public_key: bytes) -> bytes:
    """The bytes that an enrolled peer signs to claim `tls_public_key` (DER) for its next certificate."""
    return b"hetnode renewal 1\n" + pin + tls_public_key
