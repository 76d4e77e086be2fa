"""The server of the API for members under the calls of a large swarm."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import grpc

from coordinator.api.member_server import MAX_CALLS, calls_of_one, new_server
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.calls import CallInterceptor, CallPolicy
from protocol.server.limits import FairShare
from tests.builders import spec_of

CALLS = 3_200
"""gRPC cancels some calls above 1,000 that it has not handed over, and all above 3,000."""


class Service(pb_grpc.CoordinatorServicer):
    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        return pb.LeaveReply()


async def test_calls_of_all_members_at_once_are_answered() -> None:
    spec = spec_of(stages=4)
    calls = FairShare(each=MAX_CALLS, total=MAX_CALLS)
    admission = CallPolicy(
        lambda _: "", str, lambda _: None, lambda _: None, calls, OSError, logging.getLogger()
    )
    server = new_server(CallInterceptor(admission), spec)
    pb_grpc.add_CoordinatorServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        # Each member has a connection of its own, on which only so many calls may be open.
        options = (("grpc.use_local_subchannel_pool", 1),)
        stubs = []
        for _ in range(-(-CALLS // calls_of_one(spec))):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            stubs.append(pb_grpc.CoordinatorStub(channel))
        # The event loop, which is also the server's, starts all calls before it takes any.
        sent = [stubs[i % len(stubs)].Leave(pb.LeaveRequest()) for i in range(CALLS)]
        replies = await asyncio.gather(*sent, return_exceptions=True)
    assert not [reply for reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
