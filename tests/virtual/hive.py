"""The production exchange of payloads and checkpoints over the virtual network, without hivemind's processes.

The DHT is a dictionary.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from node.hive.arbiter import serve_arbiter
from node.hive.payload_peer import PayloadPeer
from node.hive.reduction.reduction_peer import ReductionPeer
from node.security.identity import Identity
from node.transport.allow_list import AllowList
from node.transport.arbiter import Arbiter
from node.transport.checkpoint_transfer import CheckpointServer
from node.transport.payload_store import PayloadStore
from node.transport.transport import CheckpointDownload, ExchangeResult, HostedStages, RoundEnd, Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import is_authentic, misfit
from protocol.types import (
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Rejection,
    Verdict,
)
from tests.virtual.network import current_machine
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.rpc_client import MessageCodec, VirtualCall, VirtualChannel
from tests.virtual.rpc_server import VirtualServer

_BOOTSTRAP = "coordinator"
_SEARCH_SECONDS = 0.2


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


def unguarded(p2p: Any, _: AllowList) -> Any:
    """The virtual network hands over whole messages: it has no streams of bytes to bound."""
    return p2p


class VirtualP2P:
    """The part of hivemind's P2P that servicers and stubs use."""

    def __init__(self, rpc: VirtualGrpc, dht: Dht, peer: PeerId) -> None:
        self.peer_id = PeerID.from_base58(peer)
        self._rpc, self._dht, self._peer = rpc, dht, peer
        self._handlers: dict[str, Any] = {}
        self._server: VirtualServer | None = None

    async def listen(self) -> None:
        self._server = server = VirtualServer(self._rpc, ())
        server.add_generic_rpc_handlers([self])
        port = server.add_secure_port("p2p:0", None)
        await server.start()
        self._dht.addresses[self._peer] = f"{current_machine()}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[..., Any],
        input_type: type[Any],
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        async def answer(requests: AsyncIterator[Any], context: Any) -> None:
            caller = PeerID.from_base58(self._rpc.peer_of(context.peer()))
            p2p_context = P2PContext(name, self.peer_id, caller)
            request = requests if stream_input else await anext(requests)
            if stream_output:
                async for reply in handler(request, p2p_context):
                    await context.write(reply)
            else:
                await context.write(await handler(request, p2p_context))

        self._handlers[name] = SimpleNamespace(
            request_streaming=True,
            response_streaming=True,
            stream_stream=answer,
            request_deserializer=input_type.FromString,
            response_serializer=_serialized,
        )

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, output_type: Any) -> Any:
        replies = await self.iterate_protobuf_handler(peer, name, request, output_type)
        async for reply in replies:
            return reply
        raise P2PHandlerError(f"{name}: no reply")

    async def iterate_protobuf_handler(
        self, peer: PeerID, name: str, request: Any, output_type: Any
    ) -> AsyncIterator[Any]:
        address = self._dht.addresses.get(peer.to_base58())
        if address is None:
            raise P2PHandlerError(f"failed to find any peer {peer}")
        channel = VirtualChannel(self._rpc, address)
        call = VirtualCall(channel, name, MessageCodec(_serialized, output_type.FromString), {})
        try:
            if isinstance(request, AsyncIterator):
                async for part in request:
                    await call.write(part)
            else:
                await call.write(request)
        except grpc.aio.AioRpcError as error:
            raise P2PHandlerError(str(error.details())) from None
        call.done_writing()
        return _replies(call)


