"""Strangers, members and banned peers that try to stop a coordinator or to keep other peers out."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import grpc
import pytest

from protocol.pb import hetnode_pb2_grpc as pb_grpc
from tests.builders import keyed
from tests.hostile.target import HONEST_SOURCE, Target
from tests.support.coordinator_process import enroll_request
from tests.support.hostile import half_open, relay

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(900)]

HEARTBEAT, ENROLL = "/hetnode.v1.Coordinator/Heartbeat", "/hetnode.v1.Enrollment/Enroll"
HOSTILE = keyed(800)


async def test_half_open_calls_of_a_stranger_keep_no_newcomer_out(target: Target) -> None:
    invite = await target.invite(10)
    async with AsyncExitStack() as stack:
        for _ in range(70):
            half_open(await stack.enter_async_context(target.newcomer()), ENROLL, 4)
        address = await stack.enter_async_context(relay(target.enrollment, HONEST_SOURCE))
        for who in (keyed(1), keyed(2)):
            channel = await stack.enter_async_context(target.newcomer(address))
            await pb_grpc.EnrollmentStub(channel).Enroll(enroll_request(who, invite), timeout=20.0)
    assert target.is_running


async def test_half_open_calls_of_a_banned_peer_keep_no_peer_out(target: Target) -> None:
    """Those of a member: tests.hostile.training.test_floods."""
    await target.ban(HOSTILE)
    before = target.resident_mb
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(target.honest())
        calls = []
        for _ in range(5):
            channel = await stack.enter_async_context(target.member(HOSTILE))
            calls += half_open(channel, HEARTBEAT, 4096)
        codes = Counter(await asyncio.gather(*(call.code() for call in calls)))
    print(f"\n{dict(codes)}; {member.latencies}; memory {before:.0f} -> {target.resident_mb:.0f} MB")
    assert target.is_running
    assert not member.failures
    assert len(target.log) < 20_000


async def test_ten_thousand_bad_calls_write_little(target: Target) -> None:
    async with target.member(HOSTILE) as channel, target.newcomer() as newcomer:
        bad = channel.unary_unary(HEARTBEAT)
        for _ in range(100):
            codes = await asyncio.gather(*(bad(b"\xff\xff\xff").code() for _ in range(100)))
            # UNAVAILABLE: a connection with very many refusals is closed.
            refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
            assert set(codes) <= refused | {grpc.StatusCode.UNAVAILABLE}
        for _ in range(100):
            await newcomer.unary_unary(ENROLL)(b"\xff\xff\xff").code()
    print(f"\n{len(target.log)} bytes of log")
    assert len(target.log) < 20_000
    assert target.log.count("refused") < 30
