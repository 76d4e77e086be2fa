"""The streams by which peers call an averager: real libp2p daemons, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from node.hive.access import limit_messages
from node.hive.payload_peer import PayloadPeer
from node.hive.stream_calls import CHUNK_BOUNDS, REQUEST_BOUNDS, STREAMS_OF_ONE
from node.transport.allow_list import AllowList
from node.transport.payload_store import PayloadStore
from protocol.pb.payload_pb2 import StateRequest

PATIENT = 30.0
PREFIX = "run-stage-0::PayloadPeer"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Callers:
    """A member and a stranger, both connected to an averager."""

    member: P2P
    stranger: P2P
    averager: P2P

    async def open(self, caller: P2P, call: str) -> Ends:
        _, reader, writer = await caller.call_binary_stream_handler(self.averager.peer_id, f"{PREFIX}.{call}")
        return reader, writer


@pytest.fixture
async def callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callers]:
    monkeypatch.setattr(P2P, "receive_raw_data", P2P.receive_raw_data)  # put back at the end
    limit_messages()
    async with AsyncExitStack() as stack:
        averager = await P2P.create(nat_port_map=False)
        stack.push_async_callback(averager.shutdown)
        peers = []
        for _ in range(2):
            peers.append(await P2P.create(await averager.get_visible_maddrs(), nat_port_map=False))
            stack.push_async_callback(peers[-1].shutdown)
        member, stranger = peers
        served = PayloadPeer(averager, "run", 0, 1000, PayloadStore(tmp_path, 4), tmp_path)
        await served.serve(AllowList([member.peer_id.to_base58()]))
        yield Callers(member, stranger, averager)


def began(nbytes: int) -> bytes:
    """The begin of a message that says that it has so many bytes."""
    return P2P.MESSAGE_MARKER + nbytes.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the stream is closed."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENT)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("call", ["rpc_fetch", "rpc_push", "rpc_state"])
async def test_a_stranger_is_refused_before_anything_of_it_is_read(callers: Callers, call: str) -> None:
    reader, writer = await callers.open(callers.stranger, call)
    assert b"not in the plan" in await rest(reader)
    writer.close()


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("rpc_fetch", REQUEST_BOUNDS.nbytes),
        ("rpc_state", REQUEST_BOUNDS.nbytes),
        ("rpc_push", CHUNK_BOUNDS.nbytes),
    ],
)
async def test_a_message_above_the_bound_of_its_call_is_closed_unread(
    callers: Callers, call: str, most: int
) -> None:
    reader, writer = await callers.open(callers.member, call)
    writer.write(began(most + 1))
    assert await rest(reader) == b""
    writer.close()


async def test_unfinished_calls_of_a_member_take_no_more_than_their_places(callers: Callers) -> None:
    held = [await callers.open(callers.member, "rpc_state") for _ in range(STREAMS_OF_ONE)]
    for _, writer in held:
        writer.write(began(1000))
    reader, writer = await callers.open(callers.member, "rpc_state")
    assert await rest(reader) == b""
    writer.close()
    for _, each in held:
        each.close()


async def test_a_member_is_answered(callers: Callers) -> None:
    stub = PayloadPeer.get_stub(callers.member, callers.averager.peer_id, namespace="run-stage-0")
    answers = await stub.rpc_state(StateRequest(stage=0, part="stage", round=1))
    assert "no such checkpoint" in (await asyncio.wait_for(anext(answers), PATIENT)).refusal