async def _replies(call: VirtualCall) -> AsyncIterator[Any]:
    try:
        async for reply in call:
            yield reply
    except grpc.aio.AioRpcError as error:
        raise P2PHandlerError(str(error.details())) from None
    finally:
        call.cancel()


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class VirtualTransport(Transport):
    """A transport over the virtual network."""

    addresses = ()

    def __init__(self, rpc: VirtualGrpc, dht: Dht, identity: Identity, run: str, client_mode: bool) -> None:
        self._rpc, self._dht, self._run, self._client_mode = rpc, dht, run, client_mode
        self._peer, self._sign = identity.peer, identity.sign
        self._allow_list = AllowList()
        self._p2p = VirtualP2P(rpc, dht, identity.peer)
        self._stages: dict[int, PayloadPeer] = {}
        self._reductions: dict[int, ReductionPeer] = {}
        self._capacities: Mapping[int, int] = {}
        self._closed = asyncio.Event()

    async def host_stages(self, hosted: HostedStages) -> None:
        self._capacities = hosted.capacities
        if not self._client_mode:
            await self._p2p.listen()
        for stage, capacity in hosted.capacities.items():
            store = PayloadStore(hosted.folder_of(stage), hosted.keep_rounds)
            server = CheckpointServer.of(hosted)
            peer = PayloadPeer(self._p2p, self._run, stage, capacity, store, server)  # type: ignore[arg-type]
            if not self._client_mode:
                await peer.serve(self._allow_list, unguarded)
            self._stages[stage] = peer
            if hosted.reduced is not None:
                self._reductions[stage] = ReductionPeer(
                    self._p2p,  # type: ignore[arg-type]
                    self._run,
                    stage,
                    hosted.reduced,
                    store,
                    self._sign,
                )
                await self._reductions[stage].serve(self._allow_list, unguarded)

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = (),
        members: Collection[PeerId] | None = None,
    ) -> None:
        self._allow_list.admit(sorted(set(peers) - set(banned)))

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
        ends, peer = clock() + deadline, self._stages[descriptor.stage].payloads
        peer.break_off()
        if (former := self._reductions.get(descriptor.stage)) is not None:
            former.break_off()
        await peer.hold(descriptor, bytes(payload))
        if (reduction := self._reductions.get(descriptor.stage)) is not None:
            if group is None:
                return ExchangeResult((descriptor,))
            return await reduction.reduce(descriptor, bytes(payload), group, deadline)
        if group is None:
            members = await self._find_group(descriptor, expected, deadline / 2)
        else:
            members = list(group.descriptors)
        refused, others = {}, []
        for each in members:
            if each.owner == self._peer or not self._is_usable(each, descriptor):
                continue
            if reason := misfit(each, descriptor):
                refused[each] = reason
            else:
                others.append(each)
        faults = await peer.gather(descriptor, others, max(0.0, ends - clock()), self._client_mode, group)
        refused |= {each: faults[each.owner] for each in others if each.owner in faults}
        held = filter(peer.holds, (descriptor, *others))
        return ExchangeResult(
            tuple(sorted(held, key=lambda each: each.owner)),
            tuple(Rejection(each, why) for each, why in refused.items()),
        )

    async def end_round(self, ended: RoundEnd) -> None:
        await self._reductions[ended.stage].end_round(ended)

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        peer = self._stages.get(entry.descriptor.stage) or self._any_stage()
        return await peer.payloads.fetch(entry, deadline)

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        await self._any_stage().fetch_checkpoint(download, deadline)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()
        await self._p2p.close()

    def _any_stage(self) -> PayloadPeer:
        return next(iter(self._stages.values()))

    def _is_usable(self, each: PayloadDescriptor, own: PayloadDescriptor) -> bool:
        fits = (each.run, each.stage, each.round_number) == (self._run, own.stage, own.round_number)
        return (
            fits
            and each.owner in self._allow_list
            and is_authentic(each, own.run)
            and each.nbytes <= self._capacities[own.stage]
        )

    async def _find_group(
        self, own: PayloadDescriptor, expected: int, seconds: float
    ) -> list[PayloadDescriptor]:
        """The payloads of all peers that search for a group for this round, as hivemind finds them."""
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


class VirtualArbiter:
    """The coordinator's own peer: the production arbiter over the virtual network."""

    addresses = ()

    def __init__(self, allow_list: AllowList, arbiter: Arbiter) -> None:
        self._allow_list, self._arbiter = allow_list, arbiter

    @classmethod
    async def start(
        cls, rpc: VirtualGrpc, dht: Dht, peer: PeerId, run: str, spec: RunSpec, folder: Path
    ) -> VirtualArbiter:
        p2p, allow_list = VirtualP2P(rpc, dht, peer), AllowList()
        await p2p.listen()
        arbiter = await serve_arbiter(p2p, run, spec, folder, allow_list, unguarded)  # type: ignore[arg-type]
        return cls(allow_list, arbiter)

    @property
    def arbiter(self) -> VirtualArbiter:
        return self

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId],
        sources: Collection[str],
        members: Collection[PeerId],
    ) -> None:
        self._allow_list.admit(set(peers) - set(banned))

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        return await self._arbiter.arbitrate(descriptor, donors, deadline)

    async def forget_payloads(self, before_round: int) -> None:
        self._arbiter.forget(before_round)

    async def close(self) -> None:
        pass
