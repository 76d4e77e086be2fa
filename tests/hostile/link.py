"""The dialling end of a link, from docs/protocol/pipeline.md alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tests.hostile import wire
from tests.hostile.peer import Peer, Refused
from tests.hostile.wire import message, method

CHUNK_BYTES = 1 << 20
Tensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype, shape, bytes."""


@dataclass(frozen=True)
class Frame:
    """One frame: the fields of its id, and its tensors by name."""

    kind: str
    round_number: int
    step: int
    microbatch: int
    tensors: dict[str, Tensor]

    @property
    def value(self) -> float:
        """Of a frame of one number."""
        return float(struct.unpack("<d", self.tensors["value"][3])[0])


def number(value: float) -> Sequence[Tensor]:
    return (("value", "f64", (), struct.pack("<d", value)),)


class Link:
    """A stream of frames to one neighbour. Open it with :meth:`dial`."""

    def __init__(self, channel: grpc.aio.Channel, stream: Any, epoch: int) -> None:
        self._channel, self._stream, self._epoch = channel, stream, epoch

    @classmethod
    async def dial(
        cls, peer: Peer, endpoint: str, neighbour: str, epoch: int, round_number: int, **place: Any
    ) -> Link:
        """`place`: this peer's `replica` and `position`. Raises Refused."""
        channel = peer.open(endpoint, wire.tls_name(neighbour))
        path, request, reply, *_ = method("StageLink", "Exchange")
        stream = channel.stream_stream(path, request.SerializeToString, reply.FromString)()
        hello = message("Hello")(
            protocol_version=wire.PROTOCOL_VERSION,
            run=peer.run,
            spec_hash=peer.spec_hash,
            peer=peer.id,
            epoch=epoch,
            round=round_number,
            **place,
        )
        link = cls(channel, stream, epoch)
        try:
            await link.write(message("LinkMessage")(hello=hello))
            answer = (await link.read()).hello
        except Refused:
            await channel.close()
            raise
        assert (answer.peer, answer.epoch, answer.round) == (neighbour, epoch, round_number)
        assert (answer.run, answer.spec_hash) == (peer.run, peer.spec_hash)
        return link

    async def send(
        self,
        kind: str,
        round_number: int,
        step: int,
        tensors: Sequence[Tensor],
        microbatch: int = 0,
        epoch: int | None = None,
    ) -> None:
        payload = b"".join(tensor[3] for tensor in tensors)
        header = message("FrameHeader")(
            id={
                "epoch": self._epoch if epoch is None else epoch,
                "round": round_number,
                "step": step,
                "microbatch": microbatch,
                "kind": kind,
            },
            tensors=[{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape, _ in tensors],
            nbytes=len(payload),
        )
        chunks = [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]
        await self.write(message("LinkMessage")(header=header, chunk=chunks[0] if chunks else None))
        for chunk in chunks[1:]:
            await self.write(message("LinkMessage")(chunk=chunk))

    async def receive(self) -> Frame:
        """The next frame. Raises Refused at the end of the stream."""
        first = await self.read()
        header, data = first.header, bytearray(first.chunk)
        while len(data) < header.nbytes:
            data += (await self.read()).chunk
        tensors, start = {}, 0
        sizes = {"f64": 8, "f32": 4, "bf16": 2, "i8": 1, "u8": 1, "u16": 2, "i32": 4}
        for each in header.tensors:
            size = sizes[each.dtype]
            for dimension in each.shape:
                size *= dimension
            tensors[each.name] = (each.name, each.dtype, tuple(each.shape), bytes(data[start : start + size]))
            start += size
        assert start == len(data) == header.nbytes
        assert header.id.epoch == self._epoch or header.id.round == 2**32 - 1
        return Frame(header.id.kind, header.id.round, header.id.step, header.id.microbatch, tensors)

    async def part(self) -> None:
        """Send the farewell and wait for the neighbour's."""
        await self.send("step", 2**32 - 1, 0, (), epoch=0)
        while (await self.receive()).round_number != 2**32 - 1:
            pass

    async def write(self, made: Any) -> None:
        try:
            await self._stream.write(made)
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None

    async def read(self) -> Any:
        try:
            found = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None
        assert found is not grpc.aio.EOF, "the neighbour has closed the stream"
        return found

    async def close(self) -> None:
        self._stream.cancel()
        await self._channel.close()
