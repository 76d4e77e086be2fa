"""The gRPC services of the coordinator and of a relay: every call that one peer can make.

Each input is a request of one call, or several calls in order. See :mod:`benchmarks.fuzz`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NoReturn

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import DecodeError, Message

from benchmarks.fuzz_seeds import (
    AUTHORITY,
    CONTRIBUTION,
    MEASUREMENT,
    PEER,
    PEERS,
    SPEC,
    TLS_KEY,
    Target,
    descriptor_of,
    messages_in,
    sign,
    stream_of,
)
from coordinator.api.access import AccessControl
from coordinator.api.admin import Admin
from coordinator.api.enrollment import EnrollmentService
from coordinator.api.operator import ExplanationDesk, OperatorService
from coordinator.api.run_records import RunRecords
from coordinator.api.service import CoordinatorService
from coordinator.membership.reachability import check_claims, reached
from coordinator.membership.sources import MemberSources
from coordinator.ops.explain.questions import question_of
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.ops.receipts import Receipts
from coordinator.run.command_loop import Stopped
from coordinator.run.decide import decide
from coordinator.run.state import commands
from coordinator.run.state.events import PeerSeen
from coordinator.run.state.state import State
from coordinator.store import event_codec
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import operator_pb2
from protocol.relay.destinations import Destinations
from protocol.relay.server import RelayService
from protocol.status import Explanation, Measurement, Statement, fields_of
from protocol.trust.envelope import enrollment_message, renewal_message
from protocol.trust.names import OPERATOR_URI, peer_uri
from protocol.trust.reachability import Addresses, Reached
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, Role
from protocol.wire import operator_calls as calls
from protocol.wire.convert.fields import banned_from_pb
from protocol.wire.convert.payloads import descriptor_from_pb
from protocol.wire.convert.plans import places_from_pb, relays_from_pb, sources_from_pb
from protocol.wire.groups import group_digest
from protocol.wire.records import open_plan
from protocol.wire.status import status_from_pb
from protocol.wire.typed_calls import Request, encode_request

_SOURCE, _SECRET, _INVITE = "203.0.113.7", b"s" * 16, "1" * 12
_ADDRESS = "203.0.113.7:7700"
_COORDINATOR = PEERS[2]
_SERVICES = ("Coordinator", "Enrollment", "Relay")


class _Loop:
    """A command loop without a store. What would be stored is encoded and decoded: a restart reads it."""

    def __init__(self, state: State) -> None:
        self.state, self.spec, self.time = state, state.spec, 1000.0
        self.after_tick: list[object] = []
        self.hindrance = None

    def now(self) -> float:
        return self.time

    def note_call(self, peer: PeerId) -> None:
        pass

    def wake(self, topic: object) -> None:
        pass

    def submit(self, heartbeat: commands.Heartbeat) -> None:
        self._decide(heartbeat)

    async def execute(self, command: commands.Command) -> None:
        if (refusal := self._decide(command)) is not None:
            raise refusal

    def _decide(self, command: commands.Command) -> HetnodeError | None:
        outcome = decide(self.state, command, self.time)
        for event in outcome.events:
            if not isinstance(event, PeerSeen):
                stored = event_codec.encode(event)
                assert event_codec.encode(event_codec.decode(*stored)) == stored
        self.state = outcome.state
        return outcome.refusal

    async def until(self, _: object, ready: Callable[[State], Any]) -> Any:
        """Calls that would wait end here."""
        value = ready(self.state)
        if value is None:
            raise Stopped
        return value


class _Call:
    """The context of a call with the certificate of `uri`."""

    def __init__(self, uri: str) -> None:
        self._certificate = {"peer_uri": (uri.encode(),), "x509_pem_cert": (_pem(),)}

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        return self._certificate

    def peer(self) -> str:
        return f"ipv4:{_SOURCE}:4444"


@cache
def _pem() -> bytes:
    return AUTHORITY.for_peer(PEER, TLS_KEY)


class _Exposed:
    async def expose(self, peer: PeerId, seconds: float, wanted_port: int) -> AsyncIterator[int]:
        assert peer == PEER
        assert 0 <= wanted_port < 65536
        yield wanted_port


def _record(_: float, measurement: Measurement) -> None:
    json.dumps(fields_of(measurement))


async def _dial(_: PeerId, address: str, caller: str) -> bytes:
    await Destinations(tuple).place(address, caller, own_ports=(7701,))
    return bytes(32)


async def _dial_back(peer: PeerId, caller: str, addresses: Addresses) -> Reached:
    check_claims(addresses.endpoint, addresses.dht)
    return reached(addresses, "", "")


async def _no_decision(stage: int, round_number: int) -> NoReturn:
    raise KeyError((stage, round_number))


class _Server:
    """All services on one state. Refused calls leave it as it is."""

    def __init__(self, state: State) -> None:
        self.loop: Any = _Loop(state)
        sources = MemberSources()
        sources.admitted = (1, 0)  # all that are to come
        access = AccessControl(self.loop, sources, lambda _: _SOURCE)
        metrics: Any = SimpleNamespace(record_measurement=_record, newest={})
        sign_here = partial(sign, number=2)
        past: Any = None
        receipts = Receipts(access, state.spec, state.run, past, past)

        async def explain(_: str, question: str) -> Explanation:
            question_of(question, state, events=0)
            return Explanation(Statement("now"))

        decisions: Any = SimpleNamespace(of=_no_decision)
        history: Any = None
        health = HealthMonitor(state)
        records = RunRecords(metrics, decisions, health, history, Counter(), explain)
        coordinator = CoordinatorService(
            self.loop, records, access, sources, AUTHORITY, sign_here, (), _dial_back
        )
        exposed: Any = _Exposed()
        self._access = access
        self._services = {
            "Coordinator": coordinator,
            "Enrollment": EnrollmentService(self.loop, AUTHORITY, _COORDINATOR, _ADDRESS, lambda _: _SOURCE),
            "Operator": OperatorService(
                access,
                (Admin(self.loop, (), AUTHORITY.pin, _ADDRESS, _ADDRESS),),
                (ExplanationDesk(explain), receipts),
            ),
            "Relay": RelayService(exposed, _dial),
        }

    async def call(self, service: str, method: str, request: Message) -> None:
        """Raises HetnodeError. A call that would wait ends."""
        context: Any = _Call(OPERATOR_URI if service == "Operator" else peer_uri(PEER))
        self._access.check(context)
        answer = getattr(self._services[service], method)(request, context)
        with suppress(Stopped):
            if hasattr(answer, "__anext__"):
                (await anext(answer)).SerializeToString()
                await answer.aclose()
            else:
                (await answer).SerializeToString()

    async def check_others(self) -> None:
        """Time passes. Another member then understands what the coordinator says."""
        self.loop.time += 0.5
        for command in (commands.Heartbeat(PeerId(PEERS[1]), 1, 1), commands.Tick()):
            await self.loop.execute(command)
        context: Any = _Call(peer_uri(PEERS[1]))
        coordinator: Any = self._services["Coordinator"]
        watching = coordinator.Watch(pb.WatchRequest(peer=PEERS[1]), context)
        try:
            status_from_pb(await coordinator.Status(pb.StatusRequest(), context))
            update = await anext(watching)
            open_plan(update.signed_plan, update.signature, self.loop.state.run, _COORDINATOR)
            banned_from_pb(update.banned)
            places_from_pb(update.followers)
            relays_from_pb(update.relays)
            sources_from_pb(update.sources)
        except HetnodeError as error:
            raise AssertionError(f"another member refuses what the coordinator says: {error}") from error
        finally:
            await watching.aclose()


@cache
def _training() -> State:
    """A run of a full replica and a pipeline, whose first stage is PEER's, in round 1. All are live."""
    loop = _Loop(State(SPEC, SPEC.name))
    secret = hashlib.sha256(_SECRET).hexdigest()
    roles = zip(PEERS, (Role.STAGE, Role.STAGE, Role.REPLICA), strict=True)
    begin = (
        commands.Start(),
        commands.CreateInvite(_INVITE, secret, 5, 3600.0, None),
        *(
            commands.Join(
                PROTOCOL_VERSION, SPEC.hash, PeerId(peer), role, Capacity("cpu", 1 << 30, 2), _ADDRESS
            )
            for peer, role in roles
        ),
        *(
            commands.Attest(PeerId(peer), stage, 0, "stage", "a" * 64)
            for peer, stage in ((PEER, 0), (PEERS[1], 1), (PEERS[2], 0), (PEERS[2], 1))
        ),
        commands.Attest(PeerId(PEERS[1]), 0, 0, "embedding", "b" * 64),
    )
    for command in begin:
        asyncio.run(loop.execute(command))
    assert loop.state.plans, "the run has begun"
    return loop.state


