"""What a token costs on a link: the bytes of the messages that it writes, counted as they are serialized."""

from __future__ import annotations

import asyncio

import pytest
import torch

from coordinator.placement.cost_model import message_bytes
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.live_estimates import LEAST_FRAME_BYTES
from protocol.codec.activation import pack_activation, pack_ids
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import DType, Frame, FrameId, FrameKind, PeerId, TensorHeader
from protocol.wire.framing import CHUNK_BYTES
from protocol.wire.link_message import LinkMessage

LONGEST_ID = FrameId(2**31, 2**31, 2**20, 2**20, FrameKind.BACKWARD)


async def written(frames: list[Frame]) -> list[LinkMessage]:
    """All messages of a link that sends `frames`."""
    messages: list[LinkMessage] = []

    async def write(message: LinkMessage) -> None:
        messages.append(message)

    async def read() -> LinkMessage:
        return await asyncio.get_running_loop().create_future()

    link = LiveLink(LinkMember("run", "hash", PeerId("peer"), 0, 1), read, write, LinkLimits(2**24, 1))
    for frame in frames:
        await link.send(frame, 10)
    await link.close()
    return messages


def spec_of(dtype: str) -> RunSpec:
    overrides = {"link.dtype": dtype, "model.vocabulary": 300, "model.context": 256, "model.width": 512}
    return resolve("tiny", overrides=overrides)


@pytest.mark.parametrize("k", [8, 64, 512])
@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [
        ("bf16", lambda k: 2 * k),
        ("dither5", lambda k: 5 * k // 8 + 1),
    ],
)
async def test_a_token_costs_its_numbers_and_framing_below_one_percent(
    dtype, bytes_per_token, k: int
) -> None:
    spec = spec_of(dtype)
    b, length = spec.inner.microbatch_size, spec.model.context
    ids, id_data = pack_ids("tokens", torch.zeros((b, length + 1), dtype=torch.long), spec.model.vocabulary)
    activation, data = pack_activation("activation", torch.zeros(b, length, k), dtype)
    assert len(data) == b * length * bytes_per_token(k)
    assert message_bytes(spec, k) == (len(data) + len(id_data), len(data))

    forward = Frame(LONGEST_ID, (*activation, *ids), data + id_data)
    backward = Frame(LONGEST_ID, activation, data)
    messages = await written([forward, backward])
    assert sum(len(message.chunk or b"") for message in messages) == 2 * len(data) + len(id_data)
    framing = sum(len(message.to_bytes()) - len(message.chunk or b"") for message in messages)
    assert framing < 400
    if len(data) >= 1 << 16:
        assert framing < 0.01 * 2 * len(data)


@pytest.mark.parametrize("size", [LEAST_FRAME_BYTES, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("tensors", [1, 3])
async def test_no_frame_of_64_kib_or_more_has_one_percent_of_framing(size: int, tensors: int) -> None:
    """Timed or not: the first of these has its header in a message of its own."""
    headers = (
        *(TensorHeader(f"a.rather.long.name.{i}", DType.U8, (1,)) for i in range(tensors - 1)),
        TensorHeader("activation", DType.U8, (size - tensors + 1,)),
    )
    messages = await written([Frame(LONGEST_ID, headers, bytes(size))] * 2)
    starts = [i for i, message in enumerate(messages) if message.header is not None]
    for frame in (messages[: starts[1]], messages[starts[1] :]):
        assert sum(len(message.to_bytes()) for message in frame) < 1.01 * size


async def test_bytes_sent_counts_the_bytes_that_were_written() -> None:
    frame = Frame(
        LONGEST_ID, (TensorHeader("activation", DType.U8, (2 * CHUNK_BYTES,)),), bytes(2 * CHUNK_BYTES)
    )
    messages: list[int] = []

    async def write(message: LinkMessage) -> None:
        messages.append(len(message.to_bytes()))

    async def read() -> LinkMessage:
        return await asyncio.get_running_loop().create_future()

    link = LiveLink(LinkMember("run", "hash", PeerId("peer"), 0, 1), read, write, LinkLimits(2**24, 1))
    await link.send(frame, 10)
    await link.close()
    envelopes = 16  # the keys and lengths of headers and chunks
    assert 0 <= sum(messages) - link.bytes_sent <= envelopes
