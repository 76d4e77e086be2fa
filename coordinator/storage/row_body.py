"""The body of a stored row: the JSON of its event, compressed.

Most rows are short: field names, which a dictionary holds, and peer ids, hashes and signatures, which are
text of 4 to 6 bits a character. A decision names each payload and its holders: half a megabyte of text for a
large swarm, of which a sixth is left.

Two forms of earlier logs are read, too: the JSON itself, and "z" with base64 of its zlib stream.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode
from typing import TypeAlias

Body: TypeAlias = str | bytes
"""As SQLite keeps it: text, or a BLOB of the number of the dictionary and a raw deflate stream."""

MOST_BYTES = 256 << 20
_MARK = "z"
"""Begins a compressed text; JSON objects begin with a brace."""
# Never edit a released dictionary: append a new one. What is used most often stands at the end.
_DICTIONARIES: tuple[bytes, ...] = (
    b'{"at":1700000000.0,"stage":0,"round":1,"group_id":"","anchor_digest":"","seconds":20.0}'
    b'{"at":1700000000.0,"peer":"12D3KooW","role":"replica","capacity":{"device":"cuda","memory_bytes":17179869184,'
    b'"threads":8,"flops":1000000000000.0,"uplink":1000000.0,"downlink":1000000.0,"round_trip":0.01},"endpoint":"",'
    b'"reachability":null,"claimed":"","problem":"","role_reason":""}'
    b'{"at":1700000000.0,"stage":0,"round":1,"peer":"12D3KooW","owners":["12D3KooW"],"of_group":400,"lacking":[]}'
    b'{"at":1700000000.0,"descriptor":{"run":"","stage":0,"round":1,"owner":"12D3KooW","anchor_digest":"",'
    b'"codec":"sparse","weight":1.0,"nbytes":1000000,"sha256":"","signature":"==","epoch":1}}'
    b'{"at":1700000000.0,"stage":0,"round":1,"part":"embedding","peer":"12D3KooW","digest":""}'
    b'{"at":1700000000.0,"stage":0,"round":1,"part":"stage","peer":"12D3KooW","digest":"',
)


def pack_body(text: str) -> Body:
    """What is stored for `text`, the JSON object of an event: the shorter of it and its compressed form."""
    number = len(_DICTIONARIES)
    writer = zlib.compressobj(wbits=-zlib.MAX_WBITS, zdict=_DICTIONARIES[number - 1])
    packed = bytes([number]) + writer.compress(text.encode()) + writer.flush()
    return packed if len(packed) < len(text) else text


def unpack_body(body: Body) -> str:
    """The inverse of :func:`pack_body`. Raises ValueError for a damaged body."""
    try:
        if isinstance(body, bytes):
            return _text(zlib.decompressobj(-zlib.MAX_WBITS, _dictionary(body)), body[1:])
        if body.startswith(_MARK):
            return _text(zlib.decompressobj(), b64decode(body[1:], validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"damaged: {error}") from None
    return body


def _dictionary(body: bytes) -> bytes:
    if not body or not 1 <= body[0] <= len(_DICTIONARIES):
        raise ValueError("damaged: it names no known dictionary")
    return _DICTIONARIES[body[0] - 1]


def _text(reader: zlib._Decompress, packed: bytes) -> str:
    text = reader.decompress(packed, MOST_BYTES)
    if not reader.eof or reader.unused_data:
        raise ValueError("damaged: a part is missing, or something is added")
    return text.decode()
