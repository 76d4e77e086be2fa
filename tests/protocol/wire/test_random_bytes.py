"""Random bytes, and valid messages with damage, at every call of the coordinator: it refuses and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.pb import hetnode_pb2 as pb
from protocol.pb import operator_pb2
from protocol.types import PROTOCOL_VERSION
from protocol.wire.convert.payloads import descriptor_to_pb
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import Running, channel_to, running

A, B = keyed(0), keyed(1)
SECONDS = 1.0
"""Calls that wait, as Watch does, are given up after so long."""
MOST_GROWTH = 200 << 20
CALLS = [
    (service, method.name)
    for messages, service in ((pb, "Coordinator"), (operator_pb2, "Operator"), (pb, "Enrollment"))
    for method in messages.DESCRIPTOR.services_by_name[service].methods
]


class Target:
    """A coordinator whose run has started, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, coordinator: Running) -> None:
        self._runner, self.coordinator = runner, coordinator

    def call(
        self, who: Keyed | None, service: str, method: str, data: bytes, seconds: float = SECONDS
    ) -> grpc.StatusCode:
        return self._runner.run(self._call(who, service, method, data, seconds))

    async def _call(
        self, who: Keyed | None, service: str, method: str, data: bytes, seconds: float
    ) -> grpc.StatusCode:
        path = f"/hetnode.v1.{service}/{method}"
        if service == "Enrollment":
            pem = self.coordinator.authority.pem
            async with channel_to(self.coordinator.enrollment, pem, None) as channel:
                return await self._answer(channel.unary_unary(path)(data, timeout=seconds))
        channel = self.coordinator.channel(who)
        if method == "Watch":
            call = channel.unary_stream(path)(data, timeout=seconds)
            return await self._answer(call.read(), call)
        return await self._answer(channel.unary_unary(path)(data, timeout=seconds))

    @staticmethod
    async def _answer(answer: Any, call: Any = None) -> grpc.StatusCode:
        try:
            await answer
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            if call is not None:
                call.cancel()
        return grpc.StatusCode.OK

    def is_well(self) -> bool:
        return self._runner.run(self.coordinator.status()).phase == "training"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder: Path = tmp_path_factory.mktemp("coordinator")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> Running:
            coordinator = await stack.enter_async_context(running(spec_of(), folder))
            await coordinator.join(A)
            await coordinator.join(B)
            return coordinator

        coordinator = runner.run(start())
        try:
            yield Target(runner, coordinator)
        finally:
            runner.run(stack.aclose())


def valid(method: str, spec: Any) -> bytes:
    """A message that the call takes, as far as there is one, from which damage starts."""
    descriptor = descriptor_to_pb(A.payload(spec, 0, 1))
    message: Any = {
        "Match": pb.MatchRequest(peer=A.peer, descriptor=descriptor),
        "Report": pb.ReportRequest(
            peer=A.peer,
            round=1,
            held=[descriptor],
            rejected=[pb.Rejection(descriptor=descriptor, reason="because")],
        ),
        "Attest": pb.AttestRequest(peer=A.peer, round=1, part="stage", digest="0" * 64),
        "Join": pb.JoinRequest(protocol_version=PROTOCOL_VERSION, peer=A.peer, role="replica"),
    }.get(method, pb.HeartbeatRequest(peer=A.peer))
    data: bytes = message.SerializeToString()
    return data


@st.composite
def inputs(draw: st.DrawFn) -> tuple[str, str, bytes]:
    service, method = draw(st.sampled_from(CALLS))
    if draw(st.booleans()):
        return service, method, draw(st.binary(max_size=300))
    data = bytearray(valid(method, spec_of()))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return service, method, bytes(data[: draw(st.integers(0, len(data)))])


WAITS = {"Match", "Report", "AwaitDecision", "Watch"}


def test_no_bytes_of_a_member_end_the_coordinator_or_fill_its_memory(target: Target) -> None:
    before = psutil.Process().memory_info().rss
    seen = set()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(inputs())
    def attack(chosen: tuple[str, str, bytes]) -> None:
        service, method, data = chosen
        code = target.call(A, service, method, data)
        seen.add(method)
        assert code is not grpc.StatusCode.UNKNOWN, "an exception went through the call"
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or method in WAITS

    for service, method in CALLS:
        attack = example((service, method, b""))(attack)
    attack()
    assert seen == {method for _, method in CALLS}
    assert target.is_well()
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH


@pytest.mark.parametrize(("service", "method"), CALLS, ids=lambda value: value)
def test_more_than_the_limit_in_one_message_is_refused(target: Target, service: str, method: str) -> None:
    # 5 MB take longer than SECONDS on a busy machine.
    code = target.call(A, service, method, bytes(5 << 20), seconds=60)
    refusals = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED}
    if method == "Probe":  # gRPC ends the stream before its first message, which then is missing
        refusals.add(grpc.StatusCode.FAILED_PRECONDITION)
    assert code in refusals
    assert target.is_well()
