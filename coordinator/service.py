"""The coordinator's gRPC API: messages in, commands to the ledger, records out as messages.

Calls that wait (Match, Report, AwaitDecision, Watch) hold nothing but a place in the ledger's waiting room; a
cancelled call leaves it without a trace, and any call may be repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import grpc

from coordinator import transition
from coordinator.anchors import expected_digest
from coordinator.ledger import NEWS, Ledger, Stopped, decision_topic, group_topic
from coordinator.metrics import MetricsFile
from coordinator.screens import bad_request, live_peer
from coordinator.sentences import sentence, waiting
from coordinator.state import Peer, Phase, State
from protocol import convert
from protocol.errors import HetnodeError
from protocol.grpc_errors import abort_with
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.types import Decision, Group, PeerId

MAX_MESSAGE_BYTES = 4 << 20
MAX_CALLS = 16_384
"""Concurrent calls: every member keeps a Watch open, and a few calls that wait for each stage."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Service = TypeVar("Service", bound="CoordinatorService")


def _answering(
    method: Callable[[Service, Request, Context], Awaitable[Reply]],
) -> Callable[[Service, Request, Context], Awaitable[Reply]]:
    """Refusals as the errors of the call; UNAVAILABLE, which clients retry, while the coordinator stops."""

    @wraps(method)
    async def answer(self: Service, request: Request, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except HetnodeError as refusal:
            await abort_with(context, refusal)
        except Stopped:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
        raise AssertionError("abort returned")

    return answer


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one run.

    Args:
        ledger: the owner of the state, running.
        metrics: where measurements go.
        dht_peers: multiaddresses of the DHT bootstrap peer, told to every node that joins.
    """

    def __init__(self, ledger: Ledger, metrics: MetricsFile, dht_peers: Sequence[str]) -> None:
        self._ledger = ledger
        self._spec = ledger.spec
        self._metrics = metrics
        self._dht_peers = tuple(dht_peers)
        self._latest: dict[PeerId, pb.Measurement] = {}

    @_answering
    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        spec_hash = request.spec_hash[:64]
        transition.check_compatible(self._spec, request.protocol_version, spec_hash)
        await self._ledger.execute(
            transition.Join(
                protocol_version=request.protocol_version,
                spec_hash=spec_hash,
                peer=convert.peer_from_pb(request.peer),
                role=convert.role_from_pb(request.role),
                capacity=convert.capacity_from_pb(request.capacity),
                endpoint=convert.endpoint_from_pb(request.endpoint),
            )
        )
        return pb.JoinReply(
            spec_json=self._spec.canonical_json,
            spec_hash=self._spec.hash,
            run=self._spec.run_id,
            dht_peers=self._dht_peers,
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.PlanUpdate]:
        epoch, waits = 0, ""

        def news(state: State) -> pb.PlanUpdate | None:
            newer = state.plans[epoch:]
            if newer:
                return pb.PlanUpdate(plan=convert.plan_to_pb(newer[0] if epoch else newer[-1]))
            if state.phase is Phase.FINISHED:
                return pb.PlanUpdate(finished=True, waiting=sentence(state, self._spec))
            now_waits = waiting(state, self._spec)
            return pb.PlanUpdate(waiting=now_waits) if now_waits not in ("", waits) else None

        try:
            live_peer(self._ledger.state, convert.peer_from_pb(request.peer))
            update = pb.PlanUpdate()
            while not update.finished:
                update = await self._ledger.until(NEWS, news)
                epoch, waits = max(epoch, update.plan.epoch), update.waiting
                yield update
        except HetnodeError as refusal:
            await abort_with(context, refusal)
        except Stopped:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")

    @_answering
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        peer = convert.peer_from_pb(request.peer)
        await self._ledger.execute(transition.Heartbeat(peer, request.round, request.inner_step))
        return pb.HeartbeatReply()

    @_answering
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        # Never a reason to keep a peer that wants to go.
        reason = "".join(letter if letter.isprintable() else " " for letter in request.reason[:200])
        await self._ledger.execute(transition.Leave(convert.peer_from_pb(request.peer), reason))
        return pb.LeaveReply()

    @_answering
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        descriptor = convert.descriptor_from_pb(request.descriptor)
        await self._ledger.execute(transition.Offer(convert.peer_from_pb(request.peer), descriptor))
        key = (descriptor.stage, descriptor.round)

        def closed(state: State) -> Group | None:
            group = state.round(*key).group
            if group is None and key in state.decisions:
                return Group(f"{self._spec.run_id}/{key[0]}/{key[1]}", ())
            return group

        return convert.group_to_pb(await self._ledger.until(group_topic(*key), closed))

    @_answering
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.DecisionReply:
        await self._ledger.execute(
            transition.Report(
                peer=convert.peer_from_pb(request.peer),
                stage=request.stage,
                round=request.round,
                held=convert.descriptors_from_pb(request.held),
            )
        )
        return await self._decision(request.stage, request.round)

    @_answering
    async def AwaitDecision(self, request: pb.AwaitDecisionRequest, context: Context) -> pb.DecisionReply:
        peer = convert.peer_from_pb(request.peer)
        await self._ledger.execute(transition.Await(peer, request.stage, request.round))
        return await self._decision(request.stage, request.round)

    async def _decision(self, stage: int, number: int) -> pb.DecisionReply:
        def made(state: State) -> Decision | None:
            return state.decisions.get((stage, number))

        return convert.decision_to_pb(await self._ledger.until(decision_topic(stage, number), made))

    @_answering
    async def Attest(self, request: pb.AttestRequest, context: Context) -> pb.AttestReply:
        digest = convert.name_from_pb(request.digest, "the digest")
        part = convert.name_from_pb(request.part, "the part")
        await self._ledger.execute(
            transition.Attest(
                peer=convert.peer_from_pb(request.peer),
                stage=request.stage,
                round=request.round,
                part=part,
                digest=digest,
            )
        )
        expected = expected_digest(self._ledger.state, request.stage, request.round, part) or digest
        return pb.AttestReply(agrees=digest == expected, expected=expected)

    @_answering
    async def Measure(self, request: pb.Measurement, context: Context) -> pb.MeasureReply:
        state = self._ledger.state
        peer = live_peer(state, convert.peer_from_pb(request.peer)).peer
        # Round 0 is the model before its first round.
        in_run = request.round <= state.current_round
        if not in_run or state.seat(peer, max(1, request.round)) is None:
            raise bad_request(f"{peer} measured round {request.round}, in which it has no place")
        former = self._latest.get(peer)
        # One line for each member and round, however often a call is repeated.
        if former is None or former.round < request.round:
            self._latest[peer] = request
            fields = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
            self._metrics.write(self._ledger.now(), "measurement", fields)
        return pb.MeasureReply()

    @_answering
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        state = self._ledger.state
        return pb.StatusReply(
            run=self._spec.run_id,
            spec_json=self._spec.canonical_json,
            phase=state.phase.value,
            sentence=sentence(state, self._spec),
            rounds_decided=state.rounds_decided,
            rounds_committed=state.committed,
            rounds_aborted=state.aborted,
            peers=[self._peer_status(peer) for peer in state.peers.values()],
            latest=self._latest.values(),
            plan=convert.plan_to_pb(state.plans[-1]) if state.plans else None,
            anchors_agree=not state.diverged,
        )

    def _peer_status(self, peer: Peer) -> pb.PeerStatus:
        state = self._ledger.state
        pulse = state.pulses[peer.peer]
        seat = state.seat(peer.peer, state.current_round)
        return pb.PeerStatus(
            peer=peer.peer,
            role=peer.role.value,
            lifecycle=peer.lifecycle.value,
            round=pulse.round,
            inner_step=pulse.inner_step,
            seen_seconds_ago=max(0.0, self._ledger.now() - pulse.seen),
            place="" if seat is None else str(seat),
        )


def serve(service: Any) -> grpc.aio.Server:
    """A server for `service` with bounded messages and calls; give it a port, then start it."""
    server = grpc.aio.server(
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # Members keep connections alive through routers that forget the silent.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    pb_grpc.add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    return server
