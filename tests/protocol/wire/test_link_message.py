"""Messages of a link: the same bytes as protobuf's, and no bytes that could surprise their receiver."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protocol.pb import hetnode_pb2 as pb
from protocol.wire.link_message import LinkMessage

HEADER = pb.FrameHeader(
    id=pb.FrameId(epoch=1, round=2, kind="forward"),
    tensors=[pb.TensorHeader(name="x", dtype="f32", shape=[2])],
    nbytes=8,
)
HELLO = pb.Hello(protocol_version=1, run="run", peer="peer")
SHAPES = [(None, None), (HELLO, None), (None, HEADER), (None, pb.FrameHeader())]


def as_protobuf(message: LinkMessage) -> bytes:
    known = pb.LinkMessage(hello=message.hello, header=message.header)
    if message.chunk is not None:
        known.chunk = bytes(message.chunk)
    return known.SerializeToString()


@pytest.mark.parametrize("size", [None, 0, 1, 127, 128, 16383, 16384, 1 << 20])
@pytest.mark.parametrize(("hello", "header"), SHAPES)
def test_a_message_has_the_bytes_that_protobuf_gives_it_and_comes_back_from_them(
    hello: pb.Hello | None, header: pb.FrameHeader | None, size: int | None
) -> None:
    chunk = None if size is None else memoryview(bytes(range(256)) * 4096)[:size]
    message = LinkMessage(hello, header, chunk)
    data = message.to_bytes()
    assert data == as_protobuf(message)
    assert LinkMessage.from_bytes(data) == message


def test_a_chunk_is_found_without_a_copy() -> None:
    data = LinkMessage(header=HEADER, chunk=b"chunk").to_bytes()
    chunk = LinkMessage.from_bytes(data).chunk
    assert isinstance(chunk, memoryview)
    assert chunk.obj is data


WHOLE = LinkMessage(header=HEADER, chunk=b"chunk").to_bytes()
ALONE = LinkMessage(chunk=b"chunk").to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        WHOLE[:-1],
        WHOLE + b"\0",
        WHOLE + ALONE,
        ALONE + LinkMessage(header=HEADER).to_bytes(),
        LinkMessage(hello=HELLO).to_bytes() + LinkMessage(header=HEADER).to_bytes(),
        2 * LinkMessage(header=HEADER).to_bytes(),
        b"\x22\x01x",  # a field that no message of a link has
        b"\x1a",
        b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x12\xff\xff\xff\x7f",
        b"\x12\x01\xff",
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        LinkMessage.from_bytes(data)


@given(st.binary(max_size=60) | st.lists(st.sampled_from([WHOLE, ALONE, b"\x12", b"\x0a\0"])).map(b"".join))
def test_any_bytes_give_what_protobuf_reads_in_them_or_the_one_error(data: bytes) -> None:
    try:
        message = LinkMessage.from_bytes(data)
    except DecodeError:
        return
    read = pb.LinkMessage.FromString(data)
    assert message.hello == (read.hello if read.HasField("hello") else None)
    assert message.header == (read.header if read.HasField("header") else None)
    assert message.chunk == (read.chunk if read.HasField("chunk") else None)
