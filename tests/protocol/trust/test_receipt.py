"""Receipts: what is signed comes back, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
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


def test_a_receipt_can_be_read_by_people_and_programs_in_any_white_space_and_order() -> None:
    assert FILE.startswith(b'{\n  "hetnode_receipt": 1,\n  "run": "nano-')
    compact = json.dumps(json.loads(FILE), sort_keys=True, separators=(",", ":")).encode()
    assert (
        open_receipt(FILE) == open_receipt(compact) == open_receipt(FILE.replace(b"\n", b"\r\n")) == RECEIPT
    )


def test_the_signed_bytes_stay_as_they_are() -> None:
    assert receipt_message(UNSIGNED) == (
        b'hetnode receipt 1\n{"coordinator":"' + COORDINATOR.peer.encode() + b'","first_round":1,'
        b'"hetnode_receipt":1,"last_round":4,"log_hash":"' + b"b" * 64 + b'","log_row":250,'
        b'"name":"Jos\\u00e9","payload_bytes":9999,"peer":"' + PEER.peer.encode() + b'",'
        b'"run":"nano-0123456789ab-0123456789abcdef0123456789abcdef","spec_hash":"' + b"a" * 64 + b'",'
        b'"stage_rounds":7,"stage_tokens":123456,"time":1700000000}'
    )


def test_the_owner_is_signed_too_and_without_one_its_fields_are_not_there() -> None:
    sums = {"owner": PEER.peer, "owner_nodes": 2, "owner_stage_tokens": 10**6}
    owned = sign_receipt(replace(UNSIGNED, **sums), COORDINATOR.sign)
    assert open_receipt(encode_receipt(owned)) == owned
    for name, value in (("owner", keyed(3).peer), ("owner_nodes", 3), ("owner_stage_tokens", 1)):
        other = json.dumps({**json.loads(encode_receipt(owned)), name: value}).encode()
        assert refused(other) is ErrorCode.RECEIPT_FORGED
    for more in (sums | {"owner": ""}, {"owner": PEER.peer}, {"owner_nodes": 0}):
        assert refused(changed(**more)) is ErrorCode.RECEIPT_UNREADABLE
    assert refused(changed(**sums)) is ErrorCode.RECEIPT_FORGED
    assert not any(name.startswith("owner") for name in json.loads(FILE))


def test_the_signature_of_another_key_or_of_something_else_is_refused() -> None:
    assert refused(encode_receipt(sign_receipt(UNSIGNED, keyed(66).sign))) is ErrorCode.RECEIPT_FORGED
    bare = receipt_message(UNSIGNED).removeprefix(b"hetnode receipt 1\n")
    forged = replace(UNSIGNED, signature=COORDINATOR.sign(bare).hex())
    assert refused(encode_receipt(forged)) is ErrorCode.RECEIPT_FORGED


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(FILE), **values}).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"\0", b"{" * 4000, b"[" * MAX_BYTES),
        *(FILE[:-3], FILE + b"x", FILE.replace(b'"run"', b'"ran"'), FILE * 2),
        FILE.replace(b'"stage_tokens": 123456', b'"stage_tokens": 1, "stage_tokens": 123456'),
        FILE.replace(b"123456", b"0123456"),
        *(changed(signature=value) for value in ("z" * 128, 7)),
        *(changed(hetnode_receipt=2), changed(more=1)),
        json.dumps([*json.loads(FILE).items()]).encode(),
    ],
)
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    assert refused(data) is ErrorCode.RECEIPT_UNREADABLE


@pytest.mark.parametrize(
    "data",
    [
        *(FILE.replace(b"123456", number) for number in (b"NaN", b"123456.0", b"1e5", b"-1", b"9" * 21)),
        *(changed(stage_tokens=value) for value in ("123456", True, None, [1], {"a": 1})),
        *(changed(name=value) for value in (None, 1, "Jose\u0301", "\ud800")),
        *(changed(signature=value) for value in ("", "a" * 130)),
        *(changed(coordinator=value) for value in ("", "1" * 10**3, "12D3KooW", keyed(3).peer, 5, None)),
        *(changed(hetnode_receipt=True), changed(first_round=0)),
    ],
)
def test_a_value_that_was_not_signed_is_refused(data: bytes) -> None:
    assert refused(data) is ErrorCode.RECEIPT_FORGED


def test_a_long_file_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert refused(FILE + b" " * MAX_BYTES) is ErrorCode.RECEIPT_UNREADABLE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*json.loads(FILE)]), JSON)
def test_any_other_value_of_a_field_is_refused(name: str, value: Any) -> None:
    former = json.loads(FILE)[name]
    if value != former or type(value) is not type(former):
        assert refused(changed(**{name: value})) in (ErrorCode.RECEIPT_UNREADABLE, ErrorCode.RECEIPT_FORGED)
