"""Payload bytes on a stream: chunks out, and the checked bytes in."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

from protocol.pb.payload_pb2 import PayloadChunk
from protocol.types import PayloadDescriptor

CHUNK_BYTES = 256 * 1024
"""Fastest over libp2p's streams (138-177 MB/s on loopback)."""

CHUNK_SECONDS = 5.0
"""Longest wait for the next chunk."""


class TransferError(Exception):
    """A payload did not arrive as announced; the sentence says why."""


class WrongBytes(TransferError):
    """What arrived cannot be the announced payload, however good the connection was."""


def chunks(payload: bytes) -> Iterator[PayloadChunk]:
    for start in range(0, len(payload), CHUNK_BYTES):
        yield PayloadChunk(data=payload[start : start + CHUNK_BYTES])


async def receive(stream: AsyncIterator[PayloadChunk], descriptor: PayloadDescriptor) -> bytes:
    """The payload of exactly the announced length and hash. Never holds more than the announced length.

    A cut libp2p stream looks like one that ended, so only the bytes themselves tell that they are complete.

    Raises:
        WrongBytes: the bytes are others, or too many, or come in empty chunks.
        TransferError: the stream ended early, or the sender refuses.
        TimeoutError: no chunk for CHUNK_SECONDS.
    """
    data = bytearray()
    while len(data) < descriptor.nbytes:
        try:
            chunk = await asyncio.wait_for(anext(stream), CHUNK_SECONDS)
        except StopAsyncIteration:
            raise TransferError(f"the stream ended after {len(data)} of {descriptor.nbytes} bytes") from None
        if chunk.refusal:
            raise TransferError(f"refused: {chunk.refusal[:200]}")
        if not 0 < len(chunk.data) <= descriptor.nbytes - len(data):
            raise WrongBytes(f"a chunk of {len(chunk.data)} bytes after {len(data)} of {descriptor.nbytes}")
        data += chunk.data
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if digest != descriptor.sha256:
        raise WrongBytes(f"the bytes have hash {digest[:16]}, announced was {descriptor.sha256[:16]}")
    return bytes(data)