@cache
def _matched() -> State:
    """As :func:`_training`, after the group of stage 0 was closed."""
    loop = _Loop(_training())
    for number in (0, 2):
        offer = commands.Offer(PeerId(PEERS[number]), descriptor_from_pb(descriptor_of(0, number)))
        asyncio.run(loop.execute(offer))
    assert loop.state.round_of(0, 1).group, "all have offered"
    return loop.state


@cache
def _away() -> State:
    """As :func:`_training`, after PEER has left."""
    loop = _Loop(_training())
    asyncio.run(loop.execute(commands.Leave(PeerId(PEER), "r")))
    return loop.state


def _requests() -> Mapping[type[Message], Message]:
    """A valid request of each type."""
    key = TLS_KEY.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    own, other = descriptor_of(0), descriptor_of(0, number=2)
    estimates = pb.Estimates(
        capacity=CONTRIBUTION.capacity, links=[pb.LinkEstimate(peer=PEERS[1], bandwidth=1e6)]
    )
    addresses = pb.Addresses(endpoint=_ADDRESS, dht="203.0.113.7:7701")
    measurement = pb.Measurement()
    measurement.CopyFrom(MEASUREMENT)
    measurement.replica = 1
    proof, new = enrollment_message(AUTHORITY.pin, key, _INVITE), renewal_message(AUTHORITY.pin, key)
    requests = (
        pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION, role="stage", capacity=CONTRIBUTION.capacity,
            endpoint=_ADDRESS, spec_hash=SPEC.hash, addresses=addresses, name="José",
        ),
        pb.UpdateAddressesRequest(addresses=addresses),
        pb.TryAddressesRequest(addresses=addresses),
        pb.WatchRequest(),
        pb.HeartbeatRequest(round=1, inner_step=2, estimates=estimates),
        pb.LeaveRequest(reason="r"),
        pb.DrainRequest(reason="r"),
        pb.ReportLinkRequest(epoch=1, neighbour=PEERS[1], address=_ADDRESS, reason="r"),
        pb.RetreatRequest(epoch=1, reason="r"),
        pb.MatchRequest(descriptor=own, packs=True),
        pb.ReportRequest(stage=0, round=1, held=[own, other]),
        pb.AwaitDecisionRequest(stage=1, round=1),
        pb.AttestRequest(stage=0, round=0, part="stage", digest="b" * 64),
        pb.LocateRequest(stage=0, part="stage"),
        measurement,
        pb.RenewRequest(tls_public_key=key, proof=sign(new)),
        pb.StatusRequest(),
        pb.EnrollRequest(
            protocol_version=PROTOCOL_VERSION, invite_id=_INVITE, secret=_SECRET,
            tls_public_key=key, proof=sign(proof),
        ),
        pb.ExposeRequest(dht_port=7701),
        pb.DialRequest(address="127.0.0.1:7701"),
    )  # fmt: skip
    for request in requests:
        if "peer" in request.DESCRIPTOR.fields_by_name:
            request.peer = PEER
    return {type(request): request for request in requests}


