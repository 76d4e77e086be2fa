"""One gRPC message of a link. Its chunk is copied once when it is sent and never when it is received.

On the wire it is the protobuf message LinkMessage: at most one hello or header, then at most one chunk.
Protobuf writes and reads the first part alone; its own bytes field would copy the chunk again.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protocol.pb import hetnode_pb2 as pb

# A key is the field's number and wire type 2: a length follows, then that many bytes.
_HELLO_KEY, _HEADER_KEY, _CHUNK_KEY = (field.number << 3 | 2 for field in pb.LinkMessage.DESCRIPTOR.fields)
_LENGTH_BYTES = 4  # up to 256 MB, far above the limit of gRPC for a message of a link


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """A hello, a header, a chunk, or a header with the first chunk of its frame."""

    hello: pb.Hello | None = None
    header: pb.FrameHeader | None = None
    chunk: bytes | memoryview | None = None

    def to_bytes(self) -> bytes:
        start = pb.LinkMessage(hello=self.hello, header=self.header).SerializeToString()
        if self.chunk is None:
            return start
        return b"".join((start, bytes((_CHUNK_KEY,)), _length(len(self.chunk)), self.chunk))

    @classmethod
    def from_bytes(cls, data: bytes) -> LinkMessage:
        """The message; its chunk is a view of `data`. Raises DecodeError if `data` is not a message."""
        start, chunk = 0, None
        if data and data[0] in (_HELLO_KEY, _HEADER_KEY):
            _, start = _field(data, 0)
        if start < len(data):
            if data[start] != _CHUNK_KEY:
                raise DecodeError(f"field key {data[start]} where only a chunk may follow")
            begin, end = _field(data, start)
            if end != len(data):
                raise DecodeError("something follows the chunk")
            chunk = memoryview(data)[begin:]
        if not start:
            return cls(chunk=chunk)
        known = pb.LinkMessage.FromString(data[:start])
        if data[0] == _HELLO_KEY:
            return cls(hello=known.hello, chunk=chunk)
        return cls(header=known.header, chunk=chunk)


def _field(data: bytes, start: int) -> tuple[int, int]:
    """Begin and end of the content of the field at `start`. Raises DecodeError if `data` ends before it."""
    size = 0
    for i, byte in enumerate(data[start + 1 : start + 1 + _LENGTH_BYTES]):
        size |= (byte & 127) << 7 * i
        if byte < 128:
            begin = start + 2 + i
            if begin + size > len(data):
                break
            return begin, begin + size
    raise DecodeError("a field is longer than its message")


def _length(size: int) -> bytes:
    """`size` as a protobuf varint."""
    result = bytearray()
    while size > 127:
        result.append(size & 127 | 128)
        size >>= 7
    result.append(size)
    return bytes(result)
