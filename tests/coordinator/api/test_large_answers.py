"""Large answers: how many are sent at one moment, and who gives a place free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from coordinator.api.large_answers import LargeAnswers
from protocol.pb import hetnode_pb2 as pb

LARGE, SMALL = pb.MatchReply(packed=bytes(64 << 10)), pb.MatchReply(packed=bytes(100))
FOREVER = 3600.0


class Call:
    """The context of a call, which this test ends."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


async def _rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_large_answer_waits_until_a_call_before_it_has_ended() -> None:
    answers, calls = LargeAnswers(places=2, seconds=FOREVER), [Call() for _ in range(4)]
    waits = [asyncio.create_task(answers.wait_for_place(LARGE, call)) for call in calls]
    await _rest()
    assert [wait.done() for wait in waits] == [True, True, False, False]
    await answers.wait_for_place(SMALL, Call())  # not behind the large ones
    calls[1].end()
    await _rest()
    assert [wait.done() for wait in waits] == [True, True, True, False]
    waits[3].cancel()


async def test_a_caller_that_does_not_take_its_answer_gives_its_place_free() -> None:
    answers = LargeAnswers(places=1, seconds=0.01)
    await answers.wait_for_place(LARGE, Call())
    await answers.wait_for_place(LARGE, Call())  # the first call never ends


async def test_a_call_gives_its_place_free_once() -> None:
    answers, first = LargeAnswers(places=1, seconds=FOREVER), Call()
    await answers.wait_for_place(LARGE, first)
    first.end()
    first.end()
    await answers.wait_for_place(LARGE, Call())
    waiting = asyncio.create_task(answers.wait_for_place(LARGE, Call()))
    await _rest()
    assert not waiting.done()
    waiting.cancel()


async def test_a_cancelled_wait_takes_no_place() -> None:
    answers, first = LargeAnswers(places=1, seconds=FOREVER), Call()
    await answers.wait_for_place(LARGE, first)
    waiting = asyncio.create_task(answers.wait_for_place(LARGE, Call()))
    await _rest()
    waiting.cancel()
    first.end()
    await answers.wait_for_place(LARGE, Call())


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    """Calls of a real server whose answers are large, and have one place that no time gives free."""
    answers = LargeAnswers(places=1, seconds=FOREVER)

    async def answer(_: bytes, context: Any) -> pb.MatchReply:
        await answers.wait_for_place(LARGE, context)
        return LARGE

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer, response_serializer=pb.MatchReply.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Match": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_unary("/test/Match", response_deserializer=pb.MatchReply.FromString)
    finally:
        await server.stop(None)


async def test_grpc_gives_a_place_free_when_the_answer_is_sent(stub: Any) -> None:
    replies = await asyncio.gather(*(stub(b"") for _ in range(20)))
    assert all(reply == LARGE for reply in replies)
