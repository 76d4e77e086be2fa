"""A transport over the virtual network, from the parts of node.exchange alone. The DHT is a dictionary."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from node.checkpoint.download import CheckpointDownload
from node.exchange.allow_list import AllowList, NotAdmitted
from node.exchange.arbiter import PayloadArbiter
from node.exchange.object_source import NO_OBJECTS, ObjectSource
from node.exchange.payload_calls import PayloadCalls
from node.exchange.payload_service import PayloadService, PeerCalls, Wanted, checkpoint_server
from node.exchange.payload_store import PayloadStore
from node.exchange.transport import (
    ArbiterPeer,
    Enter,
    ExchangeResult,
    RoundEnd,
    ServedStages,
    Transport,
    member_exchange,
    no_stage,
)
from node.ipc.stored_payload import StoredPayload
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply, RangeRequest, StateRequest
from protocol.server.line import UNLIMITED, Line
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId, Verdict
from tests.virtual.network import current_machine
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.rpc_client import MessageCodec, VirtualCall, VirtualChannel
from tests.virtual.rpc_server import VirtualServer

_BOOTSTRAP = "coordinator"
_SEARCH_SECONDS = 0.2
_QUESTIONS = {each.__name__: each for each in (DescriptorMessage, RangeRequest, StateRequest)}


@dataclass
class Dht:
    """The records of all peers."""

    records: dict[PeerId, tuple[PeerRecord, float]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Host and port of each peer's server, by peer id."""
    searching: dict[tuple[int, int], dict[str, PayloadDescriptor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """The peers that search for a group for a (stage, round) without the coordinator."""


class PayloadServer(PeerCalls):
    """Carries the calls of one machine for payloads and checkpoints of all stages, and those of others."""

    def __init__(self, rpc: VirtualGrpc, dht: Dht, peer: PeerId, allow_list: AllowList) -> None:
        self._rpc, self._dht, self._peer, self._allow_list = rpc, dht, peer, allow_list
        self.services: dict[int, PayloadService] = {}
        self._server: VirtualServer | None = None

    async def listen(self) -> VirtualServer:
        self._server = server = VirtualServer(self._rpc, ())
        server.add_generic_rpc_handlers([self])
        port = server.add_secure_port("payloads:0", None)
        await server.start()
        self._dht.addresses[self._peer] = f"{current_machine()}:{port}"
        return server

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)

    async def ask(self, peer: str, stage: int, wanted: Wanted) -> AsyncGenerator[PayloadChunk, None]:
        call = self._call(peer, f"{stage}/{type(wanted).__name__}", PayloadChunk)
        with _as_os_error():
            await call.write(wanted)
        call.done_writing()
        return _replies(call)

    async def push(self, peer: str, stage: int, parts: AsyncIterator[PayloadChunk]) -> PushReply:
        call = self._call(peer, f"{stage}/push", PushReply)
        with _as_os_error():
            async for part in parts:
                await call.write(part)
        call.done_writing()
        async with aclosing(_replies(call)) as replies:
            return await anext(replies)

    def _call(self, peer: str, name: str, answer: type[Any]) -> VirtualCall:
        if peer not in self._dht.addresses:
            raise ConnectionError(f"no peer {peer} is known")
        channel = VirtualChannel(self._rpc, self._dht.addresses[peer])
        return VirtualCall(channel, name, MessageCodec(_serialized, answer.FromString), {})

    def service(self, details: Any) -> Any:
        """The handler of a call, as a virtual server asks for it."""
        stage, _, question = details.method.partition("/")
        if (service := self.services.get(int(stage) if stage.isdigit() else -1)) is None:
            return None

        async def answer(requests: AsyncIterator[Any], context: Any) -> None:
            caller = self._rpc.peer_of(context.peer())
            try:
                self._allow_list.check(caller, details.method)
                if question == "push":
                    await context.write(await service.take_push(caller, requests))
                    return
                async with aclosing(service.answer(caller, await anext(requests))) as chunks:
                    async for chunk in chunks:
                        self._allow_list.check(caller, details.method)
                        await context.write(chunk)
            except NotAdmitted as error:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))

        return SimpleNamespace(
            request_streaming=True,
            response_streaming=True,
            stream_stream=answer,
            request_deserializer=_QUESTIONS.get(question, PayloadChunk).FromString,
            response_serializer=_serialized,
        )


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn the errors of a virtual call into those of a connection."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(str(error.details())) from None


