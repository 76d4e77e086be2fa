"""The production reduction of payloads in parts over the virtual network, with a part of hivemind's P2P."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from node.exchange.allow_list import AllowList
from node.exchange.hive.reduction.reduction_peer import ReductionPeer
from node.exchange.payload_store import PayloadStore
from node.security.identity import Identity
from protocol.spec.run import RunSpec
from protocol.types import PeerId
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.rpc_client import MessageCodec, VirtualCall, VirtualChannel
from tests.virtual.rpc_server import VirtualServer
from tests.virtual.transport import Dht


async def reduction_peer(
    rpc: VirtualGrpc,
    dht: Dht,
    server: VirtualServer | None,
    identity: Identity,
    run: str,
    stage: int,
    spec: RunSpec,
    store: PayloadStore,
    allow_list: AllowList,
) -> ReductionPeer:
    """The one that `server` serves, of a stage of the run."""
    p2p: Any = VirtualP2P(rpc, dht, identity.peer)
    if server is not None:
        server.add_generic_rpc_handlers([p2p])
    peer = ReductionPeer(p2p, run, stage, spec, store, identity.sign)
    # The virtual network hands over whole messages: it has no streams of bytes to guard.
    await peer.serve(allow_list, lambda p2p, _: p2p)
    return peer


class VirtualP2P:
    """The part of hivemind's P2P that servicers and stubs use."""

    def __init__(self, rpc: VirtualGrpc, dht: Dht, peer: PeerId) -> None:
        self.peer_id = PeerID.from_base58(peer)
        self._rpc, self._dht = rpc, dht
        self._handlers: dict[str, Any] = {}

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
