"""Whose bytes come first on the one connection between two peers: requests, and then payloads."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from node.hive import payload_peer
from node.hive.payload_peer import PayloadPeer
from node.security.identity import open_identity
from node.transport import payload_exchange
from node.transport.checkpoint_transfer import CheckpointServer
from node.transport.payload_store import PayloadStore
from node.transport.transfer import RANGES
from protocol.pb.payload_pb2 import PayloadChunk, RangeRequest
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.convert.payloads import descriptor_to_pb

PAYLOAD, OTHER = bytes(1000), bytes(999)


@dataclass(frozen=True)
class Bench:
    """A peer, the one who asks it, and the payloads of both."""

    peer: PayloadPeer
    p2p: Any
    mine: PayloadDescriptor
    theirs: PayloadDescriptor

    def answer(self, wanted: PayloadDescriptor) -> asyncio.Task[bytes | str]:
        """What the groupmate is told when it asks for `wanted`."""

        async def ask() -> bytes | str:
            context: Any = SimpleNamespace(remote_id=PeerID.from_base58(self.theirs.owner))
            data = b""
            async for chunk in self.peer.rpc_fetch(descriptor_to_pb(wanted), context):
                if chunk.refusal:
                    return chunk.refusal
                data += chunk.data
                if len(data) == wanted.nbytes:
                    break  # as every receiver does
            return data

        return asyncio.create_task(ask())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(payload_exchange, "TURN_SECONDS", 60.0)  # no test may pass because time did
    me, other = (open_identity(tmp_path / f"{name}.key").peer for name in ("me", "other"))
    p2p: Any = SimpleNamespace(peer_id=PeerID.from_base58(me))
    store = PayloadStore(tmp_path / "payloads", 4)
    peer = PayloadPeer(p2p, "run", 0, len(PAYLOAD), store, CheckpointServer(tmp_path / "checkpoints"))
    return Bench(peer, p2p, describe(me, PAYLOAD), describe(other, OTHER))


def describe(owner: PeerId, payload: bytes) -> PayloadDescriptor:
    sha256 = hashlib.sha256(payload).hexdigest()
    return PayloadDescriptor("run", 0, 5, owner, "anchor", "codec", 1.0, len(payload), sha256)


async def pass_turns(until: Callable[[], bool] = lambda: False) -> None:
    """Let the other tasks run, as far as they can without a thread or a clock."""
    for _ in range(100):
        if until():
            return
        await asyncio.sleep(0)


async def test_an_early_request_is_answered_after_this_peer_has_asked_too(
    bench: Bench,
) -> None:
    order: list[str] = []
    may_dial = asyncio.Event()

    async def call(*_: object) -> object:
        await may_dial.wait()
        if "asked" in order:
            await asyncio.Event().wait()  # a later attempt
        order.append("asked")
        raise ConnectionError("the request has been sent, which is enough here")

    bench.p2p.iterate_protobuf_handler = call
    answer = bench.answer(bench.mine)  # before this peer knows of the group
    answer.add_done_callback(lambda _: order.append("answered"))
    await pass_turns(answer.done)
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(bench.mine, PAYLOAD)
        gathering = asyncio.create_task(
            bench.peer.payloads.gather(bench.mine, [bench.theirs], 60.0, push=False)
        )
        await pass_turns(answer.done)
        assert order == []
        may_dial.set()
        assert await answer == PAYLOAD
        assert order == ["asked", "answered"]
        bench.peer.payloads.break_off()
        await gathering


async def test_a_payload_that_is_held_already_is_not_requested(bench: Bench) -> None:
    answer = bench.answer(bench.mine)
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(bench.mine, PAYLOAD)
        await bench.peer.payloads.hold(bench.theirs, OTHER)
        assert await bench.peer.payloads.gather(bench.mine, [bench.theirs], 60.0, push=False) == {}
        assert await answer == PAYLOAD


async def test_requests_do_not_wait_after_a_failed_exchange(bench: Bench) -> None:
    answer = bench.answer(bench.mine)
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(bench.mine, PAYLOAD)
        await pass_turns(answer.done)
        assert not answer.done()
    assert await answer == PAYLOAD


async def test_requests_for_other_payloads_are_answered_at_once(bench: Bench) -> None:
    other, older = bench.theirs, replace(bench.mine, round_number=4)
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(older, PAYLOAD)
        assert await bench.answer(older) == PAYLOAD
        assert "does not hold" in str(await bench.answer(other))
        assert "does not hold" in str(await bench.answer(replace(bench.mine, round_number=3)))


async def test_each_peer_has_a_bounded_number_of_waiting_requests(bench: Bench) -> None:
    waiting = [
        bench.answer(replace(bench.mine, round_number=round_number, sha256=f"{round_number:064x}"))
        for round_number in range(6, 6 + payload_exchange.WAITING_PER_PEER)
    ]
    await pass_turns()
    assert "does not hold" in str(await bench.answer(replace(bench.mine, round_number=100)))
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()


async def test_a_stream_stays_open_until_its_receiver_has_closed_it(bench: Bench) -> None:
    await bench.peer.payloads.hold(bench.mine, PAYLOAD)
    context: Any = SimpleNamespace(remote_id=PeerID.from_base58(bench.theirs.owner))
    stream = bench.peer.rpc_fetch(descriptor_to_pb(bench.mine), context)
    received = 0
    while received < len(PAYLOAD):
        received += len((await anext(stream)).data)
    ending = asyncio.create_task(anext(stream))
    await pass_turns(ending.done)
    assert not ending.done()
    ending.cancel()  # what hivemind does to it then
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert await bench.answer(bench.mine) == PAYLOAD


async def test_the_wait_of_a_request_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_exchange, "TURN_SECONDS", 0.01)
    assert "does not hold" in str(await bench.answer(bench.mine))


async def test_a_push_that_announces_nothing_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_peer, "DIAL_SECONDS", 0.01)
    context: Any = SimpleNamespace(remote_id=PeerID.from_base58(bench.theirs.owner))

    async def silent(is_open: bool) -> AsyncIterator[PayloadChunk]:
        if is_open:
            await asyncio.Event().wait()
        for never in ():
            yield never

    for is_open in (True, False):
        assert "announces" in (await bench.peer.rpc_push(silent(is_open), context)).refusal


class Wire:
    """Hands the calls of a peer to another one. `fails` for calls of this name: it does not know them."""

    def __init__(self, caller: PeerId, to: PayloadPeer, fails: str = "") -> None:
        self.calls: list[str] = []
        self._context: Any = SimpleNamespace(remote_id=PeerID.from_base58(caller))
        self._to, self._fails = to, fails

    async def iterate_protobuf_handler(self, _: object, name: str, request: Any, *__: object) -> Any:
        call = name.rpartition(".")[2]
        self.calls.append(call)
        if call == self._fails:
            raise ControlFailure("protocols not supported")
        return getattr(self._to, call)(request, self._context)


@pytest.mark.parametrize(
    ("fails", "calls"),
    [("", RANGES * ["rpc_fetch_range"]), ("rpc_fetch_range", ["rpc_fetch_range", "rpc_fetch"])],
)
async def test_one_of_two_members_fetches_a_large_payload_by_several_streams(
    tmp_path: Path, bench: Bench, fails: str, calls: list[str]
) -> None:
    payload = os.urandom((1 << 20) + 3)
    theirs = describe(bench.theirs.owner, payload)
    p2p: Any = SimpleNamespace(peer_id=PeerID.from_base58(theirs.owner))
    store = PayloadStore(tmp_path / "theirs", 4)
    sender = PayloadPeer(p2p, "run", 0, len(payload), store, CheckpointServer(tmp_path / "checkpoints"))
    await sender.payloads.hold(theirs, payload)
    wire = Wire(bench.mine.owner, sender, fails)
    bench.p2p.iterate_protobuf_handler = wire.iterate_protobuf_handler
    await bench.peer.payloads.hold(bench.mine, PAYLOAD)
    with bench.peer.payloads.exchange(5):
        assert await bench.peer.payloads.gather(bench.mine, [theirs], 60.0, push=False) == {}
    assert bench.peer.payloads.store.get(5, theirs.sha256) == payload
    assert wire.calls == calls


async def test_ranges_of_other_bytes_are_a_fault_of_their_sender(tmp_path: Path, bench: Bench) -> None:
    payload = os.urandom(1 << 20)
    theirs = describe(bench.theirs.owner, payload)
    store, checkpoints = PayloadStore(tmp_path / "theirs", 4), CheckpointServer(tmp_path / "checkpoints")
    sender = PayloadPeer(bench.p2p, "run", 0, len(payload), store, checkpoints)

    async def pieces(*_: object) -> AsyncIterator[bytes]:
        async def wrong() -> AsyncIterator[bytes]:
            yield bytes(len(payload))

        return wrong()

    sender.payloads.pieces = pieces  # type: ignore[method-assign]
    wire = Wire(bench.mine.owner, sender)
    bench.p2p.iterate_protobuf_handler = wire.iterate_protobuf_handler
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(bench.mine, PAYLOAD)
        faults = await bench.peer.payloads.gather(bench.mine, [theirs], 1.0, push=False)
    assert theirs.owner in faults


async def test_a_request_for_no_bytes_ends_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def linger() -> None:
        raise AssertionError("nothing was sent that could be lost")

    monkeypatch.setattr(payload_peer, "linger", linger)
    context: Any = SimpleNamespace(remote_id=PeerID.from_base58(bench.theirs.owner))
    with bench.peer.payloads.exchange(5):
        await bench.peer.payloads.hold(bench.mine, PAYLOAD)
    request = RangeRequest(descriptor=descriptor_to_pb(bench.mine), first=2, nbytes=0)
    assert [chunk async for chunk in bench.peer.rpc_fetch_range(request, context)] == []
