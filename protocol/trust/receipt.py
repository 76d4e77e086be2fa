"""Receipts: what a peer has done for a run, signed by the coordinator, for anybody to verify offline.

A receipt is a file of JSON with one flat object. The signature covers the fields, not the white space, so a
receipt survives a mail program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import Signer, is_signed_by

MAX_BYTES = 4096
"""Of the file of a receipt. Longer ones are not parsed."""
_MAGIC, _VERSION = "hetnode_receipt", 1
_DOMAIN = b"hetnode receipt 1\n"


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


def receipt_message(receipt: Receipt) -> bytes:
    """The bytes that the coordinator signs: every field but the signature, in canonical JSON."""
    return _message(_object(receipt))


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
        found = _decode(data)
        signature = bytes.fromhex(found["signature"])
    except (ValueError, TypeError, RecursionError):
        raise HetnodeError(
            ErrorCode.RECEIPT_UNREADABLE,
            f"This is not a receipt of this version, of at most {MAX_BYTES} bytes.",
            "Ask for the file as 'hetnode receipt get' wrote it.",
        ) from None
    # The text of each value is signed, so a value of another type is not the one that was signed.
    if not is_signed_by(str(found["coordinator"]), _message(found), signature):
        raise HetnodeError(
            ErrorCode.RECEIPT_FORGED,
            "The signature of this receipt does not fit: a field was changed, or another key has signed it.",
            "Do not believe any of its fields.",
        )
    del found[_MAGIC]
    return Receipt(**found)


def _object(receipt: Receipt) -> dict[str, Any]:
    return {_MAGIC: _VERSION, **asdict(receipt)}


def _message(found: Mapping[str, Any]) -> bytes:
    unsigned = {name: value for name, value in found.items() if name != "signature"}
    return _DOMAIN + json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def _decode(data: bytes) -> dict[str, Any]:
    """The fields of a receipt, of which nothing is known yet. Raises ValueError, RecursionError."""
    if len(data) > MAX_BYTES:
        raise ValueError("it is too long")
    found = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs)
    names = {_MAGIC, *(field.name for field in fields(Receipt))}
    if not isinstance(found, dict) or found.keys() != names or found[_MAGIC] != _VERSION:
        raise ValueError("it has other fields")
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a field twice: a reader might believe the other one")
    return found
