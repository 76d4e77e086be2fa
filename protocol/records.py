"""Bytes of the records that peers sign: the DHT's peer records and payload descriptors.

Everything read here was written by a stranger: any bad bytes raise BAD_REQUEST, nothing else.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from protocol.convert import descriptor_from_pb, descriptor_to_pb, peer_record_from_pb, peer_record_to_pb
from protocol.envelope import Signer, is_signed_by, record_message
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import PayloadDescriptor, PeerRecord

MAX_SEALED_BYTES = 1024
"""Largest signed record in the DHT; every field of a PeerRecord is bounded well below it."""


def record_to_bytes(record: PeerRecord) -> bytes:
    return peer_record_to_pb(record).SerializeToString(deterministic=True)


def record_from_bytes(data: bytes) -> PeerRecord:
    """Raises HetnodeError BAD_REQUEST on any bad bytes."""
    try:
        return peer_record_from_pb(pb.PeerRecord.FromString(data))
    except DecodeError:
        raise _bad("it is no peer record") from None


def seal_record(record: PeerRecord, sign: Signer) -> bytes:
    """The record with its peer's signature, as it is stored in the DHT."""
    data = record_to_bytes(record)
    return pb.SignedRecord(record=data, signature=sign(record_message(data))).SerializeToString()


def open_record(sealed: bytes, peer: str) -> PeerRecord:
    """The record that `peer` signed about itself.

    Raises:
        HetnodeError: BAD_REQUEST if it is too long, malformed, about another peer, or not signed by `peer`.
    """
    if len(sealed) > MAX_SEALED_BYTES:
        raise _bad(f"it has {len(sealed)} bytes, more than {MAX_SEALED_BYTES}")
    try:
        signed = pb.SignedRecord.FromString(sealed)
    except DecodeError:
        raise _bad("it is no signed record") from None
    if not is_signed_by(peer, record_message(signed.record), signed.signature):
        raise _bad(f"it is not signed by {peer[:64]}")
    record = record_from_bytes(signed.record)
    if record.peer != peer:
        raise _bad(f"{peer[:64]} signed a record about {record.peer}")
    return record


def descriptor_to_bytes(descriptor: PayloadDescriptor) -> bytes:
    return descriptor_to_pb(descriptor).SerializeToString()


def descriptor_from_bytes(data: bytes) -> PayloadDescriptor:
    """Raises HetnodeError BAD_REQUEST on any bad bytes. The signature is not verified here."""
    try:
        return descriptor_from_pb(pb.PayloadDescriptor.FromString(data))
    except DecodeError:
        raise _bad("it is no payload descriptor") from None


def _bad(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_REQUEST,
        f"A record of another peer cannot be used: {why}.",
        "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
    )
