"""A node's view of the coordinator: typed calls with deadlines, retried while the connection is away.

gRPC itself retries UNAVAILABLE with back-off (the service config below); every request may safely arrive
twice. What the coordinator refuses is raised as the HetnodeError that it sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protocol import convert
from protocol.errors import ErrorCode, HetnodeError
from protocol.grpc_errors import error_from_rpc
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec import RunSpec
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Decision,
    Group,
    PayloadDescriptor,
    PeerId,
    Plan,
    Role,
)

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "hetnode.v1.Coordinator"}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.5s",
                    "maxBackoff": "5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
_OPTIONS = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 20_000),
)
_CALL_SECONDS = 15.0


@dataclass(frozen=True)
class Admission:
    """What a peer gets when the coordinator lets it in."""

    spec: RunSpec
    dht_peers: tuple[str, ...]


@dataclass(frozen=True)
class PlanNews:
    """One message of the Watch stream: a plan, or the sentence that says what the run waits for."""

    plan: Plan | None
    waiting: str
    finished: bool


class CoordinatorClient:
    """Calls to one coordinator on behalf of `peer`. Close it when done."""

    def __init__(self, address: str, peer: PeerId) -> None:
        self.address = address
        self._peer = peer
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)

    async def join(
        self, role: Role, capacity: Capacity, endpoint: str, spec_hash: str, deadline: float
    ) -> Admission:
        """Enter the run, waiting up to `deadline` seconds for the coordinator to answer at all.

        Raises HetnodeError: COORDINATOR_UNREACHABLE, or the refusal.
        """
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            peer=self._peer,
            role=role.value,
            capacity=convert.capacity_to_pb(capacity),
            endpoint=endpoint,
            spec_hash=spec_hash,
        )
        reply = await self._call(self._stub.Join, request, deadline)
        spec = RunSpec.from_json(reply.spec_json)
        if spec.hash != reply.spec_hash:
            raise HetnodeError(
                ErrorCode.SPEC_MISMATCH,
                f"The coordinator sent a spec of hash {spec.hash} and called it {reply.spec_hash!r:.80}.",
                "Install the same version of hetnode on this machine and on the coordinator's.",
            )
        return Admission(spec, tuple(reply.dht_peers))

    async def watch(self) -> AsyncIterator[PlanNews]:
        """The plan in force at once, then every newer one. Ends with the run or the connection."""
        call = self._stub.Watch(pb.WatchRequest(peer=self._peer), wait_for_ready=True)
        try:
            async for update in call:
                plan = convert.plan_from_pb(update.plan) if update.HasField("plan") else None
                yield PlanNews(plan, update.waiting, update.finished)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from None
        finally:
            call.cancel()

    async def heartbeat(self, round_: int, inner_step: int) -> None:
        request = pb.HeartbeatRequest(peer=self._peer, round=round_, inner_step=inner_step)
        await self._call(self._stub.Heartbeat, request, _CALL_SECONDS)

    async def leave(self, reason: str) -> None:
        await self._call(self._stub.Leave, pb.LeaveRequest(peer=self._peer, reason=reason), 2.0)

    async def match(self, descriptor: PayloadDescriptor, deadline: float) -> Group:
        """Offer a payload and wait for the group of its (stage, round)."""
        request = pb.MatchRequest(peer=self._peer, descriptor=convert.descriptor_to_pb(descriptor))
        return convert.group_from_pb(await self._call(self._stub.Match, request, deadline))

    async def report(
        self, stage: int, round_: int, held: Sequence[PayloadDescriptor], deadline: float
    ) -> Decision:
        """Say which payloads this peer holds and wait for the one decision on (stage, round)."""
        request = pb.ReportRequest(
            peer=self._peer, stage=stage, round=round_, held=map(convert.descriptor_to_pb, held)
        )
        return convert.decision_from_pb(await self._call(self._stub.Report, request, deadline))

    async def await_decision(self, stage: int, round_: int, deadline: float) -> Decision:
        """Wait for the decision on a (stage, round) to which this peer does not contribute."""
        request = pb.AwaitDecisionRequest(peer=self._peer, stage=stage, round=round_)
        return convert.decision_from_pb(await self._call(self._stub.AwaitDecision, request, deadline))

    async def attest(self, stage: int, round_: int, part: str, digest: str) -> None:
        """Report the anchor after `round_`. Raises ANCHOR_DIVERGED if others have another one."""
        request = pb.AttestRequest(peer=self._peer, stage=stage, round=round_, part=part, digest=digest)
        reply = await self._call(self._stub.Attest, request, _CALL_SECONDS)
        if not reply.agrees:
            raise HetnodeError(
                ErrorCode.ANCHOR_DIVERGED,
                f"After round {round_} this node's {part} of stage {stage} has digest {digest[:16]}, the run "
                f"has {reply.expected[:16]}.",
                "This node stops, so that it does not spread a different model; start it again.",
            )

    async def measure(self, measurement: pb.Measurement) -> None:
        measurement.peer = self._peer
        await self._call(self._stub.Measure, measurement, _CALL_SECONDS)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Any, deadline: float) -> Any:
        try:
            return await method(request, timeout=deadline, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from None

    def _translated(self, error: grpc.aio.AioRpcError) -> HetnodeError:
        refusal = error_from_rpc(error)
        if refusal is not None:
            return refusal
        why = (error.details() or error.code().name)[:200]
        return HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"The coordinator at {self.address} does not answer ({error.code().name}: {why}).",
            "Check the address, that 'hetnode coordinator' runs there, and that its port is open.",
        )


async def fetch_status(address: str, deadline: float = 5.0) -> pb.StatusReply:
    """What the coordinator at `address` shows to people. Raises HetnodeError COORDINATOR_UNREACHABLE."""
    client = CoordinatorClient(address, PeerId(""))
    try:
        reply: pb.StatusReply = await client._call(client._stub.Status, pb.StatusRequest(), deadline)
        return reply
    finally:
        await client.close()
