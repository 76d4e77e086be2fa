"""The begin of calls: who is let in, and how long a call may be without its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.calls import CallInterceptor, CallPolicy
from protocol.server.limits import FairShare
from tests.support.coordinator_process import refusal_of
from tests.support.hostile import half_open

LEAVE, WATCH = "/hetnode.v1.Coordinator/Leave", "/hetnode.v1.Coordinator/Watch"
log = logging.getLogger(__name__)


class Stopping(Exception):
    pass


class Service(pb_grpc.CoordinatorServicer):
    """Leave answers at once, Watch once and then never, Probe never."""

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        if request.reason == "stopping":
            raise Stopping
        if request.reason:
            raise HetnodeError(ErrorCode.UNKNOWN_PEER, request.reason, "Do that.")
        return pb.LeaveReply()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.PlanUpdate]:
        yield pb.PlanUpdate(round=7)
        await asyncio.Event().wait()

    async def Probe(self, requests: AsyncIterator[pb.ProbeMessage], context: Any) -> None:
        await asyncio.Event().wait()


class Gate:
    """A server whose callers say who they are, in the metadata of the call."""

    def __init__(self) -> None:
        self.calls = FairShare(each=3, total=100)
        self.banned = set[str]()
        self.seconds = 60.0
        self.dropped: list[str] = []
        self.address = ""

    def server(self) -> grpc.aio.Server:
        admission = CallPolicy(
            caller_of,
            str,
            self.dropped.append,
            self.check,
            self.calls,
            Stopping,
            log,
            first_message_seconds=self.seconds,
        )
        server = grpc.aio.server(interceptors=(CallInterceptor(admission),))
        pb_grpc.add_CoordinatorServicer_to_server(Service(), server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        return server

    def check(self, context: Any) -> None:
        if caller_of(context) in self.banned:
            raise HetnodeError(ErrorCode.BANNED, "It is banned.", "")


def caller_of(context: Any) -> str:
    return dict(context.invocation_metadata()).get("user-agent", "").partition(" ")[0]


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    server = gate.server()
    await server.start()
    yield gate
    await server.stop(0)


def channel_of(gate: Gate, who: str) -> grpc.aio.Channel:
    options = [("grpc.primary_user_agent", who), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(gate.address, options=options)


async def first_of(tasks: list[asyncio.Task[HetnodeError]], count: int) -> list[HetnodeError]:
    """The results of the `count` tasks that are done first."""
    order = asyncio.as_completed(tasks)
    return [await next(order) for _ in range(count)]


async def until_taken(gate: Gate, places: int) -> None:
    while len(gate.calls) != places:  # noqa: ASYNC110  places have no event to wait for
        await asyncio.sleep(0)


async def test_calls_of_every_kind_are_answered(gate: Gate) -> None:
    async with channel_of(gate, "honest") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        assert await stub.Leave(pb.LeaveRequest()) == pb.LeaveReply()
        watch = stub.Watch(pb.WatchRequest())
        assert (await watch.read()).round == 7
        assert len(gate.calls) == 1
        watch.cancel()
        await until_taken(gate, 0)


async def test_an_error_of_the_service_is_the_error_of_the_call(gate: Gate) -> None:
    async with channel_of(gate, "honest") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        assert (await refusal_of(stub.Leave(pb.LeaveRequest(reason="why")))).cause == "why"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Leave(pb.LeaveRequest(reason="stopping"))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await until_taken(gate, 0)


@pytest.mark.parametrize("method", [LEAVE, WATCH])
async def test_calls_without_a_request_take_the_places_of_their_caller_alone(gate: Gate, method: str) -> None:
    async with channel_of(gate, "hoarder") as channel, channel_of(gate, "honest") as other:
        calls = half_open(channel, method, 10)
        refusals = [asyncio.create_task(refusal_of(call)) for call in calls]
        for refused in await first_of(refusals, 7):
            assert refused.code is ErrorCode.RATE_LIMITED
        assert len(gate.calls) == 3
        assert await pb_grpc.CoordinatorStub(other).Leave(pb.LeaveRequest()) == pb.LeaveReply()
        for task in refusals:
            task.cancel()
        for call in calls:
            call.cancel()
        await until_taken(gate, 0)


async def test_a_request_that_does_not_come_in_time_ends_the_call_and_may_be_repeated() -> None:
    """So it goes to a node that was suspended, or whose line stood still: no program is too old."""
    gate = Gate()
    gate.seconds = 0.1
    server = gate.server()
    await server.start()
    async with channel_of(gate, "silent") as channel:
        (call,) = half_open(channel, LEAVE, 1)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert LEAVE in str(ended.value.details())
        await until_taken(gate, 0)
    await server.stop(0)


async def test_a_call_that_ends_without_a_request_is_refused(gate: Gate) -> None:
    async with channel_of(gate, "empty") as channel:
        (call,) = half_open(channel, LEAVE, 1)
        await call.done_writing()
        assert (await refusal_of(call)).code is ErrorCode.BAD_REQUEST


async def test_the_excluded_are_refused_before_they_have_said_anything(gate: Gate) -> None:
    gate.banned.add("banned")
    async with channel_of(gate, "banned") as channel:
        for call in (*half_open(channel, LEAVE, 5), channel.stream_stream(f"{LEAVE[:-5]}Probe")()):
            code = await call.code()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert len(gate.calls) == 0


async def test_bytes_that_are_no_message_are_refused_and_logged(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with channel_of(gate, "liar") as channel:
        for method in (channel.unary_unary(LEAVE), channel.unary_stream(WATCH)):
            call = method(b"\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "refused liar at" in caplog.text
    assert "Traceback" not in caplog.text
