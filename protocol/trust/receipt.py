"""Receipts: what a peer has done for a run, signed by the coordinator, for anybody to verify offline.

A receipt is a file of JSON with one flat object. The signature covers the fields, not the white space, so a
receipt survives a mail program.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import Signer, is_signed_by

MAX_BYTES = 4096
"""Of the file of a receipt. Longer ones are not parsed."""
_VERSION, _DOMAIN = 1, b"hetnode receipt 1\n"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What `peer` had done for `run` when its event log had `log_row` rows.

    Attributes:
        hetnode_receipt: the version of the format.
        spec_hash, log_hash: sha-256, hex; `log_hash` is the row hash of row `log_row`.
        name: public name of the peer at that row, or "".
        stage_tokens: each token of a committed payload counts once for each stage at which it was committed.
        stage_rounds: the (stage, round)s in which a payload of the peer counted.
        payload_bytes: of these payloads.
        first_round, last_round: in which a payload of the peer counted.
        time: Unix time of the signature, in whole seconds.
        coordinator: peer id of the key that signed.
        owner: whose the peer is, an id of the same form; "" and not in the file where it has no owner.
        owner_nodes, owner_stage_tokens: of all peers of the owner together; they go with `owner`.
        signature: ed25519 over :func:`receipt_message`, hex; "" before it is signed.
    """

    hetnode_receipt: int = _VERSION
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
    owner: str = ""
    owner_nodes: int = 0
    owner_stage_tokens: int = 0
    signature: str = ""


_OF_OWNER = ("owner", "owner_nodes", "owner_stage_tokens")
_NAMES = sorted(field.name for field in fields(Receipt))
_NAMES_WITHOUT = [name for name in _NAMES if name not in _OF_OWNER]


def _written(receipt: Receipt) -> dict[str, object]:
    """The fields that are signed and in the file."""
    names = asdict(receipt)
    return names if receipt.owner else {name: names[name] for name in names if name not in _OF_OWNER}


def receipt_message(receipt: Receipt) -> bytes:
    """The bytes that the coordinator signs: every field but the signature, in canonical JSON."""
    unsigned = {name: value for name, value in _written(receipt).items() if name != "signature"}
    return _DOMAIN + json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def sign_receipt(receipt: Receipt, sign: Signer) -> Receipt:
    return replace(receipt, signature=sign(receipt_message(receipt)).hex())


def encode_receipt(receipt: Receipt) -> bytes:
    """The file of a receipt, for people and :func:`open_receipt`."""
    return json.dumps(_written(receipt), indent=2).encode() + b"\n"


def read_bounded(path: Path) -> bytes:
    """As much of a file as tells that it is too long for a receipt. Raises OSError."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def open_receipt(data: bytes) -> Receipt:
    """The receipt in a file, whose signature fits its fields and its `coordinator`.

    Raises HetnodeError: RECEIPT_UNREADABLE, RECEIPT_FORGED.
    """
    try:
        # Pairs show a field that is written twice, of which another reader might believe the other value.
        pairs = json.loads(data.decode(), object_pairs_hook=tuple) if len(data) <= MAX_BYTES else None
        if not isinstance(pairs, tuple):
            raise ValueError("it is no object")
        names = sorted(name for name, _ in pairs)
        if names not in (_NAMES, _NAMES_WITHOUT):
            raise ValueError("it has other fields")
        receipt = Receipt(**dict(pairs))
        if names != sorted(_written(receipt)):
            raise ValueError("it has no owner, and says what that has")
        signature = bytes.fromhex(receipt.signature)
        if receipt.hetnode_receipt != _VERSION:
            raise ValueError("another version")
    except (ValueError, TypeError, RecursionError):
        raise HetnodeError(
            ErrorCode.RECEIPT_UNREADABLE,
            f"This is not a receipt of this version, of at most {MAX_BYTES} bytes.",
            "Ask for the file as 'hetnode receipt' wrote it.",
        ) from None
    # The text of each value is signed, so a value of another type is not the one that was signed.
    if not is_signed_by(str(receipt.coordinator), receipt_message(receipt), signature):
        raise HetnodeError(
            ErrorCode.RECEIPT_FORGED,
            "The signature of this receipt does not fit: a field was changed, or another key has signed it.",
            "Do not believe any of its fields.",
        )
    return receipt
