"""Payload bytes on a stream: chunks out, and the checked bytes in."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

from node import hooks
from protocol.pb.payload_pb2 import PayloadChunk
from protocol.types import PayloadDescriptor

CHUNK_BYTES = 256 * 1024
"""Fastest over libp2p's streams (138-177 MB/s on loopback)."""

CHUNK_SECONDS = 5.0
"""Longest wait for the next chunk."""

_LINGER_SECONDS = 60.0


class TransferError(Exception):
    """A payload did not arrive as announced; the message says why."""


class WrongBytes(TransferError):
    """The sender sent bytes that cannot be the announced payload; the connection is not to blame."""


async def outgoing(pieces: Iterator[bytes], round_number: int, stage: int) -> AsyncIterator[PayloadChunk]:
    """The chunks of a payload. Its pieces are read in another thread; raises OSError where that fails."""

    async def read() -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece

    async for piece in hooks.current().outgoing(round_number, stage, read()):
        yield PayloadChunk(data=piece)


async def linger() -> None:
    """Keep a stream open after the last byte, until its receiver, which knows the length, has closed it.

    libp2p's daemon may drop bytes on their way when the sender closes. hivemind cancels the handler of a
    stream that its caller has closed, which ends this; otherwise it ends after a minute.
    """
    await asyncio.sleep(_LINGER_SECONDS)


async def receive(stream: AsyncIterator[PayloadChunk], descriptor: PayloadDescriptor) -> bytes:
    """The payload of exactly the announced length and hash. Never holds more than the announced length.

    Raises:
        WrongBytes: the bytes are others, or too many, or come in empty chunks.
        TransferError: the stream ended early, or the sender refuses.
        TimeoutError: no chunk for CHUNK_SECONDS.
    """
    data = await receive_exactly(stream, descriptor.nbytes)
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if digest != descriptor.sha256:
        raise WrongBytes(f"the bytes have hash {digest[:16]}, announced was {descriptor.sha256[:16]}")
    return bytes(data)


async def receive_exactly(
    stream: AsyncIterator[PayloadChunk], nbytes: int, first_seconds: float = CHUNK_SECONDS
) -> bytearray:
    """`nbytes` bytes, not verified. Raises as :func:`receive`.

    A cut libp2p stream looks like one that ended, so only the number of bytes shows that it is complete.

    Args:
        first_seconds: longest wait for the first chunk.
    """
    data = bytearray()
    while len(data) < nbytes:
        try:
            # Not wait_for, which can lose the cancellation of its caller.
            async with asyncio.timeout(CHUNK_SECONDS if data else first_seconds):
                chunk = await anext(stream)
        except StopAsyncIteration:
            raise TransferError(f"the stream ended after {len(data)} of {nbytes} bytes") from None
        if chunk.refusal:
            raise TransferError(f"refused: {chunk.refusal[:200]}")
        if not 0 < len(chunk.data) <= nbytes - len(data):
            raise WrongBytes(f"a chunk of {len(chunk.data)} bytes after {len(data)} of {nbytes}")
        data += chunk.data
        await hooks.current().after_chunk(len(chunk.data))
    return data
