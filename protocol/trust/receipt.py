"""Receipts: what a peer has done for a run, signed by the coordinator, for anybody to verify offline.

A receipt is a file of JSON with one flat object. The signature covers the fields, not the white space, so a
receipt survives a mail program.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import Signer, is_signed_by, public_key_of
from protocol.trust.public_name import MAX_NAME

MAX_BYTES = 4096
"""Of the file of a receipt. Longer ones are not parsed."""
_MAGIC, _VERSION = "hetnode_receipt", 1
_DOMAIN = b"hetnode receipt 1\n"
_MAX_NUMBER = 2**63 - 1
_MAX_DIGITS = 20
_HEX = {"spec_hash": 64, "log_hash": 64, "signature": 128}
_TEXT = {"run": 128, "name": MAX_NAME}


@dataclass(frozen=True)
class Receipt:
    """What `peer` had done for `run` when its event log had `log_row` rows.

    Attributes:
        spec_hash, log_hash: sha-256, hex; `log_hash` is the row hash of row `log_row`.
        name: public name of the peer at that row, or "".
        stage_tokens: each token of a committed payload counts once for each stage at which it was committed.
        stage_rounds: the (stage, round)s in which a payload of the peer counted.
        payload_bytes: of these payloads.
        first_round, last_round: in which a payload of the peer counted.
        time: Unix time of the signature, in whole seconds.
        coordinator: peer id of the key that signed.
        signature: ed25519 over :func:`receipt_message`, hex; "" before it is signed.
    """

    run: str
    spec_hash: str
    peer: str
    name: str
    stage_tokens: int
    stage_rounds: int
    payload_bytes: int
    first_round: int
    last_round: int
    log_row: int
    log_hash: str
    time: int
    coordinator: str
    signature: str = ""


_KEYS = [_MAGIC, *(field.name for field in fields(Receipt))]


def receipt_message(receipt: Receipt) -> bytes:
    """The bytes that the coordinator signs: every field but the signature, in canonical JSON."""
    unsigned = _object(receipt)
    del unsigned["signature"]
    return _DOMAIN + json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def sign_receipt(receipt: Receipt, sign: Signer) -> Receipt:
    return replace(receipt, signature=sign(receipt_message(receipt)).hex())


def encode_receipt(receipt: Receipt) -> bytes:
    """The file of a receipt, for people and :func:`open_receipt`."""
    return json.dumps(_object(receipt), indent=2).encode() + b"\n"


def open_receipt(data: bytes) -> Receipt:
    """The receipt in a file, whose signature fits its fields and its `coordinator`.

    Raises HetnodeError: RECEIPT_UNREADABLE, RECEIPT_FORGED.
    """
    try:
        receipt = _decode(data)
    except (ValueError, RecursionError) as error:
        # The text may be of anybody; no more of it is repeated than what an error of ours says.
        why = str(error)[:200] if isinstance(error, _Unfit) else "it is not JSON as a coordinator writes it"
        raise HetnodeError(
            ErrorCode.RECEIPT_UNREADABLE,
            f"This is not a receipt: {why}.",
            "Ask for the file as 'hetnode receipt get' wrote it.",
        ) from None
    if not is_signed_by(receipt.coordinator, receipt_message(receipt), bytes.fromhex(receipt.signature)):
        raise HetnodeError(
            ErrorCode.RECEIPT_FORGED,
            "The signature of this receipt does not fit: a field was changed, or another key has signed it.",
            "Do not believe any of its fields.",
        )
    return receipt


class _Unfit(ValueError):
    """A check of ours has failed."""


def _object(receipt: Receipt) -> dict[str, Any]:
    return {_MAGIC: _VERSION, **asdict(receipt)}


def _decode(data: bytes) -> Receipt:
    if len(data) > MAX_BYTES:
        raise _Unfit(f"it has more than {MAX_BYTES} bytes")
    found = json.loads(
        data.decode("utf-8"),
        object_pairs_hook=_pairs,
        parse_int=_number,
        parse_float=_no_number,
        parse_constant=_no_number,
    )
    if not isinstance(found, dict):
        raise _Unfit("it is not a JSON object")
    if missing := [key for key in _KEYS if key not in found]:
        raise _Unfit(f"{missing[0]} is missing")
    if len(found) != len(_KEYS):
        # The signature would not cover it, and a reader might believe it.
        raise _Unfit("it has a field that no receipt has")
    version = found.pop(_MAGIC)
    if type(version) is not int or version != _VERSION:
        raise _Unfit("it is of another version of hetnode")
    for field in fields(Receipt):
        _check(field.name, found[field.name], is_number=field.type == "int")
    receipt = Receipt(**found)
    if not 1 <= receipt.first_round <= receipt.last_round:
        raise _Unfit("its rounds are out of order")
    return receipt


def _check(name: str, value: Any, is_number: bool) -> None:
    if is_number:
        # A bool is an int, and true would be signed as another text than 1.
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            raise _Unfit(f"{name} is not a number from 0 to {_MAX_NUMBER}")
        return
    if not isinstance(value, str):
        raise _Unfit(f"{name} is not a text")
    if name in _HEX:
        if len(value) != _HEX[name] or not set(value) <= set("0123456789abcdef"):
            raise _Unfit(f"{name} has not {_HEX[name]} digits of 0-9 and a-f")
    elif name in _TEXT:
        # Not more: the name was checked by the coordinator, perhaps by a newer Unicode.
        if len(value) > _TEXT[name] or any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            raise _Unfit(f"{name} is no text of at most {_TEXT[name]} characters")
    else:
        try:
            public_key_of(value)
        except ValueError:
            raise _Unfit(f"{name} is not a peer id") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Unfit("it has a field twice")
    return found


def _number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise _Unfit("it has a number out of bounds")
    return int(digits)


def _no_number(text: str) -> int:
    raise _Unfit("it has a number that is not whole")
