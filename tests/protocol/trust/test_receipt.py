"""Receipts: what is signed comes back, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import plan_message, spec_message
from protocol.trust.receipt import (
    MAX_BYTES,
    Receipt,
    encode_receipt,
    open_receipt,
    receipt_message,
    sign_receipt,
)
from tests.builders import keyed

COORDINATOR, PEER = keyed(1000), keyed(1)
UNSIGNED = Receipt(
    run="nano-0123456789ab-0123456789abcdef0123456789abcdef",
    spec_hash="a" * 64,
    peer=PEER.peer,
    name="José",
    stage_tokens=123_456,
    stage_rounds=7,
    payload_bytes=9_999,
    first_round=1,
    last_round=4,
    log_row=250,
    log_hash="b" * 64,
    time=1_700_000_000,
    coordinator=COORDINATOR.peer,
)
RECEIPT = sign_receipt(UNSIGNED, COORDINATOR.sign)
FILE = encode_receipt(RECEIPT)


def refused(data: bytes) -> ErrorCode:
    with pytest.raises(HetnodeError) as refusal:
        open_receipt(data)
    assert len(str(refusal.value)) < 500
    return refusal.value.code


def test_a_receipt_can_be_read_by_people_and_programs() -> None:
    assert open_receipt(FILE) == RECEIPT
    assert json.loads(FILE)["stage_tokens"] == 123_456
    assert FILE.startswith(b'{\n  "hetnode_receipt": 1,\n  "run": "nano-')


def test_the_signed_bytes_stay_as_they_are() -> None:
    assert receipt_message(UNSIGNED) == (
        b'hetnode receipt 1\n{"coordinator":"' + COORDINATOR.peer.encode() + b'","first_round":1,'
        b'"hetnode_receipt":1,"last_round":4,"log_hash":"' + b"b" * 64 + b'","log_row":250,'
        b'"name":"Jos\\u00e9","payload_bytes":9999,"peer":"' + PEER.peer.encode() + b'",'
        b'"run":"nano-0123456789ab-0123456789abcdef0123456789abcdef","spec_hash":"' + b"a" * 64 + b'",'
        b'"stage_rounds":7,"stage_tokens":123456,"time":1700000000}'
    )


@given(
    st.builds(
        Receipt,
        run=st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
        spec_hash=st.binary(min_size=32, max_size=32).map(bytes.hex),
        peer=st.integers(0, 5).map(lambda number: keyed(number).peer),
        name=st.text(st.characters(exclude_categories=["Cs"]), max_size=32),
        **{
            name: st.integers(0, 2**63 - 1)
            for name in ("stage_tokens", "stage_rounds", "payload_bytes", "log_row", "time")
        },
        first_round=st.just(1),
        last_round=st.integers(1, 2**63 - 1),
        log_hash=st.binary(min_size=32, max_size=32).map(bytes.hex),
        coordinator=st.just(COORDINATOR.peer),
    )
)
def test_every_receipt_comes_back_as_it_was_signed(unsigned: Receipt) -> None:
    signed = sign_receipt(unsigned, COORDINATOR.sign)
    assert open_receipt(encode_receipt(signed)) == signed


def test_white_space_and_order_are_not_signed() -> None:
    compact = json.dumps(json.loads(FILE), sort_keys=True, separators=(",", ":")).encode()
    assert open_receipt(compact) == open_receipt(FILE.replace(b"\n", b"\r\n")) == RECEIPT


@pytest.mark.parametrize("name", [field.name for field in fields(Receipt) if field.name != "signature"])
def test_no_field_can_be_changed(name: str) -> None:
    value: Any = getattr(RECEIPT, name)
    others = {
        "peer": keyed(2).peer,
        "coordinator": keyed(3).peer,
        "spec_hash": "c" * 64,
        "log_hash": "c" * 64,
        "name": "Jose\u0301",
        "first_round": 2,
    }
    other = others.get(name, value + 1 if isinstance(value, int) else f"{value}x")
    assert refused(encode_receipt(replace(RECEIPT, **{name: other}))) is ErrorCode.RECEIPT_FORGED


def test_the_signature_of_another_key_or_of_something_else_is_refused() -> None:
    mallory = keyed(66)
    assert refused(encode_receipt(sign_receipt(UNSIGNED, mallory.sign))) is ErrorCode.RECEIPT_FORGED
    message = receipt_message(UNSIGNED).removeprefix(b"hetnode receipt 1\n")
    for other in (
        message,
        spec_message(UNSIGNED.run, message.decode()),
        plan_message(UNSIGNED.run, message),
    ):
        forged = replace(UNSIGNED, signature=COORDINATOR.sign(other).hex())
        assert refused(encode_receipt(forged)) is ErrorCode.RECEIPT_FORGED


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(FILE), **values}).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"\0", b"{" * 4000, b"[" * MAX_BYTES),
        *(FILE[:-3], FILE + b"x", FILE.replace(b'"run"', b'"ran"'), FILE * 2),
        FILE.replace(b'"stage_tokens": 123456', b'"stage_tokens": 1, "stage_tokens": 123456'),
        FILE.replace(b'"run"', b'"run": "x", "run"'),
        FILE.replace(b"123456", b"0123456"),
        *(changed(signature=value) for value in ("z" * 128, 7)),
        *(changed(hetnode_receipt=2), changed(more=1)),
    ],
)
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    assert refused(data) is ErrorCode.RECEIPT_UNREADABLE


@pytest.mark.parametrize(
    "data",
    [
        *(FILE.replace(b"123456", number) for number in (b"NaN", b"Infinity", b"123456.0", b"1e5", b"-1")),
        *(FILE.replace(b"123456", number) for number in (b"9" * 19, b"9" * 21)),
        *(changed(stage_tokens=value) for value in ("123456", True, None, [1], {"a": 1}, 2**63)),
        *(changed(name=value) for value in (None, 1, "x" * 33, "\ud800", ["x"])),
        *(changed(signature=value) for value in ("", "a" * 130)),
        *(changed(peer=value) for value in ("", "x", 5)),
        *(changed(coordinator=value) for value in ("", "x", "1" * 10**3, "12D3KooW", 5, None)),
        *(changed(hetnode_receipt=True), changed(first_round=0)),
    ],
)
def test_a_value_that_was_not_signed_is_refused(data: bytes) -> None:
    assert refused(data) is ErrorCode.RECEIPT_FORGED


def test_a_long_file_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for data in (b" " * 10_000_000, FILE + b" " * MAX_BYTES):
        assert refused(data) is ErrorCode.RECEIPT_UNREADABLE


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_garbage_raises_only_what_is_promised(data: bytes) -> None:
    assert refused(data) is ErrorCode.RECEIPT_UNREADABLE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*asdict(RECEIPT), "hetnode_receipt"]), JSON)
def test_any_other_value_of_a_field_is_refused(name: str, value: Any) -> None:
    former = json.loads(FILE)[name]
    if value == former and type(value) is type(former):
        return
    assert refused(changed(**{name: value})) in (ErrorCode.RECEIPT_UNREADABLE, ErrorCode.RECEIPT_FORGED)
