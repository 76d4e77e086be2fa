"""The headers of frames on a link, to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ErrorCode
from protocol.pb import hetnode_pb2 as pb
from protocol.types import FrameId, TensorHeader
from protocol.wire.convert.fields import between, raises, several
from protocol.wire.convert.record import Record
from protocol.wire.framing import MAX_TENSORS

MAX_DIMENSIONS = 4
"""A tensor of no dimensions is a scalar."""

FRAME_ID = Record(FrameId, pb.FrameId, {}, code=ErrorCode.FRAME_CORRUPT)

TENSOR_HEADER = Record(
    TensorHeader,
    pb.TensorHeader,
    {"shape": several(between(1, 2**31 - 1), MAX_DIMENSIONS)},
    code=ErrorCode.FRAME_CORRUPT,
)
_TENSORS = several(TENSOR_HEADER, MAX_TENSORS)


def frame_header_to_pb(id: FrameId, tensors: Sequence[TensorHeader]) -> pb.FrameHeader:
    return pb.FrameHeader(
        id=FRAME_ID.to_pb(id),
        tensors=map(TENSOR_HEADER.to_pb, tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


@raises(ErrorCode.FRAME_CORRUPT)
def frame_header_from_pb(message: pb.FrameHeader) -> tuple[FrameId, tuple[TensorHeader, ...], int]:
    """The arguments of protocol.wire.framing.FrameAssembler.header, which checks the sum and the size."""
    return FRAME_ID.read(message.id), _TENSORS.read(message.tensors), message.nbytes
