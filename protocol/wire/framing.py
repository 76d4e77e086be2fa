"""Frames of a link as a header and bounded chunks, and their reassembly on the other side.

A neighbour's bytes are never trusted: the header is checked in full before any chunk is kept, and at most the
bytes that the header announced are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.types import Frame, FrameId, TensorHeader
from protocol.wire.convert.fields import Record, between, several

CHUNK_BYTES = 1 << 20
"""Largest chunk of one message; larger payloads are split."""

MAX_TENSORS = 8
MAX_DIMENSIONS = 4
"""A tensor of no dimensions is a scalar."""

FRAME_ID = Record(FrameId, pb.FrameId, {}, code=ErrorCode.FRAME_CORRUPT)
_SHAPE = several(between(1, 2**31 - 1), MAX_DIMENSIONS)
TENSOR_HEADER = Record(TensorHeader, pb.TensorHeader, {"shape": _SHAPE}, code=ErrorCode.FRAME_CORRUPT)
_TENSORS = several(TENSOR_HEADER, MAX_TENSORS)


def frame_header_to_pb(id: FrameId, tensors: Sequence[TensorHeader]) -> pb.FrameHeader:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return pb.FrameHeader(id=FRAME_ID.to_pb(id), tensors=_TENSORS.write(tuple(tensors)), nbytes=nbytes)


def frame_header_from_pb(message: pb.FrameHeader) -> tuple[FrameId, tuple[TensorHeader, ...], int]:
    """The arguments of :meth:`FrameAssembler.header`, which checks the sum and the size."""
    return FRAME_ID.from_pb(message.id), _TENSORS.from_pb(message.tensors), message.nbytes


def frame_limit(spec: RunSpec) -> int:
    """Largest payload in bytes of a frame of this run: one uncompressed fp32 microbatch with its ids."""
    positions = spec.inner.microbatch_size * (spec.model.context + 1)
    return positions * (4 * spec.model.width + 4) + 1024


def chunks(frame: Frame) -> Iterator[memoryview]:
    """The payload of `frame` in pieces of at most CHUNK_BYTES, without copying."""
    view = memoryview(frame.payload)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class FrameAssembler:
    """Builds frames from one stream of headers and chunks.

    Args:
        max_bytes: largest payload that a header may announce.

    Raises (from every method): HetnodeError FRAME_CORRUPT or FRAME_TOO_LARGE; the stream is then unusable.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._header: tuple[FrameId, tuple[TensorHeader, ...], int] | None = None
        self._parts: list[bytes | memoryview] = []
        self._received = 0

    def header(self, frame_id: FrameId, tensors: tuple[TensorHeader, ...], nbytes: int) -> Frame | None:
        """Begin a frame. Returns it at once when it has no payload."""
        if self._header is not None:
            raise _corrupt("a frame begins before the previous one is complete")
        if nbytes > self._max_bytes:
            raise HetnodeError(
                ErrorCode.FRAME_TOO_LARGE,
                f"A neighbour announced a frame of {nbytes} bytes; this run allows {self._max_bytes}.",
                "Update the older program of the two ends.",
            )
        if len(tensors) > MAX_TENSORS:
            raise _corrupt(f"it holds {len(tensors)} tensors, more than {MAX_TENSORS}")
        if sum(tensor.nbytes for tensor in tensors) != nbytes:
            raise _corrupt(f"its tensors do not add up to the {nbytes} bytes that it announces")
        if nbytes == 0:
            return Frame(frame_id, tensors, b"")
        self._header = (frame_id, tensors, nbytes)
        return None

    def chunk(self, data: bytes | memoryview) -> Frame | None:
        """Add the next chunk, without copying. Returns the frame when it is complete, None before."""
        if self._header is None:
            raise _corrupt("a chunk arrives outside of a frame")
        frame_id, tensors, nbytes = self._header
        if len(data) != min(CHUNK_BYTES, nbytes - self._received):
            raise _corrupt(f"a chunk has {len(data)} bytes, which is not its share of the {nbytes} announced")
        self._received += len(data)
        self._parts.append(data)
        if self._received < nbytes:
            return None
        payload = b"".join(self._parts)  # the only copy
        self._header, self._parts, self._received = None, [], 0
        return Frame(frame_id, tensors, payload)


def _corrupt(why: str) -> HetnodeError:
    cause = f"A neighbour sent a frame that cannot be used: {why}."
    remedy = "The stream is closed; update the older program of the two ends."
    return HetnodeError(ErrorCode.FRAME_CORRUPT, cause, remedy)
