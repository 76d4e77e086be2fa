"""The coordinator's gRPC API for peers: turns messages into commands, and records into messages.

Waiting calls (Match, Report, AwaitDecision, Watch) hold only a future in the command loop. The end of a
waiting call changes nothing, and every call may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import grpc

from coordinator.api.access import Access
from coordinator.api.enrollment import renew
from coordinator.api.rpc_handling import Context, Decoding, answering, streaming
from coordinator.api.watch import Announcements, Watcher
from coordinator.authority import Authority
from coordinator.command_loop import RUN_TOPIC, CommandLoop, Topic, decision_topic, group_topic
from coordinator.membership.joining import check_compatible
from coordinator.membership.validation import bad_request, check_not_excluded, live_peer
from coordinator.metrics import MetricsFile
from coordinator.rounds.attestation import locate, settled_digest
from coordinator.rounds.deadlines import closes_at
from coordinator.state import commands
from coordinator.state.state import State
from coordinator.status.run_status import run_status
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.status import Measurement
from protocol.trust.envelope import Signer, spec_message
from protocol.trust.tls import identity_of, peer_of
from protocol.types import Decision, ExchangeGroup, PeerId
from protocol.wire.convert.fields import endpoint_from_pb, name_from_pb, part_from_pb, role_from_pb
from protocol.wire.convert.measurements import capacity_from_pb, estimates_from_pb
from protocol.wire.convert.payloads import (
    decision_to_pb,
    descriptor_from_pb,
    descriptors_from_pb,
    group_to_pb,
    rejections_from_pb,
)
from protocol.wire.probing import MAX_PROBE_SECONDS, ProbeDoor, answer_all, limited
from protocol.wire.records import seal_state
from protocol.wire.status import measurement_from_pb, status_to_pb

T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 << 20
MAX_CALLS = 16_384
"""Concurrent calls: every member keeps a Watch open, and a few waiting calls for each stage."""
MAX_STREAMS = 4096
"""Concurrent calls of one connection."""
_PROBES_AT_ONCE = 4


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one run.

    Args:
        command_loop: owns the state; it is running.
        metrics: where measurements go.
        access: checks who calls.
        authority: issues certificates.
        sign: signs with the coordinator's identity.
        dht_peers: multiaddresses of the DHT bootstrap peer, told to every node that joins.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        metrics: MetricsFile,
        access: Access,
        authority: Authority,
        sign: Signer,
        dht_peers: Sequence[str],
    ) -> None:
        self._command_loop = command_loop
        self._spec = command_loop.spec
        self._metrics = metrics
        self._access = access
        self._authority = authority
        self._sign = sign
        self._dht_peers = tuple(dht_peers)
        self._spec_signature = sign(spec_message(self._spec.canonical_json))
        self._announcements = Announcements(self._spec, sign)
        self._measurements: dict[PeerId, Measurement] = {}
        self._probes = ProbeDoor(_PROBES_AT_ONCE, command_loop.now)

    @answering
    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        with self._access.of_peer(context, request.peer) as peer:
            self._access.check_join_rate(peer)
            spec_hash = request.spec_hash[:64]
            # Before the other fields are read: another version may give them another meaning.
            check_compatible(self._spec, request.protocol_version, spec_hash)
            await self._command_loop.execute(
                commands.Join(
                    protocol_version=request.protocol_version,
                    spec_hash=spec_hash,
                    peer=peer,
                    role=role_from_pb(request.role),
                    capacity=capacity_from_pb(request.capacity),
                    endpoint=endpoint_from_pb(request.endpoint),
                )
            )
        return pb.JoinReply(
            spec_json=self._spec.canonical_json,
            spec_hash=self._spec.hash,
            run=self._spec.run_id,
            dht_peers=self._dht_peers,
            spec_signature=self._spec_signature,
            time=time.time(),  # a node compares its clock: certificates and records expire by it
        )

    @answering
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        with self._access.of_peer(context, request.peer):
            return renew(self._authority, request)

    @streaming
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.PlanUpdate]:
        with self._access.of_peer(context, request.peer) as peer:
            live_peer(self._command_loop.state, peer)
            # Each call begins with all that the peer must know: a broken stream is simply opened again.
            watcher = Watcher(peer, self._announcements)
            finished = False
            while not finished:
                update = await self._until(peer, RUN_TOPIC, watcher.update)
                finished = update.finished
                yield update

    @answering
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        with self._access.of_peer(context, request.peer) as peer:
            estimates = estimates_from_pb(request.estimates) if request.HasField("estimates") else None
            await self._command_loop.execute(
                commands.Heartbeat(peer, request.round, request.inner_step, estimates)
            )
        state = self._command_loop.state
        closes = closes_at(state, self._spec)
        return pb.HeartbeatReply(
            round=state.current_round,
            closing=closes is not None,
            # A span, not a time: the clocks of two machines differ.
            closes_seconds=0.0 if closes is None else max(0.0, closes - self._command_loop.now()),
        )

    @answering
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        with self._access.of_peer(context, request.peer) as peer:
            await self._command_loop.execute(commands.Leave(peer, _printable(request.reason)))
        return pb.LeaveReply()

    @answering
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        with self._access.of_peer(context, request.peer) as peer:
            await self._command_loop.execute(commands.Drain(peer, _printable(request.reason)))
        return pb.DrainReply()

    @answering
    async def Probe(self, requests: AsyncIterator[pb.ProbeMessage], context: Context) -> None:
        """Open to every certificate of the run, also before its peer has joined. The data is discarded."""
        caller = peer_of(identity_of(context)) or ""
        with self._access.of_member(context), self._probes.one_more(caller) as admit_data:
            try:
                async with asyncio.timeout(MAX_PROBE_SECONDS):
                    await answer_all(caller, requests, context.write, self._command_loop.now, admit_data)
            except TimeoutError:
                raise limited(f"it was not over after {MAX_PROBE_SECONDS:.0f} s") from None
            except (grpc.aio.BaseError, asyncio.InvalidStateError):
                return  # the caller has disconnected

    @answering
    async def Retreat(self, request: pb.RetreatRequest, context: Context) -> pb.RetreatReply:
        with self._access.of_peer(context, request.peer) as peer:
            await self._command_loop.execute(
                commands.Retreat(peer, request.epoch, _printable(request.reason))
            )
        return pb.RetreatReply()

    @answering
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        with self._access.of_peer(context, request.peer) as peer:
            descriptor = descriptor_from_pb(request.descriptor)
            await self._command_loop.execute(commands.Offer(peer, descriptor))
            key = (descriptor.stage, descriptor.round_number)

            def closed(state: State) -> ExchangeGroup | None:
                group = state.round_of(*key).group
                if group is None and key in state.decisions:
                    # The round was decided without offers. An empty group sends the caller to the decision.
                    return ExchangeGroup(f"{self._spec.run_id}/{key[0]}/{key[1]}", ())
                return group

            return group_to_pb(await self._until(peer, group_topic(*key), closed))

    @answering
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.DecisionReply:
        with self._access.of_peer(context, request.peer) as peer:
            held = descriptors_from_pb(request.held)
            rejected = rejections_from_pb(request.rejected)
            await self._command_loop.execute(
                commands.Report(peer, request.stage, request.round, held, rejected)
            )
            return await self._decision(peer, request.stage, request.round)

    @answering
    async def AwaitDecision(self, request: pb.AwaitDecisionRequest, context: Context) -> pb.DecisionReply:
        with self._access.of_peer(context, request.peer) as peer:
            await self._command_loop.execute(
                commands.Await(peer, request.stage, request.round, request.withheld)
            )
            return await self._decision(peer, request.stage, request.round)

    async def _decision(self, peer: PeerId, stage: int, round_number: int) -> pb.DecisionReply:
        def made(state: State) -> Decision | None:
            return state.decisions.get((stage, round_number))

        return decision_to_pb(await self._until(peer, decision_topic(stage, round_number), made))

    async def _until(self, peer: PeerId, topic: Topic, ready: Callable[[State], T | None]) -> T:
        """As :meth:`CommandLoop.until`. Raises BANNED or QUARANTINED when `peer` is excluded meanwhile."""

        def ready_for_peer(state: State) -> T | None:
            check_not_excluded(state, peer)
            return ready(state)

        return await self._command_loop.until(topic, ready_for_peer)

    @answering
    async def Attest(self, request: pb.AttestRequest, context: Context) -> pb.AttestReply:
        with self._access.of_peer(context, request.peer) as peer:
            digest = name_from_pb(request.digest, "the digest")
            part = name_from_pb(request.part, "the part")
            await self._command_loop.execute(
                commands.Attest(peer, request.stage, request.round, part=part, digest=digest)
            )
        # While no digest is settled, the caller goes on with its own anchor.
        expected = settled_digest(self._command_loop.state, request.stage, request.round, part) or digest
        return pb.AttestReply(agrees=digest == expected, expected=expected)

    @answering
    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateReply:
        with self._access.of_peer(context, request.peer) as peer:
            state = self._command_loop.state
            live_peer(state, peer)
            records = locate(state, self._spec, request.stage, part_from_pb(request.part))
            sealed = [seal_state(record, self._sign) for record in records]
        return pb.LocateReply(
            states=[pb.SignedState(record=record, signature=signature) for record, signature in sealed]
        )

    @answering
    async def Measure(self, request: pb.Measurement, context: Context) -> pb.MeasureReply:
        with self._access.of_peer(context, request.peer) as claimed:
            state = self._command_loop.state
            peer = live_peer(state, claimed).peer
            # Round 0 is the model before its first round.
            in_run = request.round <= state.current_round
            if not in_run or state.assignment(peer, max(1, request.round)) is None:
                raise bad_request(f"{peer} measured round {request.round}, in which it has no place")
            former = self._measurements.get(peer)
            # A repeated call adds no second line for the same round.
            if former is None or former.round_number < request.round:
                measurement = self._measurements[peer] = measurement_from_pb(request)
                self._metrics.record_measurement(self._command_loop.now(), measurement)
        return pb.MeasureReply()

    @answering
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        with self._access.of_member(context):
            loop = self._command_loop
            status = run_status(loop.state, self._spec, self._measurements.values(), loop.now(), time.time())
            return status_to_pb(status)


def _printable(reason: str) -> str:
    """Make a reason printable. It is never refused, because a peer must always be able to leave."""
    return "".join(letter if letter.isprintable() else " " for letter in reason[:200])


def new_server() -> grpc.aio.Server:
    """A server with bounded messages and calls, with neither port nor services yet."""
    return grpc.aio.server(
        interceptors=(Decoding(),),
        options=(
            ("grpc.so_reuseport", 0),  # a second coordinator on the same port must fail
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            # Members send keepalives: routers forget connections without traffic.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
