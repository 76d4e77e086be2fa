"""The payload service of one stage as a servicer of libp2p."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, AsyncIterator, cast  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase

from node.checkpoint.transfer import CheckpointServer
from node.exchange.allow_list import AllowList
from node.exchange.hive.records import stage_prefix
from node.exchange.hive.stream_calls import AllowedCalls, GuardedStreams
from node.exchange.payload_service import PayloadService, PeerCalls, Wanted
from node.exchange.payload_store import PayloadStore
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply, RangeRequest, StateRequest
from protocol.server.line import UNLIMITED, Line
from protocol.types import PeerId

_CALLS = {DescriptorMessage: "rpc_fetch", RangeRequest: "rpc_fetch_range", StateRequest: "rpc_state"}


class PayloadPeer(ServicerBase, PeerCalls):  # type: ignore[misc]  # hivemind has no type information
    """Carries the calls of a :class:`PayloadService` and hands it those of others. Belongs to one event loop.

    hivemind derives the names of the remote calls from the names of this class and its rpc methods: renaming
    them changes the wire.

    Attributes:
        service: of `stage`; for the other arguments see :class:`PayloadService`.
    """

    def __init__(
        self,
        p2p: P2P,
        run: str,
        stage: int,
        capacity: int,
        store: PayloadStore,
        checkpoints: CheckpointServer,
        line: Line = UNLIMITED,
    ) -> None:
        self._p2p, self._run, self._stage = p2p, run, stage
        me = PeerId(p2p.peer_id.to_base58())
        self.service = PayloadService(me, stage, capacity, store, checkpoints, self, line)

    async def serve(self, allow_list: AllowList) -> None:
        """Answer the peers of the allow list from now on."""
        streams, calls = GuardedStreams(self._p2p, allow_list), AllowedCalls(self, allow_list)
        await self.add_p2p_handlers(streams, calls, namespace=stage_prefix(self._run, self._stage))

    async def ask(self, peer: str, stage: int, wanted: Wanted) -> AsyncGenerator[PayloadChunk, None]:
        stream = await getattr(self._stub(peer, stage), _CALLS[type(wanted)])(wanted)
        return cast("AsyncGenerator[PayloadChunk, None]", stream)

    async def push(self, peer: str, stage: int, parts: AsyncIterator[PayloadChunk]) -> PushReply:
        return cast(PushReply, await self._stub(peer, stage).rpc_push(parts))

    def _stub(self, peer: str, stage: int) -> Any:
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=stage_prefix(self._run, stage))

    # hivemind reads the types of the messages in these signatures.

    async def rpc_fetch(self, request: DescriptorMessage, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a held payload."""
        async with aclosing(self.service.answer(_name(context), request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def rpc_fetch_range(
        self, request: RangeRequest, context: P2PContext
    ) -> AsyncIterator[PayloadChunk]:
        """Send a range of a held payload."""
        async with aclosing(self.service.answer(_name(context), request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def rpc_push(self, stream: AsyncIterator[PayloadChunk], context: P2PContext) -> PushReply:
        """Take the payload of a member of this group that this peer cannot dial."""
        return await self.service.take_push(_name(context), stream)

    async def rpc_state(self, request: StateRequest, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a piece of a checkpoint."""
        async with aclosing(self.service.answer(_name(context), request)) as chunks:
            async for chunk in chunks:
                yield chunk


def _name(context: P2PContext) -> str:
    return str(context.remote_id.to_base58())