def _questions() -> tuple[Message, ...]:
    """A valid call of each kind to the service Operator."""
    other = PeerId(PEERS[2])
    requests: tuple[Request[Any], ...] = (
        calls.IssueInvite(2, 60.0, Role.RELAY),
        calls.ListInvites(),
        calls.WithdrawInvite(_INVITE),
        calls.ListPeers(),
        calls.BanPeer(other, "r", True),
        calls.UnbanPeer(other),
        calls.TakeName(other),
        calls.HoldRun("r"),
        calls.GoOn(),
        calls.RestoreRound(0, "r"),
        calls.ListRollbacks(),
        calls.AskWhy("now"),
        calls.AskReceipt(),
        calls.AskRank(),
    )
    encoded = map(encode_request, requests)
    return tuple(operator_pb2.OperatorCall(method=each.method, body=bytes(each.body)) for each in encoded)


def _report_by_positions() -> pb.ReportRequest:
    group = _matched().round_of(0, 1).group
    assert group, "all have offered"
    digest = group_digest(group.descriptors)
    return pb.ReportRequest(peer=PEER, stage=0, round=1, packs=True, group=digest, positions=b"\3")


def _methods(service: str) -> list[tuple[str, type[Message]]]:
    """The calls with one request. Those with a stream are links and probes, which have their own targets."""
    methods = pb.DESCRIPTOR.services_by_name[service].methods
    return [(each.name, getattr(pb, each.input_type.name)) for each in methods if not each.client_streaming]


