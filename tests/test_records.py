"""Signed records: what comes back is what was signed, and nothing else is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import peer_id_of
from protocol.errors import ErrorCode, HetnodeError
from protocol.records import (
    MAX_SEALED_BYTES,
    descriptor_from_bytes,
    descriptor_to_bytes,
    open_record,
    record_from_bytes,
    record_to_bytes,
    seal_record,
)
from protocol.types import Capacity, PayloadDescriptor, PeerId, PeerRecord, Role, StageRange

T = TypeVar("T")

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = peer_id_of(KEY.public_key().public_bytes_raw())
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_PEER = peer_id_of(OTHER_KEY.public_key().public_bytes_raw())

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
    sealed = seal_record(record, KEY.sign)
    assert len(sealed) <= MAX_SEALED_BYTES
    assert open_record(sealed, PEER) == record


@given(records)
def test_a_record_survives_the_wire(record: PeerRecord) -> None:
    assert record_from_bytes(record_to_bytes(record)) == record


@given(st.integers(0, 8 * len(seal_record(RECORD, KEY.sign)) - 1))
def test_a_record_with_any_bit_changed_says_the_same_or_is_refused(bit: int) -> None:
    sealed = bytearray(seal_record(RECORD, KEY.sign))
    sealed[bit // 8] ^= 1 << bit % 8
    assert outcome(lambda: open_record(bytes(sealed), PEER)) in (RECORD, ErrorCode.BAD_REQUEST)


@given(st.binary(max_size=2 * MAX_SEALED_BYTES))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(HetnodeError) as refusal:
        open_record(data, PEER)
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
    ours, about_us = seal_record(RECORD, KEY.sign), seal_record(RECORD, OTHER_KEY.sign)
    not_a_key = base58.b58encode(bytes(38)).decode()
    for sealed, peer in ((ours, OTHER_PEER), (about_us, PEER), (about_us, OTHER_PEER), (ours, not_a_key)):
        with pytest.raises(HetnodeError) as refusal:
            open_record(sealed, peer)
        assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_a_descriptor_survives_the_wire() -> None:
    assert descriptor_from_bytes(descriptor_to_bytes(DESCRIPTOR)) == DESCRIPTOR


@pytest.mark.parametrize(
    "unfit",
    [
        replace(DESCRIPTOR, weight=float("nan")),
        replace(DESCRIPTOR, weight=-1.0),
        replace(DESCRIPTOR, sha256="AB" * 32),
        replace(DESCRIPTOR, owner=PeerId("x" * 65)),
        replace(DESCRIPTOR, nbytes=2**63),
    ],
)
def test_a_descriptor_outside_its_bounds_is_refused(unfit: PayloadDescriptor) -> None:
    with pytest.raises(HetnodeError) as refusal:
        descriptor_from_bytes(descriptor_to_bytes(unfit))
    assert refusal.value.code is ErrorCode.BAD_REQUEST
