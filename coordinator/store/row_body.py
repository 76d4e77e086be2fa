"""The body of a stored row: the JSON of its event, compressed.

Most rows are short: field names, which a dictionary holds, and peer ids, hashes and signatures, which are
text of 4 to 6 bits a character. A decision names each payload and its holders: half a megabyte of text for a
large swarm, of which a sixth is left.
"""

from __future__ import annotations

import zlib

MOST_BYTES = 256 << 20
_FORM = b"\x01"
"""Begins a body: the number of the dictionary."""
# Never edit a released dictionary: add one with another number. What is used most often stands at the end.
_DICTIONARY = (
    b'{"at":1700000000.0,"stage":0,"round":1,"group_id":"","anchor_digest":"","seconds":20.0}'
    b'{"at":1700000000.0,"peer":"12D3KooW","role":"replica","capacity":{"device":"cuda","memory_bytes":17179869184,'
    b'"threads":8,"flops":1000000000000.0,"uplink":1000000.0,"downlink":1000000.0,"round_trip":0.01},"endpoint":"",'
    b'"reachability":null,"claimed":"","problem":"","role_reason":""}'
    b'{"at":1700000000.0,"stage":0,"round":1,"peer":"12D3KooW","owners":["12D3KooW"],"of_group":400,"lacking":[]}'
    b'{"at":1700000000.0,"descriptor":{"run":"","stage":0,"round":1,"owner":"12D3KooW","anchor_digest":"",'
    b'"codec":"sparse","weight":1.0,"nbytes":1000000,"sha256":"","signature":"==","epoch":1}}'
    b'{"at":1700000000.0,"stage":0,"round":1,"part":"embedding","peer":"12D3KooW","digest":""}'
    b'{"at":1700000000.0,"stage":0,"round":1,"part":"stage","peer":"12D3KooW","digest":"'
)


def pack_body(text: str) -> bytes:
    """What is stored for `text`, the JSON object of an event."""
    writer = zlib.compressobj(wbits=-zlib.MAX_WBITS, zdict=_DICTIONARY)
    return _FORM + writer.compress(text.encode()) + writer.flush()


def unpack_body(body: bytes) -> str:
    """The inverse of :func:`pack_body`. Raises ValueError for a damaged body."""
    if not isinstance(body, bytes) or not body.startswith(_FORM):
        raise ValueError("damaged: it names no known dictionary")
    reader = zlib.decompressobj(-zlib.MAX_WBITS, _DICTIONARY)
    try:
        text = reader.decompress(body[1:], MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("damaged: a part is missing, or something is added")
    return text.decode()