def _one_call(loop: asyncio.AbstractEventLoop, service: str, method: str, *seeds: Message) -> Target:
    kind, before = type(seeds[0]), {"Report": _matched, "Join": _away}.get(method, _training)

    async def call(data: bytes) -> None:
        server = _Server(before())
        try:
            await server.call(service, method, kind.FromString(data))
        except DecodeError as refusal:
            raise ValueError(refusal) from None
        finally:
            await server.check_others()

    def decode(data: bytes) -> None:
        loop.run_until_complete(call(data))

    return Target(f"call of {method}", decode, tuple(each.SerializeToString() for each in seeds), kind)


def _several_calls(loop: asyncio.AbstractEventLoop, requests: Mapping[type[Message], Message]) -> Target:
    """Calls of one peer to the coordinator, in order. The first byte of each message selects the call."""
    methods = _methods("Coordinator")

    async def calls(data: bytes) -> None:
        server, refusal = _Server(_training()), None
        for message in messages_in(data)[:8]:
            name, kind = methods[(message[0] if message else 0) % len(methods)]
            try:
                await server.call("Coordinator", name, kind.FromString(message[1:]))
            except DecodeError:
                pass
            except HetnodeError as error:
                refusal = error
            await server.check_others()
        if refusal is not None:
            raise refusal

    names = [name for name, _ in methods]

    def seed(*chosen: str) -> bytes:
        indices = (names.index(name) for name in chosen)
        return stream_of([bytes([i]) + requests[methods[i][1]].SerializeToString() for i in indices])

    seeds = (
        seed("Attest", "Heartbeat", "Match", "Report", "AwaitDecision"),
        seed("Join", "Measure", "ReportLink", "Retreat", "Heartbeat"),
        seed("UpdateAddresses", "Drain", "Match", "Leave", "Join"),
    )
    return Target("coordinator's calls", lambda data: loop.run_until_complete(calls(data)), seeds)


def targets(loop: asyncio.AbstractEventLoop) -> list[Target]:
    """Every call with one request, alone, and the coordinator's in any order."""
    requests, _ = _requests(), (_matched(), _away())  # not inside a call: that has a running loop
    others = {"Report": (_report_by_positions(),)}
    alone = [
        _one_call(loop, service, method, requests[kind], *others.get(method, ()))
        for service in _SERVICES
        for method, kind in _methods(service)
    ]
    return [*alone, _one_call(loop, "Operator", "Ask", *_questions()), _several_calls(loop, requests)]
