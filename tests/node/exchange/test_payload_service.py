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

from node.checkpoint.transfer import CheckpointServer
from node.exchange import payload_exchange, payload_service
from node.exchange.payload_service import PayloadService, Wanted
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import RANGES
from node.security.identity import open_identity
from protocol.pb.payload_pb2 import PayloadChunk, RangeRequest
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.convert.payloads import descriptor_to_pb

PAYLOAD, OTHER = bytes(1000), bytes(999)


@dataclass(frozen=True)
class Bench:
    """A service, its calls, and the payloads of its peer and of the one who asks."""

    service: PayloadService
    calls: Any
    mine: PayloadDescriptor
    theirs: PayloadDescriptor

    def answer(self, wanted: PayloadDescriptor) -> asyncio.Task[bytes | str]:
        """What the groupmate is told when it asks for `wanted`."""

        async def ask() -> bytes | str:
            data = b""
            async for chunk in self.service.answer(self.theirs.owner, descriptor_to_pb(wanted)):
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
    calls: Any = SimpleNamespace()
    service = service_of(me, len(PAYLOAD), tmp_path / "mine", calls)
    return Bench(service, calls, describe(me, PAYLOAD), describe(other, OTHER))


def service_of(me: PeerId, capacity: int, folder: Path, calls: Any = None) -> PayloadService:
    return PayloadService(me, 0, capacity, PayloadStore(folder, 4), CheckpointServer(folder), calls)


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

    bench.calls.ask = call
    answer = bench.answer(bench.mine)  # before this peer knows of the group
    answer.add_done_callback(lambda _: order.append("answered"))
    await pass_turns(answer.done)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(bench.mine, PAYLOAD)
        gathering = asyncio.create_task(
            bench.service.payloads.gather(bench.mine, [bench.theirs], 60.0, push=False)
        )
        await pass_turns(answer.done)
        assert order == []
        may_dial.set()
        assert await answer == PAYLOAD
        assert order == ["asked", "answered"]
        bench.service.payloads.break_off()
        await gathering


async def test_a_payload_that_is_held_already_is_not_requested(bench: Bench) -> None:
    answer = bench.answer(bench.mine)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(bench.mine, PAYLOAD)
        await bench.service.payloads.hold(bench.theirs, OTHER)
        assert await bench.service.payloads.gather(bench.mine, [bench.theirs], 60.0, push=False) == {}
        assert await answer == PAYLOAD


async def test_requests_do_not_wait_after_a_failed_exchange(bench: Bench) -> None:
    answer = bench.answer(bench.mine)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(bench.mine, PAYLOAD)
        await pass_turns(answer.done)
        assert not answer.done()
    assert await answer == PAYLOAD


async def test_requests_for_other_payloads_are_answered_at_once(bench: Bench) -> None:
    other, older = bench.theirs, replace(bench.mine, round_number=4)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(older, PAYLOAD)
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
    await bench.service.payloads.hold(bench.mine, PAYLOAD)
    stream = bench.service.answer(bench.theirs.owner, descriptor_to_pb(bench.mine))
    received = 0
    while received < len(PAYLOAD):
        received += len((await anext(stream)).data)
    ending = asyncio.create_task(anext(stream))
    await pass_turns(ending.done)
    assert not ending.done()
    ending.cancel()  # as a transport does then
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert await bench.answer(bench.mine) == PAYLOAD


async def test_the_wait_of_a_request_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_exchange, "TURN_SECONDS", 0.01)
    assert "does not hold" in str(await bench.answer(bench.mine))


async def test_a_push_that_announces_nothing_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_service, "DIAL_SECONDS", 0.01)

    async def silent(is_open: bool) -> AsyncIterator[PayloadChunk]:
        if is_open:
            await asyncio.Event().wait()
        for never in ():
            yield never

    for is_open in (True, False):
        assert "announces" in (await bench.service.take_push(bench.theirs.owner, silent(is_open))).refusal


def wired(bench: Bench, to: PayloadService) -> list[str]:
    """Hand the calls of the bench's service to `to`. Returns what they ask for, as it grows."""
    asked: list[str] = []

    async def ask(_: str, __: int, wanted: Wanted) -> Any:
        asked.append(type(wanted).__name__)
        return to.answer(bench.mine.owner, wanted)

    bench.calls.ask = ask
    return asked


async def test_one_of_two_members_fetches_a_large_payload_by_several_streams(
    tmp_path: Path, bench: Bench
) -> None:
    payload = os.urandom((1 << 20) + 3)
    theirs = describe(bench.theirs.owner, payload)
    sender = service_of(theirs.owner, len(payload), tmp_path / "theirs")
    await sender.payloads.hold(theirs, payload)
    asked = wired(bench, sender)
    await bench.service.payloads.hold(bench.mine, PAYLOAD)
    with bench.service.payloads.exchange(5):
        assert await bench.service.payloads.gather(bench.mine, [theirs], 60.0, push=False) == {}
    assert bench.service.payloads.store.get(5, theirs.sha256) == payload
    assert asked == RANGES * ["RangeRequest"]


async def test_ranges_of_other_bytes_are_a_fault_of_their_sender(tmp_path: Path, bench: Bench) -> None:
    payload = os.urandom(1 << 20)
    theirs = describe(bench.theirs.owner, payload)
    sender = service_of(bench.mine.owner, len(payload), tmp_path / "theirs")  # it has no turn to wait for

    async def pieces(*_: object) -> AsyncIterator[bytes]:
        async def wrong() -> AsyncIterator[bytes]:
            yield bytes(len(payload))

        return wrong()

    sender.payloads.pieces = pieces  # type: ignore[method-assign]
    wired(bench, sender)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(bench.mine, PAYLOAD)
        faults = await bench.service.payloads.gather(bench.mine, [theirs], 1.0, push=False)
    assert theirs.owner in faults


async def test_a_request_for_no_bytes_ends_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def linger() -> None:
        raise AssertionError("nothing was sent that could be lost")

    monkeypatch.setattr(payload_service, "linger", linger)
    with bench.service.payloads.exchange(5):
        await bench.service.payloads.hold(bench.mine, PAYLOAD)
    request = RangeRequest(descriptor=descriptor_to_pb(bench.mine), first=2, nbytes=0)
    assert [chunk async for chunk in bench.service.answer(bench.theirs.owner, request)] == []
