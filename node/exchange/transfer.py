"""Payload bytes on a stream: sending them in chunks, and receiving and checking them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

from node import hooks
from node.checkpoint.download import TransferError, WrongBytes
from node.exchange.arrivals import Arrival
from protocol.pb.payload_pb2 import PayloadChunk
from protocol.server.line import UNLIMITED, Line
from protocol.types import PayloadDescriptor

CHUNK_BYTES = 256 * 1024  # at most; the fastest size of a stream (138-177 MB/s on loopback)
CHUNK_SECONDS = 5.0  # longest wait for the next chunk
_LEAST_CHUNK_BYTES = 16 * 1024  # smaller ones would cost a strong sender more than a tenth of a core
_CHUNKS_IN_ALL = 512 * 1024  # on their way to all receivers: a line of 1 Mb/s passes them in CHUNK_SECONDS
RANGES = 8
"""Streams by which one of two members fetches the payload of the other one."""
_LEAST_RANGES_BYTES = 1024 * 1024
_LINGER_SECONDS = 60.0  # for a receiver that never closes its stream


class NotHeld(TransferError):
    """The sender says that it does not hold the payload."""


NOT_HELD = "this peer does not hold that payload"
"""The refusal of a peer that does not hold a payload."""


def chunk_bytes(receivers: int) -> int:
    """The size of the chunks of a payload that has to reach `receivers` at the same time.

    All of them share one line, and each one waits CHUNK_SECONDS for a whole chunk.
    """
    return min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _CHUNKS_IN_ALL // max(1, receivers)))


def ranges_of(nbytes: int, members: int) -> list[tuple[int, int]]:
    """The first byte and the length of each range in which one of `members` fetches a payload.

    Between two members all bytes share one connection: the acknowledgements of one stream wait behind
    the payload that goes the other way, and several streams keep the line busy meanwhile.
    """
    count = RANGES if members == 2 and nbytes >= _LEAST_RANGES_BYTES else 1
    size = -(-nbytes // count)
    return [(first, min(size, nbytes - first)) for first in range(0, nbytes, size)] if nbytes else [(0, 0)]


async def within(pieces: AsyncIterator[bytes], first: int, nbytes: int) -> AsyncIterator[bytes]:
    """The bytes `first` to `first + nbytes - 1` of `pieces`, as far as there are any."""
    position, end = 0, first + nbytes
    async for piece in pieces:
        if part := piece[max(0, first - position) : max(0, end - position)]:
            yield part
        position += len(piece)
        if position >= end:
            return


async def read_in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """`pieces`, each read by a thread. Raises what reading raises, such as OSError."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


async def outgoing(
    pieces: AsyncIterator[bytes], round_number: int, stage: int, line: Line = UNLIMITED
) -> AsyncIterator[PayloadChunk]:
    """The chunks of a payload, as fast as `line` allows. Raises what `pieces` raises."""
    async for piece in hooks.current().outgoing(round_number, stage, pieces):
        async for chunk in paced(piece, line):
            yield chunk


async def paced(data: bytes, line: Line) -> AsyncIterator[PayloadChunk]:
    """`data` in chunks, as fast as `line` allows. Their receiver waits CHUNK_SECONDS for each."""
    for piece in line.up.pieces(data):
        await line.up.take(len(piece))
        yield PayloadChunk(data=bytes(piece))


async def linger() -> None:
    """Keep a stream open after its last byte until the receiver, which knows the length, closes it.

    A transport may drop bytes on their way when the sender closes the stream. When the receiver closes it,
    the transport cancels the answer and thus this call.
    """
    await asyncio.sleep(_LINGER_SECONDS)


async def receive(
    stream: AsyncIterator[PayloadChunk],
    descriptor: PayloadDescriptor,
    line: Line = UNLIMITED,
    arrival: Arrival | None = None,
) -> bytes:
    """The payload, with the announced length and hash. Never holds more bytes than announced.

    `arrival` gets the bytes as they come.

    Raises WrongBytes for another hash, too many bytes or an empty chunk; NotHeld if the sender lacks the
    payload; TransferError if it refuses for another reason, or if the stream ended early; TimeoutError after
    CHUNK_SECONDS without a chunk.
    """
    data = await receive_exactly(stream, descriptor.nbytes, line=line, arrival=arrival)
    await check_hash(data, descriptor)
    if arrival is not None:
        arrival.verify()
    return bytes(data)


async def check_hash(data: bytes | bytearray, descriptor: PayloadDescriptor) -> None:
    """Raises WrongBytes unless `data` is the announced payload."""
    # In a thread: hashing a large payload would block the event loop.
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if digest != descriptor.sha256:
        raise WrongBytes(f"the bytes have hash {digest[:16]}, announced was {descriptor.sha256[:16]}")


async def receive_exactly(
    stream: AsyncIterator[PayloadChunk],
    nbytes: int,
    first_seconds: float = CHUNK_SECONDS,
    line: Line = UNLIMITED,
    arrival: Arrival | None = None,
) -> bytearray:
    """`nbytes` bytes, not verified. Waits `first_seconds` for the first chunk. Raises as :func:`receive`.

    Takes them as fast as `line` allows: its sender then has to wait. `arrival` gets them as they come.
    """
    # A cut stream may look like one that has ended: only the number of bytes shows that it is complete.
    data = bytearray() if arrival is None else arrival.data
    while len(data) < nbytes:
        try:
            async with asyncio.timeout(CHUNK_SECONDS if data else first_seconds):
                chunk = await anext(stream)
        except StopAsyncIteration:
            raise TransferError(f"the stream ended after {len(data)} of {nbytes} bytes") from None
        if chunk.refusal == NOT_HELD:
            raise NotHeld(f"refused: {chunk.refusal}")
        if chunk.refusal:
            raise TransferError(f"refused: {chunk.refusal[:200]}")
        # An empty chunk would reset the clock without any progress.
        if not 0 < len(chunk.data) <= nbytes - len(data):
            raise WrongBytes(f"a chunk of {len(chunk.data)} bytes after {len(data)} of {nbytes}")
        if arrival is None:
            data += chunk.data
        else:
            arrival.add(chunk.data)
        await line.down.take(len(chunk.data))
    return data