async def _replies(call: VirtualCall) -> AsyncGenerator[Any, None]:
    try:
        with _as_os_error():
            async for reply in call:
                yield reply
    finally:
        call.cancel()


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class VirtualTransport(Transport):
    """A transport over the virtual network."""

    addresses = ()

    def __init__(self, rpc: VirtualGrpc, dht: Dht, identity: Identity, run: str, client_mode: bool) -> None:
        self._rpc, self._dht, self._run, self._client_mode = rpc, dht, run, client_mode
        self._identity, self._allow_list = identity, AllowList()
        self.server = PayloadServer(rpc, dht, identity.peer, self._allow_list)
        self._reductions: dict[int, Any] = {}  # of a run with exchange "reduced"
        self._closed = asyncio.Event()

    async def host_stages(self, hosted: ServedStages) -> None:
        assert not self.server.services, "real processes host stages once"
        listening = None if self._client_mode else await self.server.listen()
        for stage, capacity in hosted.capacities.items():
            store = PayloadStore(hosted.folder_of(stage), hosted.keep_rounds)
            checkpoints = checkpoint_server(hosted)
            own = self._identity.peer, stage, capacity, store, checkpoints, self.server
            self.server.services[stage] = PayloadService(*own)
            if hosted.spec is not None and member_exchange(hosted.spec):
                from tests.virtual.reduction import reduction_peer  # noqa: PLC0415  it needs hivemind

                me, spec = self._identity, hosted.spec
                self._reductions[stage] = await reduction_peer(
                    self._rpc, self._dht, listening, me, self._run, stage, spec, store, self._allow_list
                )

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = (),
        members: Collection[PeerId] | None = None,
    ) -> None:
        self._allow_list.admit(sorted(set(peers) - set(banned)))

    async def disconnect(self, peers: Collection[PeerId]) -> None:
        pass  # the connections of this network do not die

    async def contact(self, addresses: Mapping[str, str]) -> None:
        pass

    async def restart(self) -> None:
        pass  # it has no address that could change

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        self._check_dht()
        self._dht.records[record.peer] = (record, asyncio.get_running_loop().time() + ttl)

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        self._check_dht()
        now = asyncio.get_running_loop().time()
        return {peer: record for peer, (record, ends) in self._dht.records.items() if now < ends}

    async def exchange(
        self,
        payload: bytes,
        descriptor: PayloadDescriptor,
        group: ExchangeGroup | None,
        *,
        expected: int,
        deadline: float,
    ) -> ExchangeResult:
        clock = asyncio.get_running_loop().time
        ends, service = clock() + deadline, self.server.services[descriptor.stage]
        reduction = self._reductions.get(descriptor.stage)
        service.payloads.break_off()
        if reduction is not None:
            reduction.break_off()
        await service.payloads.hold(descriptor, bytes(payload))
        if reduction is not None:
            if group is None:
                return ExchangeResult((descriptor,))
            result: ExchangeResult = await reduction.reduce(descriptor, bytes(payload), group, deadline)
            return result
        members = list(group.descriptors) if group else await self._search(descriptor, expected, deadline / 2)
        seconds, only_dials = max(0.0, ends - clock()), self._client_mode
        return await service.exchange(
            descriptor, members, seconds, allow_list=self._allow_list, push=only_dials, group=group
        )

    async def end_round(self, ended: RoundEnd) -> None:
        if (reduction := self._reductions.get(ended.stage)) is not None:
            await reduction.end_round(ended)

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> StoredPayload:
        service = self.server.services.get(entry.descriptor.stage) or self._any_service()
        return await service.payloads.fetch(entry, deadline)

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        await self._any_service(ErrorCode.STATE_UNAVAILABLE).fetch_checkpoint(download, deadline)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()
        await self.server.close()

    def _any_service(self, code: ErrorCode = ErrorCode.PAYLOAD_UNAVAILABLE) -> PayloadService:
        if not self.server.services:
            raise no_stage(code)
        return next(iter(self.server.services.values()))

    async def _search(
        self, own: PayloadDescriptor, expected: int, seconds: float
    ) -> Sequence[PayloadDescriptor]:
        """The payloads of all peers that search for a group for this round."""
        searching = self._dht.searching[own.stage, own.round_number]
        searching[own.owner] = own
        for _ in range(round(seconds / _SEARCH_SECONDS)):
            if len(searching) >= expected:
                break
            await asyncio.sleep(_SEARCH_SECONDS)
        return list(searching.values())

    def _check_dht(self) -> None:
        own = current_machine()
        others = {_BOOTSTRAP, *(address.partition(":")[0] for address in self._dht.addresses.values())} - {
            own
        }
        if not any(self._rpc.network.reaches(own, other) for other in others):
            raise HetnodeError(
                ErrorCode.DHT_UNREACHABLE, "The virtual DHT is out of reach.", "Heal the virtual network."
            )


class VirtualArbiter(ArbiterPeer):
    """The coordinator's own peer: the production arbiter over the virtual network."""

    addresses = ()
    port = 0

    def __init__(self, server: PayloadServer, allow_list: AllowList, arbiter: PayloadArbiter) -> None:
        self._server, self._allow_list, self._arbiter = server, allow_list, arbiter

    @property
    def arbiter(self) -> VirtualArbiter:
        return self

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = (),
        members: Collection[PeerId] | None = None,
    ) -> None:
        self._allow_list.admit(set(peers) - set(banned))

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        return await self._arbiter.arbitrate(descriptor, donors, deadline)

    async def forget_payloads(self, before_round: int) -> None:
        self._arbiter.forget(before_round)

    async def close(self) -> None:
        await self._server.close()


@dataclass(frozen=True)
class VirtualPackage:
    """The transports of one virtual network: a TransportPackage."""

    rpc: VirtualGrpc
    dht: Dht

    async def start(
        self,
        identity: Identity,
        enter: Enter,
        line: Line = UNLIMITED,
        objects: ObjectSource = NO_OBJECTS,
    ) -> VirtualTransport:
        entry = await enter()
        return VirtualTransport(self.rpc, self.dht, identity, entry.run, entry.client_mode)

    async def start_arbiter(
        self, identity: Identity, enter: Enter, spec: RunSpec, folder: Path
    ) -> VirtualArbiter:
        await enter()
        allow_list = AllowList()
        server = PayloadServer(self.rpc, self.dht, identity.peer, allow_list)
        await server.listen()

        async def serve(stage: int, *of_stage: Any) -> PayloadCalls:
            service = PayloadService(identity.peer, stage, *of_stage, server)
            server.services[stage] = service
            return service

        return VirtualArbiter(server, allow_list, await PayloadArbiter.of_run(spec, folder, serve))
