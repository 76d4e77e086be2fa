"""The calls of a peer to its coordinator, each with types and a deadline.

The coordinator may safely receive any request twice. Every call raises COORDINATOR_UNREACHABLE, or the
HetnodeError with which the coordinator refuses it.

One file because it mirrors one service, call by call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NoReturn

import grpc
from cryptography.x509 import load_pem_x509_certificate

from node import hooks
from node.net.coordinator_channel import Answer, CoordinatorChannel
from node.net.enrollment import check_own
from node.net.group_reports import GroupReports
from node.net.plan_updates import PlanUpdate, PlanUpdates
from node.net.probe import LineProbe
from node.security.channels import tls_failure
from node.security.credentials import RunCredentials, check_in_date
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.server.clock import steady
from protocol.spec.run import RunSpec
from protocol.status import Measurement, Wait
from protocol.trust.envelope import is_signed_by, renewal_message, spec_message
from protocol.trust.names import wrong_authority
from protocol.trust.reachability import DIAL_BACK_SECONDS, NOT_REACHED, Addresses, Reached
from protocol.trust.run_id import check_run_id
from protocol.trust.term import Succession
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Decision,
    Estimates,
    ExchangeGroup,
    Part,
    PayloadDescriptor,
    PeerId,
    Rejection,
    RelayAddress,
    ResultClaim,
    Role,
    StateRecord,
)
from protocol.wire.convert.fields import role_from_pb, sentence_from_pb
from protocol.wire.convert.payloads import descriptor_to_pb, rejection_to_pb, result_claim_to_pb
from protocol.wire.convert.plans import (
    addresses_to_pb,
    answered,
    capacity_to_pb,
    estimates_to_pb,
    relays_from_pb,
)
from protocol.wire.records import open_state
from protocol.wire.status import measurement_to_pb
from protocol.wire.typed_calls import Request, name_of
from protocol.wire.versions import OLDEST_PROTOCOL, common_version

log = logging.getLogger(__name__)

_CALL_SECONDS = 15.0
_LONGEST_SLEEP = 600.0  # certificates also expire while a machine is suspended
_RETRY_SECONDS = 0.3
_LONGEST_HEARTBEAT = _LONGEST_WAIT = 600.0


@dataclass(frozen=True)
class Admission:
    """The coordinator's answer to a peer that joins.

    `reached` is what answered when it dialled this node back, `endpoint` where others open links to it.
    `role` is that of this node; `role_reason` says why, if the coordinator has chosen it.
    """

    spec: RunSpec
    dht_peers: tuple[str, ...]
    relays: tuple[RelayAddress, ...] = ()
    reached: Reached = NOT_REACHED
    endpoint: str = ""
    role: Role = Role.STAGE
    role_reason: str = ""


@dataclass(frozen=True)
class HeartbeatReply:
    """The open round, and the time until it closes: None while no peer waits for that.

    `interval`: seconds to the next heartbeat.
    """

    round_number: int
    closes_seconds: float | None
    interval: float = 0.0


class CoordinatorClient:
    """Calls of the peer of `identity`, to which `credentials` belong. Close it after use.

    A renewed certificate needs a new connection; open calls and the stream of plans continue on the old one.

    Attributes:
        dht_peers: multiaddresses of the DHT peer of a coordinator that has taken the run over.
    """

    def __init__(self, credentials: RunCredentials, identity: Identity) -> None:
        self.address = credentials.api
        self.credentials = credentials
        self._identity = identity
        self._peer = identity.peer
        self._ahead: float | None = None  # the coordinator's Unix time less the steady clock of this machine
        self._channel = self._opened()
        self._reports = GroupReports(self._peer)
        self.dht_peers = tuple[str, ...]()

    async def join(
        self,
        role: Role | None,
        capacity: Capacity,
        addresses: Addresses,
        spec_hash: str,
        deadline: float,
        name: str = "",
    ) -> Admission:
        """Join the run; wait up to `deadline` seconds for any answer.

        `role` None: the coordinator chooses.
        """
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL,
            peer=self._peer,
            role=role,
            any_role=role is None,
            capacity=capacity_to_pb(capacity),
            endpoint=addresses.endpoint,
            spec_hash=spec_hash,
            addresses=addresses_to_pb(addresses),
            name=name,
        )
        asked = steady()
        # Before it answers, the coordinator dials back.
        reply = await self._first_call(request, deadline + DIAL_BACK_SECONDS)
        # The coordinator read its clock about half a round trip after the request was sent.
        self._ahead = reply.time - (asked + steady()) / 2
        signed = spec_message(reply.run, reply.spec_json)
        if not is_signed_by(self.credentials.coordinator, signed, reply.spec_signature):
            raise wrong_authority("The run's specification is not signed by the coordinator of the invite.")
        if reply.protocol_version:  # none of a coordinator of the first versions
            common_version("the coordinator", "this node", reply.protocol_version)
        spec = _understood(reply.spec_json)
        # Another version of hetnode may read the same bytes as another spec.
        if spec.hash != reply.spec_hash:
            raise HetnodeError(
                ErrorCode.SPEC_MISMATCH,
                f"The coordinator sent a spec of hash {spec.hash} and called it {reply.spec_hash!r:.80}.",
                "Update the older program: hetnode on this machine, or the coordinator's.",
            )
        for run in (reply.run, self.credentials.run):
            check_run_id(run, spec, self.credentials.tls.pin)
        reached = answered(reply, addresses)
        endpoint = addresses.endpoint if reached.endpoint else ""
        relays = relays_from_pb(reply.relays)
        role, reason = role_from_pb(reply.role), sentence_from_pb(reply.role_reason)
        peers = tuple(reply.dht_peers)
        return Admission(spec, peers, relays, reached, endpoint, role, reason)

    def clock_offset(self) -> float:
        """Seconds by which the coordinator's clock is ahead of this machine's, as that is set at present."""
        return 0.0 if self._ahead is None else steady() + self._ahead - hooks.current().time()

    def now(self) -> float:
        """Unix time of the coordinator; before it has answered a join, that of this machine."""
        return time.time() if self._ahead is None else steady() + self._ahead

    async def update_addresses(self, addresses: Addresses) -> Reached:
        """Tell where others reach this node from now on; returns what answered there."""
        request = pb.UpdateAddressesRequest(peer=self._peer, addresses=addresses_to_pb(addresses))
        reply = await self._call("UpdateAddresses", request, _CALL_SECONDS + DIAL_BACK_SECONDS)
        return answered(reply, addresses)

    async def _first_call(self, request: pb.JoinRequest, deadline: float) -> pb.JoinReply:
        """Join; try again until the coordinator answers. A TLS failure or a refusal ends the attempts."""
        clock = asyncio.get_running_loop().time
        ends = clock() + deadline
        while True:
            await hooks.current().before_coordinator_call("Join", request)
            async with self._channel.call() as stub:
                try:
                    seconds, shown = max(0.1, ends - clock()), self._channel.metadata
                    reply: pb.JoinReply = await stub.Join(request, timeout=seconds, metadata=shown)
                except grpc.aio.AioRpcError as error:
                    late = clock() > ends - _RETRY_SECONDS
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or tls_failure(error) or late:
                        raise
                else:
                    await hooks.current().after_coordinator_call("Join", request)
                    return reply
            await asyncio.sleep(_RETRY_SECONDS)

    def _opened(self) -> CoordinatorChannel:
        return CoordinatorChannel(self.address, self.credentials.tls, self.clock_offset)

    async def renew(self) -> None:
        """Request the next certificate, store it, and show it on all new connections."""
        tls = self.credentials.tls
        authority = load_pem_x509_certificate(tls.authority)
        public_key = tls.public_key
        proof = self._identity.sign(renewal_message(tls.pin, public_key))
        request = pb.RenewRequest(peer=self._peer, tls_public_key=public_key, proof=proof)
        reply = await self._call("Renew", request)
        renewed = replace(tls, certificate=reply.certificate_pem)
        check_own(renewed, authority, self._peer)  # before it replaces the one that still works
        self.credentials = self.credentials.renewed(reply.certificate_pem)
        await self._renew_channel()

    async def _renew_channel(self) -> None:
        """Make all later calls with what the credentials are now."""
        old, self._channel = self._channel, self._opened()
        await old.retire()

    async def reconnect(self) -> None:
        """Begin a new connection. Open calls raise COORDINATOR_UNREACHABLE, as if it had failed."""
        old, self._channel = self._channel, self._opened()
        await old.drop()

    async def follow(self, address: str) -> None:
        """Go on at `address`, where the coordinator answers by now, also after a restart of this node."""
        self.address, self.credentials = address, self.credentials.moved(address)
        await self.reconnect()

    async def keep_renewed(self) -> NoReturn:
        """Renew the certificate long before it expires, again and again. Open connections continue.

        Raises HetnodeError: BANNED or another refusal; CERTIFICATE_REFUSED if it expired without a renewal.
        """
        while True:
            wait = self.credentials.tls.seconds_to_renewal(self.now())
            await asyncio.sleep(min(wait, _LONGEST_SLEEP))
            if wait > _LONGEST_SLEEP:
                continue
            try:
                await self.renew()
                log.info("this node's certificate was renewed")
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                check_in_date(self.credentials, self.now())  # no renewal is possible after the end
                log.warning("the certificate could not be renewed yet: %s", error)

    async def watch(self) -> AsyncIterator[PlanUpdate]:
        """The current plan at once, then every newer plan. Ends with the run or with the connection.

        Raises HetnodeError: WRONG_AUTHORITY if a plan is not signed with the coordinator's key.
        """
        async with self._channel.call() as stub:
            request = pb.WatchRequest(peer=self._peer, changes=True)
            call = stub.Watch(request, wait_for_ready=True, metadata=self._channel.metadata)
            updates = PlanUpdates(self.credentials.run, self.credentials.coordinator)
            try:
                async for update in call:
                    await hooks.current().after_coordinator_call("Watch", request)
                    opened = updates.opened(update)
                    await self._note(opened.succession)
                    yield opened
            finally:
                call.cancel()

    async def _note(self, succession: Succession) -> None:
        """Keep where else the coordinator may be, and show its term from now on: former ones end by it."""
        self.dht_peers = succession.dht_peers
        former, self.credentials = self.credentials, self.credentials.told(succession)
        if former.tls.term != self.credentials.tls.term:
            await self._renew_channel()

    async def until_over(self) -> None:
        """Wait until the run is over. This peer need not have joined."""
        async with self._channel.call() as stub:
            request = pb.WatchRequest(peer=self._peer, end_only=True)
            call = stub.Watch(request, metadata=self._channel.metadata)
            try:
                async for update in call:
                    if update.finished:
                        return
            finally:
                call.cancel()
            raise self._channel.unreachable("it has ended the call")

    async def heartbeat(
        self,
        round_number: int,
        inner_step: int,
        estimates: Estimates | None = None,
        waits: Sequence[Wait] = (),
        kept: Sequence[int] = (),
    ) -> HeartbeatReply:
        """Report this node's progress, its measurements if they have changed, and what it waits for.

        `kept`: the rounds whose anchors are on its disk.
        """
        changed = None if estimates is None else estimates_to_pb(estimates)
        request = pb.HeartbeatRequest(
            peer=self._peer,
            round=round_number,
            inner_step=inner_step,
            estimates=changed,
            waits=waits,
            kept=kept,
        )
        reply = await self._call("Heartbeat", request)
        interval = min(max(0.0, reply.interval), _LONGEST_HEARTBEAT) if isfinite(reply.interval) else 0.0
        return HeartbeatReply(reply.round, reply.closes_seconds if reply.closing else None, interval)

    @asynccontextmanager
    async def probe(self) -> AsyncIterator[LineProbe]:
        """As :meth:`CoordinatorChannel.probe`. Can be used before joining."""
        await hooks.current().before_coordinator_call("Probe", None)
        async with self._channel.probe() as probe:
            yield probe

    async def leave(self, reason: str) -> None:
        await self._call("Leave", pb.LeaveRequest(peer=self._peer, reason=reason), 2.0)

    async def drain(self, reason: str) -> None:
        """Report that this node leaves at the end of its current round."""
        await self._call("Drain", pb.DrainRequest(peer=self._peer, reason=reason[:200]))

    async def report_link(self, epoch: int, neighbour: PeerId, address: str, reason: str) -> None:
        """Report that the link to `neighbour` at `address` cannot be opened yet, under plan `epoch`."""
        request = pb.ReportLinkRequest(
            peer=self._peer, epoch=epoch, neighbour=neighbour, address=address, reason=reason[:200]
        )
        await self._call("ReportLink", request)

    async def retreat(self, epoch: int, reason: str, round_number: int, steps: int | None) -> float:
        """Report that this peer's replica cannot continue under plan `epoch`. A later plan may include it.

        `steps` of `round_number` are done, and the peer can go on from there with other neighbours; None: it
        cannot. Returns for how many seconds it should wait for that; 0 after steps: it has not retreated yet.
        """
        request = pb.RetreatRequest(
            peer=self._peer, epoch=epoch, reason=reason[:200], round=round_number, steps=steps
        )
        reply = await self._call("Retreat", request)
        return min(max(0.0, reply.seconds), _LONGEST_WAIT) if isfinite(reply.seconds) else 0.0

    async def locate(
        self, stage: int, part: Part, round_number: int | None = None
    ) -> tuple[StateRecord, ...]:
        """The checkpoints of `part` of `stage` that peers hold, newest first; or only that of `round_number`.

        Raises HetnodeError: WRONG_AUTHORITY if a record is not signed with the coordinator's key.
        """
        request = pb.LocateRequest(peer=self._peer, stage=stage, part=part.value, round=round_number)
        reply = await self._call("Locate", request)
        run, coordinator = self.credentials.run, self.credentials.coordinator
        records = (open_state(each.record, each.signature, run, coordinator) for each in reply.states)
        # A validly signed record of another part must not be downloaded as this one.
        return tuple(each for each in records if (each.stage, each.part) == (stage, part))

    async def match(self, descriptor: PayloadDescriptor, deadline: float) -> ExchangeGroup:
        """Offer a payload, and wait for the group of its (stage, round)."""
        request = pb.MatchRequest(peer=self._peer, descriptor=descriptor_to_pb(descriptor), packs=True)
        reply = await self._call("Match", request, deadline)
        group = self._reports.group_of(reply)
        self._reports.note(descriptor, group if reply.packed else None)
        return group

    async def report(
        self,
        stage: int,
        round_number: int,
        held: Sequence[PayloadDescriptor],
        rejected: Sequence[Rejection],
        deadline: float,
        claim: ResultClaim | None = None,
    ) -> Decision:
        """Report the payloads that this peer holds and rejects, and its result of a reduction if it has one.

        Waits for the decision on (stage, round).
        """
        request = pb.ReportRequest(
            peer=self._peer,
            stage=stage,
            round=round_number,
            rejected=map(rejection_to_pb, rejected),
            packs=True,
            result=None if claim is None else result_claim_to_pb(claim),
        )
        named = self._reports.by_positions(request, held)
        if named is not None:
            try:
                reply = await self._call("Report", named, deadline)
                return self._reports.decision_of(reply, stage, round_number)
            except HetnodeError as error:
                if error.code is not ErrorCode.GROUP_UNKNOWN:
                    raise
        request.held.extend(map(descriptor_to_pb, held))
        return self._reports.decision_of(await self._call("Report", request, deadline), stage, round_number)

    async def await_decision(
        self, stage: int, round_number: int, deadline: float, epoch: int = 0
    ) -> Decision:
        """Wait for the decision on a (stage, round) to which this peer does not contribute.

        `epoch`: of the assignment for which this peer has no payload; 0 if it only asks.
        """
        request = pb.AwaitDecisionRequest(
            peer=self._peer, stage=stage, round=round_number, withheld=epoch, packs=True
        )
        reply = await self._call("AwaitDecision", request, deadline)
        return self._reports.decision_of(reply, stage, round_number)

    async def attest(self, stage: int, round_number: int, part: Part, digest: str) -> None:
        """Report the anchor after `round_number`. Raises ANCHOR_DIVERGED if the other peers have another."""
        request = pb.AttestRequest(
            peer=self._peer, stage=stage, round=round_number, part=part.value, digest=digest
        )
        reply = await self._call("Attest", request)
        if not reply.agrees:
            raise HetnodeError(
                ErrorCode.ANCHOR_DIVERGED,
                f"After round {round_number} this node's {part.value} of stage {stage} has digest "
                f"{digest[:16]}, the run has {reply.expected[:16]}.",
                "It loads the anchor of the others before it contributes again.",
            )

    async def measure(self, measurement: Measurement) -> None:
        await self._call("Measure", measurement_to_pb(measurement))

    async def ask(self, request: Request[Answer], seconds: float) -> Answer:
        """As :meth:`CoordinatorChannel.ask`, in the name of this peer."""
        method = name_of(type(request))
        await hooks.current().before_coordinator_call(method, request)
        answer = await self._channel.ask(request, seconds)
        await hooks.current().after_coordinator_call(method, request)
        return answer

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: str, request: Any, deadline: float = _CALL_SECONDS) -> Any:
        await hooks.current().before_coordinator_call(method, request)
        async with self._channel.call() as stub:
            shown = self._channel.metadata
            reply = await getattr(stub, method)(
                request, timeout=deadline, wait_for_ready=True, metadata=shown
            )
        await hooks.current().after_coordinator_call(method, request)
        return reply


def _understood(spec_json: str) -> RunSpec:
    """The specification. It has all that is not at its default: an unknown name is newer than this node."""
    try:
        return RunSpec.from_json(spec_json)
    except HetnodeError as error:
        remedy = "Update hetnode on this machine: the run needs something that this version does not know."
        raise HetnodeError(error.code, error.cause, remedy) from None
