"""Bytes of signed records: the DHT's peer records, payload descriptors, plans, checkpoints.

The bytes may come from a hostile peer: any bad bytes raise HetnodeError BAD_REQUEST, nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509
from google.protobuf.message import DecodeError, Message

from protocol.errors import ErrorCode, HetnodeError, faulty_peer
from protocol.group.peers import PeerRecord
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.envelope import Signer, is_signed_by, plan_message, record_message, state_message
from protocol.trust.tls import certified_peer
from protocol.types import PayloadDescriptor, Plan, StateRecord
from protocol.wire.convert.payloads import descriptor_from_pb, descriptor_to_pb, state_from_pb, state_to_pb
from protocol.wire.convert.plans import peer_record_from_pb, peer_record_to_pb, plan_from_pb, plan_to_pb

MAX_SEALED_BYTES = 2048
"""Largest signed record in the DHT. A PeerRecord with its certificate is well below it."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class OpenedRecord:
    """A record that its peer has signed. `expires`: Unix time until which the DHT may keep it."""

    record: PeerRecord
    expires: float


def record_to_bytes(record: PeerRecord) -> bytes:
    return peer_record_to_pb(record).SerializeToString(deterministic=True)


def record_from_bytes(data: bytes) -> PeerRecord:
    return peer_record_from_pb(_parsed(pb.PeerRecord, data, "peer record"))


def seal_record(record: PeerRecord, run: str, sign: Signer, expires: float, certificate: bytes) -> bytes:
    """The record for `run` until `expires` (Unix time), with its peer's signature and certificate (DER)."""
    data = record_to_bytes(record)
    signature = sign(record_message(run, data, expires))
    signed = pb.SignedRecord(record=data, signature=signature, expires=expires, certificate=certificate)
    return signed.SerializeToString()


def open_record(sealed: bytes, run: str, peer: str, authority: x509.Certificate, now: float) -> OpenedRecord:
    """The record that `peer` signed about itself for `run`, if neither it nor its certificate has expired.

    Raises:
        HetnodeError: BAD_REQUEST if it is too long, malformed, about another peer, not signed by `peer` for
            `run`, not certified, or stale.
    """
    if len(sealed) > MAX_SEALED_BYTES:
        raise _bad(f"it has {len(sealed)} bytes, more than {MAX_SEALED_BYTES}")
    signed = _parsed(pb.SignedRecord, sealed, "signed record")
    # The signature comes first: nothing else of the record counts before its peer is known.
    if not is_signed_by(peer, record_message(run, signed.record, signed.expires), signed.signature):
        raise _bad(f"it is not signed by {peer[:64]} for this run")
    # A record without an end would stay in the DHT forever.
    if not now < signed.expires < math.inf:
        raise _bad(f"{peer} wrote it too long ago")
    try:
        certificate = certified_peer(signed.certificate, authority)
    except ValueError as error:
        raise _bad(f"{peer} shows {error}") from None
    if certificate.peer != peer or not certificate.holds_at(now):
        raise _bad(f"{peer} shows the certificate of another peer, or one that has expired")
    record = record_from_bytes(signed.record)
    # A certified peer could sign a record in the name of another one.
    if record.peer != peer:
        raise _bad(f"{peer[:64]} signed a record about {record.peer}")
    return OpenedRecord(record, signed.expires)


def descriptor_to_bytes(descriptor: PayloadDescriptor) -> bytes:
    return descriptor_to_pb(descriptor).SerializeToString()


def descriptor_from_bytes(data: bytes) -> PayloadDescriptor:
    """The descriptor in `data`. Its signature is not verified here."""
    return descriptor_from_pb(_parsed(pb.PayloadDescriptor, data, "payload descriptor"))


def seal_plan(plan: Plan, run: str, sign: Signer) -> tuple[bytes, bytes]:
    """The plan as it is sent, and the coordinator's signature under it."""
    data = plan_to_pb(plan).SerializeToString(deterministic=True)
    return data, sign(plan_message(run, data))


def open_plan(data: bytes, signature: bytes, run: str, coordinator: str) -> Plan:
    """The plan of `run`. Raises WRONG_AUTHORITY unless the key of the peer id `coordinator` has signed it."""
    _check_signed(plan_message(run, data), signature, run, coordinator, "plan")
    return plan_from_pb(_parsed(pb.Plan, data, "plan"))


def seal_state(record: StateRecord, sign: Signer) -> tuple[bytes, bytes]:
    """As :func:`seal_plan`, for the record of a checkpoint."""
    data = state_to_pb(record).SerializeToString(deterministic=True)
    return data, sign(state_message(record.run, data))


def open_state(data: bytes, signature: bytes, run: str, coordinator: str) -> StateRecord:
    """As :func:`open_plan`, for the record of a checkpoint."""
    _check_signed(state_message(run, data), signature, run, coordinator, "record of a checkpoint")
    return state_from_pb(_parsed(pb.StateRecord, data, "record of a checkpoint"))


def _parsed(message: type[M], data: bytes, what: str) -> M:
    try:
        return message.FromString(data)
    except DecodeError:
        raise _bad(f"it is no {what}") from None


def _check_signed(message: bytes, signature: bytes, run: str, coordinator: str, what: str) -> None:
    if not is_signed_by(coordinator, message, signature):
        raise HetnodeError(
            ErrorCode.WRONG_AUTHORITY,
            f"A {what} is not signed by the coordinator {coordinator[:64]} of run {run[:64]}.",
            "If the operator has set the coordinator up anew, ask for a new invite.",
        )


def _bad(why: str) -> HetnodeError:
    return faulty_peer(f"A record of another peer cannot be used: {why}.")
