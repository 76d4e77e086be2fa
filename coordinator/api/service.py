"""The coordinator's gRPC API for peers: turns messages into commands, and records into messages.

Waiting calls (Match, Report, AwaitDecision, Watch) hold only a future in the command loop. The end of a
waiting call changes nothing, and every call may be repeated.

One file because it mirrors one service, call by call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.api.access import AccessControl
from coordinator.api.dial_back import DialBack
from coordinator.api.enrollment import renew
from coordinator.api.large_answers import LargeAnswers
from coordinator.api.measuring import believed, check_place, possible
from coordinator.api.remembered import closing_time, heartbeat_interval
from coordinator.api.round_messages import RoundMessages
from coordinator.api.run_news import RunNews
from coordinator.api.run_records import RunRecords
from coordinator.api.spared_answer import SparedAnswer
from coordinator.api.watch import Announcements, Watcher, alone
from coordinator.authority import Authority
from coordinator.membership.joining import check_compatible
from coordinator.membership.open_places import CLOSED, OpenTerms
from coordinator.membership.scores import Scores
from coordinator.membership.sources import MemberSources
from coordinator.membership.validation import check_not_excluded, live_peer, unknown_round
from coordinator.placement.repair import seconds_to_repair
from coordinator.run.command_loop import (
    ADMISSION_TOPIC,
    RUN_TOPIC,
    CommandLoop,
    Topic,
    decision_topic,
    group_topic,
)
from coordinator.run.rounds.attestation import locate, record_of, required_digest
from coordinator.run.state import commands
from coordinator.run.state.state import State
from coordinator.status.run_status import run_status
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.calls import Context
from protocol.server.clock import steady_from
from protocol.trust.envelope import Signer, spec_message
from protocol.trust.names import identity_of, peer_of
from protocol.trust.reachability import Addresses
from protocol.types import Decision, ExchangeGroup, PeerId, RelayAddress
from protocol.wire.convert.fields import (
    endpoint_from_pb,
    name_from_pb,
    part_from_pb,
    peer_from_pb,
    public_name_from_pb,
    role_from_pb,
    shortened,
)
from protocol.wire.convert.payloads import (
    descriptor_from_pb,
    descriptors_from_pb,
    rejections_from_pb,
    result_claim_from_pb,
)
from protocol.wire.convert.plans import (
    addresses_from_pb,
    capacity_from_pb,
    estimates_from_pb,
    reached_to_pb,
    relay_to_pb,
)
from protocol.wire.probing import MAX_PROBE_SECONDS, ProbeDoor, answer_all, limited
from protocol.wire.records import seal_state
from protocol.wire.status import kept_from_pb, measurement_from_pb, status_to_pb, waits_from_pb

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Message)

_PROBES_AT_ONCE = 4
_FEW_PEERS = 100  # whose status takes a few milliseconds of the event loop
_ADMISSION_SECONDS = 2.0
"""How long a join waits until the DHT peer accepts the node's source; nodes dial it again in any case."""


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one run.

    Args:
        command_loop: owns the state; it is running.
        records: of the run, filled and read here.
        access: checks who calls.
        sources: of the members, which all of them are told.
        authority: issues certificates.
        sign: signs with the coordinator's identity.
        dht_peers: multiaddresses of the DHT bootstrap peer, told to every node that joins.
        dial_back: tries the addresses that a peer claims.
        relay: the coordinator's own.
        terms: for peers without an invite.
        succession: what members are told of this coordinator and its partner.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        records: RunRecords,
        access: AccessControl,
        sources: MemberSources,
        authority: Authority,
        sign: Signer,
        dht_peers: Sequence[str],
        dial_back: DialBack,
        relay: RelayAddress | None = None,
        terms: OpenTerms = CLOSED,
        succession: Callable[[State], pb.Succession] = alone,
    ) -> None:
        self._terms = terms
        self._command_loop = command_loop
        self._spec, self._run = command_loop.spec, command_loop.state.run
        self._records, self._time = records, steady_from(time.time())
        self._scores, self._status = Scores(), SparedAnswer(self._newest_status)
        self._access = access
        self._sources = sources
        self._authority = authority
        self._sign = sign
        self._dht_peers, self._dial_back = tuple(dht_peers), dial_back
        self._spec_signature = sign(spec_message(self._run, self._spec.canonical_json))
        self._announcements = Announcements(
            *(self._run, sign, sources, relay, records.resting),
            stall=RunNews(command_loop, records.resting).stall,
            succession=succession,
        )
        self._closing_time, self._interval = closing_time(), heartbeat_interval()
        self._messages, self._large_answers = RoundMessages(), LargeAnswers()
        self._probes = ProbeDoor(_PROBES_AT_ONCE, command_loop.now)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        peer = self._access.peer(context, request.peer)
        self._access.check_rate(peer, "asks to join")
        spec_hash = request.spec_hash[:64]
        # Before the other fields are read: another version may give them another meaning.
        version = check_compatible(self._spec, request.protocol_version, spec_hash, request.oldest_protocol)
        if self._terms.concern(self._command_loop.state, peer):
            # Its certificate may be older than its place. Nothing is dialled for who waits.
            await self._command_loop.execute(self._terms.ask(peer, self._access.caller(context)[0]))
        role = None if request.any_role else role_from_pb(request.role)
        capacity = capacity_from_pb(request.capacity)
        claims = Addresses(endpoint_from_pb(request.endpoint))
        if request.HasField("addresses"):
            claims = addresses_from_pb(request.addresses)
        found = await self._dial_back(peer, context.peer(), claims)
        await self._command_loop.execute(
            commands.Join(
                *(version, spec_hash, peer, role, capacity),
                endpoint=claims.endpoint if found.endpoint else "",
                # A client that tells no addresses is believed.
                reachability=found.reachability if request.HasField("addresses") else None,
                claimed=claims.endpoint,
                problem=found.reason,
                name=public_name_from_pb(request.name),
            )
        )
        await self._until_admitted()
        joined = self._command_loop.state.peers[peer]
        return pb.JoinReply(
            spec_json=self._spec.canonical_json,
            spec_hash=self._spec.hash,
            run=self._run,
            dht_peers=self._dht_peers,
            spec_signature=self._spec_signature,
            time=self._time(),  # a node compares its clock: certificates and records expire by it
            relays=map(relay_to_pb, self._announcements.relays(self._command_loop.state)),
            reached=reached_to_pb(found),
            role=joined.role,
            role_reason=shortened(joined.role_reason),
            name=self._command_loop.state.name_of(peer),
            protocol_version=version,
        )

    async def UpdateAddresses(
        self, request: pb.UpdateAddressesRequest, context: Context
    ) -> pb.UpdateAddressesReply:
        peer = self._access.peer(context, request.peer)
        live_peer(self._command_loop.state, peer)
        self._access.check_rate(peer, "asks to join")
        claims = addresses_from_pb(request.addresses)
        found = await self._dial_back(peer, context.peer(), claims)
        endpoint = claims.endpoint if found.endpoint else ""
        await self._command_loop.execute(
            commands.UpdateAddresses(peer, endpoint, found.reachability, claims.endpoint, found.reason)
        )
        return pb.UpdateAddressesReply(reached=reached_to_pb(found))

    async def TryAddresses(self, request: pb.TryAddressesRequest, context: Context) -> pb.TryAddressesReply:
        peer = self._access.peer(context, request.peer)
        self._access.check_rate(peer, "asks to join")
        found = await self._dial_back(peer, context.peer(), addresses_from_pb(request.addresses))
        source, port = self._access.caller(context)
        relays = map(relay_to_pb, self._announcements.relays(self._command_loop.state))
        return pb.TryAddressesReply(
            reached=reached_to_pb(found), source=source, source_port=port, relays=relays
        )

    async def _until_admitted(self) -> None:
        """Wait until the coordinator's DHT peer accepts connections of all sources that were noted so far."""
        noted = self._sources.position

        def are_admitted(_: State) -> bool | None:
            return True if self._sources.admitted >= noted else None

        with suppress(TimeoutError):
            async with asyncio.timeout(_ADMISSION_SECONDS):
                await self._command_loop.until(ADMISSION_TOPIC, are_admitted)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        self._access.peer(context, request.peer)
        return renew(self._authority, request)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.PlanUpdate]:
        peer = self._access.peer(context, request.peer)
        if not request.end_only:
            live_peer(self._command_loop.state, peer)
        finished = False
        with Watcher(peer, self._announcements, request.end_only, request.changes) as watcher:
            while not finished:
                update = await self._until(peer, RUN_TOPIC, watcher.update)
                finished = update.finished
                yield update

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        peer = self._access.peer(context, request.peer)
        estimates = estimates_from_pb(request.estimates) if request.HasField("estimates") else None
        waits, kept = waits_from_pb(request.waits), kept_from_pb(request.kept)
        heartbeat = commands.Heartbeat(peer, request.round, request.inner_step, estimates, waits, kept)
        live_peer(self._command_loop.state, peer)
        if estimates is None:
            # It stores nothing, so it need not wait for all commands at the end of a large round.
            self._command_loop.submit(heartbeat)
        else:
            await self._command_loop.execute(heartbeat)
        state = self._command_loop.state
        closes = self._closing_time.of(state)
        return pb.HeartbeatReply(
            round=state.current_round,
            closing=closes is not None,
            # A span, not a time: the clocks of two machines differ.
            closes_seconds=0.0 if closes is None else max(0.0, closes - self._command_loop.now()),
            interval=self._interval.of(state),
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        peer = self._access.peer(context, request.peer)
        await self._command_loop.execute(commands.Leave(peer, _printable(request.reason)))
        return pb.LeaveReply()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        peer = self._access.peer(context, request.peer)
        await self._command_loop.execute(commands.Drain(peer, _printable(request.reason)))
        return pb.DrainReply()

    async def Probe(self, requests: AsyncIterator[pb.ProbeMessage], context: Context) -> None:
        """Open to every certificate of the run, also before its peer has joined. The data is discarded."""
        caller = peer_of(identity_of(context)) or ""
        self._access.check_member(context)
        with self._probes.one_more(caller) as admit_data:
            try:
                async with asyncio.timeout(MAX_PROBE_SECONDS):
                    await answer_all(caller, requests, context.write, self._command_loop.now, admit_data)
            except TimeoutError:
                raise limited(f"it was not over after {MAX_PROBE_SECONDS:.0f} s") from None
            except (grpc.aio.BaseError, asyncio.InvalidStateError):
                return  # the caller has disconnected

    async def ReportLink(self, request: pb.ReportLinkRequest, context: Context) -> pb.ReportLinkReply:
        peer = self._access.peer(context, request.peer)
        neighbour, address = peer_from_pb(request.neighbour), endpoint_from_pb(request.address)
        await self._command_loop.execute(
            commands.ReportLink(peer, request.epoch, neighbour, address, _printable(request.reason))
        )
        return pb.ReportLinkReply()

    async def Retreat(self, request: pb.RetreatRequest, context: Context) -> pb.RetreatReply:
        peer = self._access.peer(context, request.peer)
        steps = request.steps if request.HasField("steps") else None
        told = request.epoch, _printable(request.reason), request.round, steps
        former = self._command_loop.state.breaks.get(peer)
        await self._command_loop.execute(commands.Retreat(peer, *told))
        state, now = self._command_loop.state, self._command_loop.now()
        return pb.RetreatReply(seconds=seconds_to_repair(state, peer, former, request.epoch, now))

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        peer = self._access.peer(context, request.peer)
        descriptor = descriptor_from_pb(request.descriptor)
        await self._command_loop.execute(commands.Offer(peer, descriptor))
        key = (descriptor.stage, descriptor.round_number)

        def closed(state: State) -> ExchangeGroup | None:
            group = state.round_of(*key).group
            if group is None and state.is_decided(*key):
                # The round was decided without offers. An empty group sends the caller to the decision.
                return ExchangeGroup(f"{self._run}/{key[0]}/{key[1]}", ())
            return group

        group = await self._until(peer, group_topic(*key), closed)
        return await self._with_place(self._messages.of_group(group, request.packs), context)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.DecisionReply:
        peer = self._access.peer(context, request.peer)
        by_positions = self._messages.held(self._command_loop.state, request) if request.group else None
        held = by_positions.held if by_positions else descriptors_from_pb(request.held)
        rejected = rejections_from_pb(request.rejected)
        result = result_claim_from_pb(request.result) if request.HasField("result") else None
        about = peer, request.stage, request.round
        await self._command_loop.execute(commands.Report(*about, held, rejected, result))
        decision = await self._decision(peer, request.stage, request.round)
        answer = self._messages.of_decision(decision, request.packs, by_positions)
        return await self._with_place(answer, context)

    async def AwaitDecision(self, request: pb.AwaitDecisionRequest, context: Context) -> pb.DecisionReply:
        peer = self._access.peer(context, request.peer)
        await self._command_loop.execute(commands.Await(peer, request.stage, request.round, request.withheld))
        decision = await self._decision(peer, request.stage, request.round)
        return await self._with_place(self._messages.of_decision(decision, request.packs), context)

    async def _with_place(self, answer: M, context: Context) -> M:
        await self._large_answers.wait_for_place(answer, context)
        return answer

    async def _decision(self, peer: PeerId, stage: int, round_number: int) -> Decision:
        key = stage, round_number

        def made(state: State) -> Decision | bool | None:
            return state.decisions.get(key) or state.is_decided(*key) or None

        decision = await self._until(peer, decision_topic(*key), made)
        try:
            return decision if isinstance(decision, Decision) else await self._records.decisions.of(*key)
        except KeyError:
            raise unknown_round(round_number) from None

    async def _until(self, peer: PeerId, topic: Topic, ready: Callable[[State], T | None]) -> T:
        """As :meth:`CommandLoop.until`. Raises BANNED or QUARANTINED when `peer` is excluded meanwhile."""

        def ready_for_peer(state: State) -> T | None:
            check_not_excluded(state, peer)
            return ready(state)

        return await self._command_loop.until(topic, ready_for_peer)

    async def Attest(self, request: pb.AttestRequest, context: Context) -> pb.AttestReply:
        peer = self._access.peer(context, request.peer)
        digest = name_from_pb(request.digest, "the digest")
        part = name_from_pb(request.part, "the part")
        await self._command_loop.execute(
            commands.Attest(peer, request.stage, request.round, part=part, digest=digest)
        )
        # While no digest is settled, the caller goes on with its own anchor.
        expected = required_digest(self._command_loop.state, request.stage, request.round, part) or digest
        return pb.AttestReply(agrees=digest == expected, expected=expected)

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateReply:
        peer = self._access.peer(context, request.peer)
        state = self._command_loop.state
        live_peer(state, peer)
        part = part_from_pb(request.part)
        records = locate(state, request.stage, part)
        if request.HasField("round"):
            wanted = record_of(state, request.stage, part, request.round)
            records = () if wanted is None else (wanted,)
        sealed = [seal_state(record, self._sign) for record in records]
        return pb.LocateReply(
            states=[pb.SignedState(record=record, signature=signature) for record, signature in sealed]
        )

    async def Measure(self, request: pb.Measurement, context: Context) -> pb.MeasureReply:
        live_peer(self._command_loop.state, self._access.peer(context, request.peer))
        measurement = measurement_from_pb(request)
        check_place(self._command_loop.state, measurement)
        for change in self._scores.note(self._command_loop.state, possible(measurement)):
            await self._command_loop.execute(change)
        measurement = believed(self._command_loop.state, measurement)
        self._records.metrics.record_measurement(self._command_loop.now(), measurement)
        if not self._command_loop.state.is_unproven(measurement.peer):
            self._records.health.record(measurement)
        return pb.MeasureReply()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        self._access.check_member(context)
        is_large = len(self._command_loop.state.peers) > _FEW_PEERS
        return self._status.read() if is_large else self._newest_status()

    def _newest_status(self) -> pb.StatusReply:
        loop, records = self._command_loop, self._records
        now = loop.now(), time.time()
        newest, health = records.metrics.newest.values(), records.health.latest
        return status_to_pb(run_status(loop.state, newest, *now, records.resting, health, loop.hindrance))


def _printable(reason: str) -> str:
    """Make a reason printable. It is never refused, because a peer must always be able to leave."""
    return "".join(letter if letter.isprintable() else " " for letter in reason[:200])
