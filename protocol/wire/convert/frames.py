"""The headers of frames on a link, to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.pb import hetnode_pb2 as pb
from protocol.types import DType, FrameId, FrameKind, TensorHeader
from protocol.wire.convert.fields import check_count, printable, raises_frame_corrupt
from protocol.wire.framing import MAX_TENSORS

MAX_DIMENSIONS = 4


def frame_id_to_pb(id: FrameId) -> pb.FrameId:
    return pb.FrameId(
        epoch=id.epoch,
        round=id.round_number,
        step=id.step,
        microbatch=id.microbatch,
        kind=id.kind.value,
    )


@raises_frame_corrupt
def frame_id_from_pb(message: pb.FrameId) -> FrameId:
    return FrameId(
        epoch=message.epoch,
        round_number=message.round,
        step=message.step,
        microbatch=message.microbatch,
        kind=FrameKind(message.kind),
    )


def tensor_header_to_pb(header: TensorHeader) -> pb.TensorHeader:
    return pb.TensorHeader(name=header.name, dtype=header.dtype.value, shape=header.shape)


@raises_frame_corrupt
def tensor_header_from_pb(message: pb.TensorHeader) -> TensorHeader:
    """A tensor of at most 4 dimensions of at least 1 each; () is a scalar."""
    check_count(message.shape, "dimensions", MAX_DIMENSIONS)
    if any(not 1 <= n < 2**31 for n in message.shape):
        raise ValueError(f"a tensor of shape {tuple(message.shape)}")
    return TensorHeader(
        printable(message.name, "the tensor's name"), DType(message.dtype), tuple(message.shape)
    )


def frame_header_to_pb(id: FrameId, tensors: Sequence[TensorHeader]) -> pb.FrameHeader:
    return pb.FrameHeader(
        id=frame_id_to_pb(id),
        tensors=map(tensor_header_to_pb, tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


@raises_frame_corrupt
def frame_header_from_pb(message: pb.FrameHeader) -> tuple[FrameId, tuple[TensorHeader, ...], int]:
    """The arguments of protocol.wire.framing.FrameAssembler.header, which checks the sum and the size."""
    check_count(message.tensors, "tensors in a frame", MAX_TENSORS)
    return frame_id_from_pb(message.id), tuple(map(tensor_header_from_pb, message.tensors)), message.nbytes
