"""A node's view of the coordinator: typed calls with deadlines, retried while the connection is away.

gRPC itself retries UNAVAILABLE with back-off (the service config below); every request may safely arrive
twice. What the coordinator refuses is raised as the HetnodeError that it sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
from cryptography.x509 import load_pem_x509_certificate

from node import hooks
from node.net.enrollment import check_own
from node.net.probe import Probe, probe_over
from node.security.channels import open_channel, tls_failure
from node.security.credentials import Credentials, RunCredentials, check_in_date
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from protocol.status import Measurement, RunStatus
from protocol.trust.envelope import is_signed_by, renewal_message, spec_message
from protocol.trust.tls import COORDINATOR_NAME, pin_of, wrong_authority
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Decision,
    Estimates,
    ExchangeGroup,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
    Rejection,
    ReservedAssignment,
    Role,
    StateRecord,
)
from protocol.wire.convert.fields import banned_from_pb
from protocol.wire.convert.measurements import capacity_to_pb, estimates_to_pb
from protocol.wire.convert.payloads import decision_from_pb, descriptor_to_pb, group_from_pb, rejection_to_pb
from protocol.wire.convert.plans import places_from_pb
from protocol.wire.records import open_plan, open_state
from protocol.wire.rpc_errors import error_from_rpc
from protocol.wire.status import measurement_to_pb, status_from_pb

log = logging.getLogger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                # Join and Status are for people who wait: they want to know at once what TLS has to say. A
                # probe that was kept for another try would measure that.
                "name": [
                    {"service": _SERVICE.full_name, "method": method.name}
                    for method in _SERVICE.methods
                    if method.name not in ("Join", "Status", "Probe")
                ],
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
_LONGEST_SLEEP = 600.0
"""Longer waits are counted anew: certificates go by the wall clock, and the machine may have slept."""
_RETRY_SECONDS = 0.3


@dataclass(frozen=True)
class Admission:
    """What a peer gets when the coordinator lets it in.

    `clock_offset`: seconds by which the coordinator's clock is ahead of this machine's.
    """

    spec: RunSpec
    dht_peers: tuple[str, ...]
    clock_offset: float = 0.0


@dataclass(frozen=True)
class Pulse:
    """What the coordinator answers to a heartbeat.

    `round` is the one that is open, `closes` in how many seconds it closes, if others wait for that already.
    """

    round_number: int
    closes: float | None


@dataclass(frozen=True)
class PlanNews:
    """One message of the Watch stream: a plan, or the sentence that says what the run waits for.

    `banned` are all peers that are banned now, `followers` the places of those that are in no plan yet,
    `round` is the one that is open.
    """

    plan: Plan | None
    waiting: str
    finished: bool
    banned: frozenset[PeerId]
    followers: tuple[ReservedAssignment, ...] = ()
    round_number: int = 0


class _Channel:
    """A connection under one certificate, and how many calls use it."""

    def __init__(self, address: str, tls: Credentials) -> None:
        self._channel = open_channel(address, tls, COORDINATOR_NAME, _OPTIONS)
        self.stub = pb_grpc.CoordinatorStub(self._channel)
        self._calls = 0
        self._retired = False

    @asynccontextmanager
    async def call(self) -> AsyncIterator[pb_grpc.CoordinatorStub]:
        self._calls += 1
        try:
            yield self.stub
        finally:
            self._calls -= 1
            await self._close_if_idle()

    async def retire(self) -> None:
        """Close it as soon as the last of its calls, which may be a stream of days, is over."""
        self._retired = True
        await self._close_if_idle()

    async def close(self) -> None:
        await self._channel.close()

    async def _close_if_idle(self) -> None:
        if self._retired and not self._calls:
            await self._channel.close()


class CoordinatorClient:
    """Calls to the coordinator of one run in the name of the peer whose `credentials` these are.

    Both ends show certificates. A renewed one is shown on a new connection; the calls that are open, and the
    stream of plans, go on undisturbed on the old one. Close it when done.
    """

    def __init__(self, credentials: RunCredentials, identity: Identity) -> None:
        self.address = credentials.api
        self.credentials = credentials
        self._identity = identity
        self._peer = identity.peer
        self._channel = _Channel(self.address, credentials.tls)

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
            capacity=capacity_to_pb(capacity),
            endpoint=endpoint,
            spec_hash=spec_hash,
        )
        asked = hooks.current().time()
        reply = await self._first_call(request, deadline)
        clock_offset = reply.time - (asked + hooks.current().time()) / 2
        if not is_signed_by(
            self.credentials.coordinator, spec_message(reply.spec_json), reply.spec_signature
        ):
            raise wrong_authority("The run's specification is not signed by the coordinator of the invite.")
        spec = RunSpec.from_json(reply.spec_json)
        if spec.hash != reply.spec_hash:
            raise HetnodeError(
                ErrorCode.SPEC_MISMATCH,
                f"The coordinator sent a spec of hash {spec.hash} and called it {reply.spec_hash!r:.80}.",
                "Install the same version of hetnode on this machine and on the coordinator's.",
            )
        return Admission(spec, tuple(reply.dht_peers), clock_offset)

    async def _first_call(self, request: pb.JoinRequest, deadline: float) -> pb.JoinReply:
        """Join, repeated while nobody answers at all; but a certificate that TLS refuses stays refused."""
        clock = asyncio.get_running_loop().time
        ends = clock() + deadline
        while True:
            await hooks.current().before_coordinator_call("Join", request)
            try:
                async with self._channel.call() as stub:
                    reply: pb.JoinReply = await stub.Join(request, timeout=max(0.1, ends - clock()))
            except grpc.aio.AioRpcError as error:
                late = clock() > ends - _RETRY_SECONDS
                if error.code() is not grpc.StatusCode.UNAVAILABLE or tls_failure(error) or late:
                    raise self._translated(error) from None
            else:
                await hooks.current().after_coordinator_call("Join", request)
                return reply
            await asyncio.sleep(_RETRY_SECONDS)

    async def renew(self) -> None:
        """Get the next certificate, keep it, and show it on all new connections.

        Raises HetnodeError: COORDINATOR_UNREACHABLE, BANNED, WRONG_AUTHORITY, or another refusal.
        """
        tls = self.credentials.tls
        authority = load_pem_x509_certificate(tls.authority)
        public_key = tls.public_key
        proof = self._identity.sign(renewal_message(pin_of(authority), public_key))
        request = pb.RenewRequest(peer=self._peer, tls_public_key=public_key, proof=proof)
        reply = await self._call("Renew", request, _CALL_SECONDS)
        renewed = replace(tls, certificate=reply.certificate_pem)
        check_own(renewed, authority, self._peer)
        self.credentials = self.credentials.renewed(reply.certificate_pem)
        old, self._channel = self._channel, _Channel(self.address, self.credentials.tls)
        await old.retire()

    async def keep_renewed(self) -> NoReturn:
        """Renew the certificate long before it runs out, again and again; what is connected stays so.

        Raises HetnodeError: BANNED or another refusal; CERTIFICATE_REFUSED once it has run out nevertheless.
        """
        while True:
            wait = self.credentials.tls.seconds_to_renewal(time.time())
            await asyncio.sleep(min(wait, _LONGEST_SLEEP))
            if wait > _LONGEST_SLEEP:
                continue
            try:
                await self.renew()
                log.info("this node's certificate was renewed")
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                check_in_date(self.credentials, time.time())
                log.warning("the certificate could not be renewed yet: %s", error)

    async def watch(self) -> AsyncIterator[PlanNews]:
        """The plan in force at once, then every newer one. Ends with the run or the connection.

        Raises HetnodeError: WRONG_AUTHORITY where a plan is not signed by the coordinator's key.
        """
        async with self._channel.call() as stub:
            request = pb.WatchRequest(peer=self._peer)
            call = stub.Watch(request, wait_for_ready=True)
            try:
                async for update in call:
                    await hooks.current().after_coordinator_call("Watch", request)
                    yield self._news(update)
            except grpc.aio.AioRpcError as error:
                raise self._translated(error) from None
            finally:
                call.cancel()

    def _news(self, update: pb.PlanUpdate) -> PlanNews:
        plan = None
        if update.signed_plan:
            credentials = self.credentials
            plan = open_plan(update.signed_plan, update.signature, credentials.run, credentials.coordinator)
        return PlanNews(
            plan,
            update.waiting,
            update.finished,
            banned_from_pb(update.banned),
            places_from_pb(update.followers),
            update.round,
        )

    async def heartbeat(
        self, round_number: int, inner_step: int, estimates: Estimates | None = None
    ) -> Pulse:
        """Say how far this node is, and what it has measured where that has changed."""
        told = None if estimates is None else estimates_to_pb(estimates)
        request = pb.HeartbeatRequest(
            peer=self._peer, round=round_number, inner_step=inner_step, estimates=told
        )
        reply = await self._call("Heartbeat", request, _CALL_SECONDS)
        return Pulse(reply.round, reply.closes_seconds if reply.closing else None)

    @asynccontextmanager
    async def probe(self) -> AsyncIterator[Probe]:
        """For measuring the way to the coordinator. May be asked for before joining.

        Raises HetnodeError: as :func:`node.net.probe.probe_over` does, COORDINATOR_UNREACHABLE.
        """
        await hooks.current().before_coordinator_call("Probe", None)
        async with (
            self._channel.call() as stub,
            probe_over(stub.Probe(), self._translated) as probe,
        ):
            yield probe

    async def leave(self, reason: str) -> None:
        await self._call("Leave", pb.LeaveRequest(peer=self._peer, reason=reason), 2.0)

    async def drain(self, reason: str) -> None:
        """Say that this node goes at the end of the round that it is in."""
        await self._call("Drain", pb.DrainRequest(peer=self._peer, reason=reason[:200]), _CALL_SECONDS)

    async def retreat(self, epoch: int, reason: str) -> None:
        """Say that this peer's replica cannot go on under plan `epoch`; a later plan may seat it again."""
        request = pb.RetreatRequest(peer=self._peer, epoch=epoch, reason=reason[:200])
        await self._call("Retreat", request, _CALL_SECONDS)

    async def locate(self, stage: int, part: Part) -> tuple[StateRecord, ...]:
        """The checkpoints of `part` of `stage` that can be had, newest first.

        Raises HetnodeError: WRONG_AUTHORITY where a record is not signed by the coordinator's key.
        """
        request = pb.LocateRequest(peer=self._peer, stage=stage, part=part.value)
        reply = await self._call("Locate", request, _CALL_SECONDS)
        run, coordinator = self.credentials.run, self.credentials.coordinator
        records = (open_state(each.record, each.signature, run, coordinator) for each in reply.states)
        return tuple(each for each in records if (each.stage, each.part) == (stage, part))

    async def match(self, descriptor: PayloadDescriptor, deadline: float) -> ExchangeGroup:
        """Offer a payload and wait for the group of its (stage, round)."""
        request = pb.MatchRequest(peer=self._peer, descriptor=descriptor_to_pb(descriptor))
        return group_from_pb(await self._call("Match", request, deadline))

    async def report(
        self,
        stage: int,
        round_number: int,
        held: Sequence[PayloadDescriptor],
        rejected: Sequence[Rejection],
        deadline: float,
    ) -> Decision:
        """Say which payloads this peer holds or refuses and wait for the one decision on (stage, round)."""
        request = pb.ReportRequest(
            peer=self._peer,
            stage=stage,
            round=round_number,
            held=map(descriptor_to_pb, held),
            rejected=map(rejection_to_pb, rejected),
        )
        return decision_from_pb(await self._call("Report", request, deadline))

    async def await_decision(
        self, stage: int, round_number: int, deadline: float, withheld: int = 0
    ) -> Decision:
        """Wait for the decision on a (stage, round) to which this peer does not contribute.

        `withheld`: the epoch under which it has a seat and nothing to offer; 0 where it only asks.
        """
        request = pb.AwaitDecisionRequest(peer=self._peer, stage=stage, round=round_number, withheld=withheld)
        return decision_from_pb(await self._call("AwaitDecision", request, deadline))

    async def attest(self, stage: int, round_number: int, part: str, digest: str) -> None:
        """Report the anchor after `round_`. Raises ANCHOR_DIVERGED if others have another one."""
        request = pb.AttestRequest(peer=self._peer, stage=stage, round=round_number, part=part, digest=digest)
        reply = await self._call("Attest", request, _CALL_SECONDS)
        if not reply.agrees:
            raise HetnodeError(
                ErrorCode.ANCHOR_DIVERGED,
                f"After round {round_number} this node's {part} of stage {stage} has digest {digest[:16]}, the run "
                f"has {reply.expected[:16]}.",
                "It loads the anchor of the others before it contributes again.",
            )

    async def measure(self, measurement: Measurement) -> None:
        await self._call("Measure", measurement_to_pb(measurement), _CALL_SECONDS)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: str, request: Any, deadline: float) -> Any:
        await hooks.current().before_coordinator_call(method, request)
        try:
            async with self._channel.call() as stub:
                reply = await getattr(stub, method)(request, timeout=deadline, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from None
        await hooks.current().after_coordinator_call(method, request)
        return reply

    def _translated(self, error: grpc.aio.AioRpcError) -> HetnodeError:
        return _error_of(error, self.address)


async def fetch_status(address: str, tls: Credentials, deadline: float = 5.0) -> RunStatus:
    """What the coordinator at `address` shows to holders of any certificate of its run.

    Raises HetnodeError: COORDINATOR_UNREACHABLE, WRONG_AUTHORITY, or the refusal.
    """
    channel = open_channel(address, tls, COORDINATOR_NAME, _OPTIONS)
    try:
        reply = await pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest(), timeout=deadline)
        return status_from_pb(reply)
    except grpc.aio.AioRpcError as error:
        raise _error_of(error, address) from None
    finally:
        await channel.close()


@asynccontextmanager
async def probe_coordinator(address: str, tls: Credentials) -> AsyncIterator[Probe]:
    """As :meth:`CoordinatorClient.probe`, for whoever holds `tls`."""
    channel = open_channel(address, tls, COORDINATOR_NAME, _OPTIONS)
    try:
        call = pb_grpc.CoordinatorStub(channel).Probe()
        async with probe_over(call, lambda error: _error_of(error, address)) as probe:
            yield probe
    finally:
        await channel.close()


def _error_of(error: grpc.aio.AioRpcError, address: str) -> HetnodeError:
    """The coordinator's refusal, or why it could not be asked."""
    refusal = error_from_rpc(error)
    if refusal is not None:
        return refusal
    if why := tls_failure(error):
        return wrong_authority(f"What answers at {address} is not the coordinator of this run: {why}.")
    why = (error.details() or error.code().name)[:200]
    return HetnodeError(
        ErrorCode.COORDINATOR_UNREACHABLE,
        f"The coordinator at {address} does not answer ({error.code().name}: {why}).",
        "Check the address, that 'hetnode coordinator' runs there, and that its port is open.",
    )
