"""Parts of anchors in the store: the hashes of all chunks and then the chunks, cut into segments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from node.checkpoint.download import TransferError
from node.checkpoint.parts import StoredPart, pieces
from node.exchange.object_client import ObjectClient
from node.exchange.object_source import LentPart
from protocol.math.digest import CHUNK_BYTES, HASH_BYTES, chunk_count
from protocol.wire.object_calls import SEGMENT_BYTES

STORE = "the object store"
"""Its name among the donors, which are peer ids."""
_PIECE_SECONDS = 60.0


def segments(nbytes: int) -> Iterator[range]:
    """The bytes of each segment of a part of `nbytes`, its hashes included."""
    whole = HASH_BYTES * chunk_count(nbytes) + nbytes
    for start in range(0, whole, SEGMENT_BYTES):
        yield range(start, min(whole, start + SEGMENT_BYTES))


def segment_of(part: StoredPart, hashes: bytes, segment: range) -> bytes:
    """The bytes of a segment of a part on the disk, whose chunks have these hashes. Raises OSError."""
    first, last = (max(0, each - len(hashes)) for each in (segment.start, segment.stop))
    return hashes[segment.start : segment.stop] + b"".join(pieces(part, range(first, last), 1 << 20))


async def read_piece(client: ObjectClient, lent: LentPart, nbytes: int, index: int, size: int) -> bytes:
    """What node.checkpoint.transfer asks a donor for, not verified. Raises TransferError."""
    first = 0 if index == 0 else HASH_BYTES * chunk_count(nbytes) + (index - 1) * CHUNK_BYTES
    found = []
    async with asyncio.timeout(_PIECE_SECONDS):
        for segment, url in zip(segments(nbytes), lent.urls, strict=False):
            start, stop = max(first, segment.start), min(first + size, segment.stop)
            if start < stop:
                found.append(await client.get(url, stop - start, lent.nearest, start - segment.start))
    if sum(map(len, found)) < size:
        raise TransferError("the store has fewer segments than the part")
    return b"".join(found)
