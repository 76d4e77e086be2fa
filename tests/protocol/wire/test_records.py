"""Signed records: what comes back is what was signed, and nothing else is accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import base58
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from coordinator.authority import Authority
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.envelope import peer_id_of, plan_message
from protocol.types import Capacity, Member, PayloadDescriptor, Plan, Replica, Role, StageRange
from protocol.wire.records import (
    MAX_SEALED_BYTES,
    OpenedRecord,
    descriptor_from_bytes,
    descriptor_to_bytes,
    open_plan,
    open_record,
    record_from_bytes,
    seal_plan,
    seal_record,
)
from tests.support.certificates import authority, credentials

T = TypeVar("T")

NOW = time.time()
LATER = NOW + 60.0
AUTHORITY = authority().certificate

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = peer_id_of(KEY.public_key().public_bytes_raw())
RUN = "nano-000000000000-0"
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_PEER = peer_id_of(OTHER_KEY.public_key().public_bytes_raw())


def certificate_of(peer: str, issuer: Authority | None = None, ended: bool = False) -> bytes:
    pem = credentials(peer, issuer, ended).certificate
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


CERTIFICATE, OTHER_CERTIFICATE = certificate_of(PEER), certificate_of(OTHER_PEER)

names = st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=128)
records = st.builds(
    PeerRecord,
    peer=st.just(PEER),
    protocol_version=st.integers(0, 2**32 - 1),
    role=st.sampled_from(Role),
    capacity=st.builds(
        Capacity, device=names, memory_bytes=st.integers(0, 2**63 - 1), threads=st.integers(0, 2**32 - 1)
    ),
    endpoint=st.one_of(st.just(""), st.integers(1, 65535).map(lambda port: f"{'h' * 255}:{port}")),
    stages=st.one_of(st.none(), st.just(StageRange(0, 1)), st.just(StageRange(3, 512))),
)
RECORD = PeerRecord(
    PEER, 1, Role.STAGE, Capacity("cpu", 1 << 33, 8), "node.example.org:7700", StageRange(1, 3)
)
DESCRIPTOR = PayloadDescriptor("run", 1, 2, PEER, "anchor", "codec", 1.0, 100, "ab" * 32, b"s" * 64)


def outcome(decode: Callable[[], T]) -> T | ErrorCode:
    """What `decode` returned, or the code with which it refused."""
    try:
        return decode()
    except HetnodeError as error:
        return error.code


@given(records)
def test_a_sealed_record_opens_to_what_was_signed_and_is_small(record: PeerRecord) -> None:
    sealed = seal_record(record, RUN, KEY.sign, LATER, CERTIFICATE)
    assert len(sealed) <= MAX_SEALED_BYTES
    assert open_record(sealed, RUN, PEER, AUTHORITY, NOW) == OpenedRecord(record, LATER)


@pytest.mark.parametrize(
    "endpoint", ["169.254.169.254:80", "[fd00:ec2::254]:80", "224.0.0.1:1", "2852039166:1"]
)
def test_a_record_with_an_endpoint_that_no_peer_may_have_is_refused(endpoint: str) -> None:
    sealed = seal_record(replace(RECORD, endpoint=endpoint), RUN, KEY.sign, LATER, CERTIFICATE)
    assert outcome(lambda: open_record(sealed, RUN, PEER, AUTHORITY, NOW)) is ErrorCode.BAD_REQUEST


@given(st.integers(0, 8 * len(seal_record(RECORD, RUN, KEY.sign, LATER, CERTIFICATE)) - 1))
def test_a_record_with_any_bit_changed_says_the_same_or_is_refused(bit: int) -> None:
    sealed = bytearray(seal_record(RECORD, RUN, KEY.sign, LATER, CERTIFICATE))
    sealed[bit // 8] ^= 1 << bit % 8
    assert outcome(lambda: open_record(bytes(sealed), RUN, PEER, AUTHORITY, NOW)) in (
        OpenedRecord(RECORD, LATER),
        ErrorCode.BAD_REQUEST,
    )


@given(st.binary(max_size=2 * MAX_SEALED_BYTES))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(HetnodeError) as refusal:
        open_record(data, RUN, PEER, AUTHORITY, NOW)
    assert refusal.value.code is ErrorCode.BAD_REQUEST


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_or_descriptor_raise_bad_request_only(data: bytes) -> None:
    record, descriptor = (
        outcome(lambda: record_from_bytes(data)),
        outcome(lambda: descriptor_from_bytes(data)),
    )
    assert isinstance(record, PeerRecord) or record is ErrorCode.BAD_REQUEST
    assert isinstance(descriptor, PayloadDescriptor) or descriptor is ErrorCode.BAD_REQUEST


def test_a_record_is_refused_for_any_peer_but_its_own() -> None:
    ours = seal_record(RECORD, RUN, KEY.sign, LATER, CERTIFICATE)
    about_us = seal_record(RECORD, RUN, OTHER_KEY.sign, LATER, OTHER_CERTIFICATE)
    not_a_key = base58.b58encode(bytes(38)).decode()
    for sealed, peer in ((ours, OTHER_PEER), (about_us, PEER), (about_us, OTHER_PEER), (ours, not_a_key)):
        with pytest.raises(HetnodeError) as refusal:
            open_record(sealed, RUN, peer, AUTHORITY, NOW)
        assert refusal.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    ("expires", "certificate"),
    [
        (NOW, CERTIFICATE),
        (float("inf"), CERTIFICATE),
        (float("nan"), CERTIFICATE),
        (LATER, b""),
        (LATER, OTHER_CERTIFICATE),
        (LATER, certificate_of(PEER, authority("another"))),
        (LATER, certificate_of(PEER, ended=True)),
    ],
    ids=["stale", "for ever", "never", "uncertified", "another's", "another authority's", "expired"],
)
def test_a_record_is_believed_under_a_certificate_and_for_its_time_only(
    expires: float, certificate: bytes
) -> None:
    with pytest.raises(HetnodeError) as refusal:
        open_record(seal_record(RECORD, RUN, KEY.sign, expires, certificate), RUN, PEER, AUTHORITY, NOW)
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_the_time_of_a_record_is_signed_with_it() -> None:
    signed = pb.SignedRecord.FromString(seal_record(RECORD, RUN, KEY.sign, LATER, CERTIFICATE))
    signed.expires += 60.0
    with pytest.raises(HetnodeError):
        open_record(signed.SerializeToString(), RUN, PEER, AUTHORITY, NOW)


def test_a_record_of_one_run_is_refused_in_another() -> None:
    sealed = seal_record(RECORD, RUN, KEY.sign, LATER, CERTIFICATE)
    with pytest.raises(HetnodeError) as refusal:
        open_record(sealed, f"{RUN}1", PEER, AUTHORITY, NOW)
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_a_descriptor_survives_the_wire() -> None:
    assert descriptor_from_bytes(descriptor_to_bytes(DESCRIPTOR)) == DESCRIPTOR


PLAN = Plan(1, 1, 0, (Replica(0, (Member(PEER, StageRange(0, 2), "h:1"),), (), 1.0),), "everybody is here")


def test_a_plan_is_believed_under_the_coordinators_signature_for_its_run_alone() -> None:
    data, signature = seal_plan(PLAN, "run-1", KEY.sign)
    assert open_plan(data, signature, "run-1", PEER) == PLAN
    for refused in (
        lambda: open_plan(data, signature, "run-2", PEER),
        lambda: open_plan(data, signature, "run-1", OTHER_PEER),
        lambda: open_plan(data, signature, "run-1", "no peer"),
        lambda: open_plan(data, b"", "run-1", PEER),
        lambda: open_plan(data + b"\0", signature, "run-1", PEER),
        lambda: open_plan(data, KEY.sign(data), "run-1", PEER),
    ):
        assert outcome(refused) is ErrorCode.WRONG_AUTHORITY


@given(st.binary(max_size=100))
def test_signed_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    signature = KEY.sign(plan_message("run-1", data))
    assert outcome(lambda: open_plan(data, signature, "run-1", PEER)) is ErrorCode.BAD_REQUEST
