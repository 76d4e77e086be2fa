"""The body of a stored row: the JSON of its event, or the same compressed if it is long.

A decision names each payload and its holders. For a large swarm that is half a megabyte of text, of which a
sixth is left when it is compressed.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode

LONG = 4096
"""Characters from which a body is compressed."""
MOST_BYTES = 256 << 20
_MARK = "z"
"""Begins a compressed body; JSON objects begin with a brace."""


def pack_body(text: str) -> str:
    """What is stored for `text`, the JSON object of an event."""
    if len(text) < LONG:
        return text
    return _MARK + b64encode(zlib.compress(text.encode())).decode("ascii")


def unpack_body(body: str) -> str:
    """The inverse of :func:`pack_body`. Raises ValueError for a damaged body."""
    if not body.startswith(_MARK):
        return body
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(b64decode(body[1:], validate=True), MOST_BYTES)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("damaged: a part is missing, or something is added")
    return text.decode()
