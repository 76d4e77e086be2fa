"""Payload bytes on a stream: sending them in chunks, and receiving and checking them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

from node import hooks
from protocol.pb.payload_pb2 import PayloadChunk
from protocol.types import PayloadDescriptor

CHUNK_BYTES = 256 * 1024
"""The fastest size over libp2p's streams (138-177 MB/s on loopback)."""

CHUNK_SECONDS = 5.0
"""Longest wait for the next chunk."""

_LINGER_SECONDS = 60.0  # for a receiver that never closes its stream


class TransferError(Exception):
    """A payload did not arrive as announced; the message says why."""


class WrongBytes(TransferError):
    """The sender sent bytes that are not the announced payload. No failure of the connection causes this."""


async def outgoing(pieces: Iterator[bytes], round_number: int, stage: int) -> AsyncIterator[PayloadChunk]:
    """The chunks of a payload. A thread reads its pieces. Raises OSError if reading fails."""

    async def read() -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece

    async for piece in hooks.current().outgoing(round_number, stage, read()):
        yield PayloadChunk(data=piece)


async def linger() -> None:
    """Keep a stream open after its last byte until the receiver, which knows the length, closes it.

    libp2p's daemon may drop bytes on their way when the sender closes the stream. When the receiver closes
    it, hivemind cancels the handler and thus this call; otherwise this returns after a minute.
    """
    await asyncio.sleep(_LINGER_SECONDS)


async def receive(stream: AsyncIterator[PayloadChunk], descriptor: PayloadDescriptor) -> bytes:
    """The payload, with the announced length and hash. Never holds more bytes than announced.

    Raises:
        WrongBytes: the hash is another, there are too many bytes, or a chunk is empty.
        TransferError: the stream ended early, or the sender refuses.
        TimeoutError: no chunk for CHUNK_SECONDS.
    """
    data = await receive_exactly(stream, descriptor.nbytes)
    # In a thread: hashing a large payload would block the event loop.
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if digest != descriptor.sha256:
        raise WrongBytes(f"the bytes have hash {digest[:16]}, announced was {descriptor.sha256[:16]}")
    return bytes(data)


async def receive_exactly(
    stream: AsyncIterator[PayloadChunk], nbytes: int, first_seconds: float = CHUNK_SECONDS
) -> bytearray:
    """`nbytes` bytes, not verified. Raises as :func:`receive`.

    A cut libp2p stream looks like one that has ended: only the number of bytes shows that it is complete.

    Args:
        first_seconds: longest wait for the first chunk.
    """
    data = bytearray()
    while len(data) < nbytes:
        try:
            # asyncio.wait_for could lose a cancellation of this task.
            async with asyncio.timeout(CHUNK_SECONDS if data else first_seconds):
                chunk = await anext(stream)
        except StopAsyncIteration:
            raise TransferError(f"the stream ended after {len(data)} of {nbytes} bytes") from None
        if chunk.refusal:
            raise TransferError(f"refused: {chunk.refusal[:200]}")
        # An empty chunk would reset the clock without any progress.
        if not 0 < len(chunk.data) <= nbytes - len(data):
            raise WrongBytes(f"a chunk of {len(chunk.data)} bytes after {len(data)} of {nbytes}")
        data += chunk.data
        await hooks.current().after_chunk(len(chunk.data))
    return data
