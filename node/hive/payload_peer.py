"""Payloads and checkpoints over libp2p: calls to the other peers of a stage, and answers to their calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from node import hooks
from node.hive.access import AllowedCalls
from node.hive.records import stage_prefix
from node.hive.stream_calls import Guard, GuardedStreams
from node.transport.allow_list import AllowList
from node.transport.arrivals import Arrival
from node.transport.checkpoint_transfer import CheckpointServer, fetch_checkpoint
from node.transport.line import UNLIMITED, Line
from node.transport.open_transfers import OpenTransfers
from node.transport.payload_exchange import (
    PayloadCalls,
    PayloadExchange,
    own_order,
)
from node.transport.payload_store import PayloadStore
from node.transport.transfer import (
    CHUNK_BYTES,
    CHUNK_SECONDS,
    NOT_HELD,
    RANGES,
    TransferError,
    check_hash,
    linger,
    outgoing,
    paced,
    ranges_of,
    read_in_thread,
    receive,
    receive_exactly,
    within,
)
from node.transport.transport import CheckpointDownload
from protocol.errors import HetnodeError
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply, RangeRequest, StateRequest
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.convert.fields import part_from_pb
from protocol.wire.convert.payloads import descriptor_from_pb, descriptor_to_pb

log = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
_HASHING_SECONDS = 60.0  # a donor reads the whole part once before it can list the hashes of its chunks
_PAYLOAD_TRANSFERS = 2  # of one payload to one peer: after a restart of that peer the first is still open
_CHECKPOINT_TRANSFERS = 4  # to one peer at a time


class PayloadPeer(ServicerBase, PayloadCalls):  # type: ignore[misc]  # hivemind has no type information
    """One of the peers that exchange the payloads of a stage. Belongs to one event loop.

    hivemind derives the names of the remote calls from the names of this class and its rpc methods: renaming
    them changes the wire.

    Args:
        capacity: the largest payload of `stage`, in bytes.
        store: keeps the payloads of `stage`.
        checkpoints: serves this node's checkpoints.
        line: what this node may send and receive.

    Attributes:
        payloads: decides which peer is asked for which payload.
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
        self._me, self._line = p2p.peer_id.to_base58(), line
        self._transfers = OpenTransfers()
        self._checkpoints = checkpoints
        self.payloads = PayloadExchange(self._me, stage, capacity, store, self)

    async def serve(self, allow_list: AllowList, guard: Guard = GuardedStreams) -> None:
        """Answer the peers of the allow list from now on, over the streams that `guard` lets in."""
        await self.add_p2p_handlers(
            guard(self._p2p, allow_list),
            AllowedCalls(self, allow_list),
            namespace=stage_prefix(self._run, self._stage),
        )

    # Calls to other peers

    async def fetch(
        self,
        holder: str,
        descriptor: PayloadDescriptor,
        when_asked: Callable[[], None],
        arrival: Arrival | None = None,
    ) -> bytes:
        ranges = ranges_of(descriptor.nbytes, self.payloads.members)
        if len(ranges) > 1 and (payload := await self._fetch_ranges(holder, descriptor, ranges, when_asked)):
            return payload
        try:
            stub = self._stub(holder, descriptor.stage)
            async with asyncio.timeout(DIAL_SECONDS):
                stream = await stub.rpc_fetch(descriptor_to_pb(descriptor))
        finally:
            when_asked()  # also after a failure: other peers wait for this
        async with aclosing(stream):  # closing tells the sender that all has arrived
            return await receive(stream, descriptor, self._line, arrival)

    async def _fetch_ranges(
        self,
        holder: str,
        descriptor: PayloadDescriptor,
        ranges: Sequence[tuple[int, int]],
        when_asked: Callable[[], None],
    ) -> bytes | None:
        """As :meth:`fetch`, each range by a stream of its own; None if `holder` knows no ranges."""
        stub, message = self._stub(holder, descriptor.stage), descriptor_to_pb(descriptor)
        async with AsyncExitStack() as stack:
            streams = []
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    for first, nbytes in ranges:
                        wanted = RangeRequest(descriptor=message, first=first, nbytes=nbytes)
                        stream = await stub.rpc_fetch_range(wanted)
                        streams.append(await stack.enter_async_context(aclosing(stream)))
            except ControlFailure as error:
                log.info("%s sends no ranges of payloads: %s", holder, error)
                return None
            finally:
                when_asked()  # also after a failure: other peers wait for this
            try:
                async with asyncio.TaskGroup() as group:
                    parts = [
                        group.create_task(receive_exactly(stream, nbytes, line=self._line))
                        for stream, (_, nbytes) in zip(streams, ranges, strict=True)
                    ]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        payload = b"".join(part.result() for part in parts)
        await check_hash(payload, descriptor)
        return payload

    async def push(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        async def parts() -> AsyncIterator[PayloadChunk]:
            yield PayloadChunk(announced=descriptor_to_pb(own))
            pieces = (payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES))
            async for chunk in outgoing(read_in_thread(pieces), own.round_number, own.stage, self._line):
                yield chunk

        reply = await self._stub(listener, own.stage).rpc_push(parts())
        if reply.refusal:
            raise TransferError(f"refused: {reply.refusal[:200]}")

    async def fetch_checkpoint(self, download: CheckpointDownload, seconds: float) -> None:
        """See :meth:`node.transport.transport.Transport.fetch_checkpoint`."""
        record, donors = download.record, download.donors

        async def ask(donor: str, index: int, size: int) -> bytes:
            wanted = StateRequest(
                stage=record.stage, part=record.part.value, round=record.round_number, index=index
            )
            async with asyncio.timeout(DIAL_SECONDS):
                stream = await self._stub(donor, donors[PeerId(donor)]).rpc_state(wanted)
            async with aclosing(stream):
                patience = _HASHING_SECONDS if index == 0 else CHUNK_SECONDS  # index 0 is the list of hashes
                return bytes(await receive_exactly(stream, size, patience, self._line))

        others = own_order(set(donors) - {self._me}, self._me)  # spreads the load over the donors
        await fetch_checkpoint(download, others, seconds, ask)

    def _stub(self, peer: str, stage: int) -> Any:
        hooks.current().before_contact(peer)
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=stage_prefix(self._run, stage))

    # Answers to the calls of other peers

    async def rpc_fetch(self, request: DescriptorMessage, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a held payload."""
        with self._transfers.admit(_name(context), request.sha256, _PAYLOAD_TRANSFERS) as allowed:
            async for chunk in self._answer(allowed, request, (0, None), context):
                yield chunk

    async def rpc_fetch_range(
        self, request: RangeRequest, context: P2PContext
    ) -> AsyncIterator[PayloadChunk]:
        """Send a range of a held payload."""
        wanted, most = request.descriptor, RANGES * _PAYLOAD_TRANSFERS
        with self._transfers.admit(_name(context), f"range {wanted.sha256}", most) as allowed:
            async for chunk in self._answer(allowed, wanted, (request.first, request.nbytes), context):
                yield chunk

    async def _answer(
        self,
        is_allowed: bool,
        wanted: DescriptorMessage,
        range_: tuple[int, int | None],
        context: P2PContext,
    ) -> AsyncIterator[PayloadChunk]:
        """A payload, or so many of its bytes (None: all) from a first one on; or a refusal."""
        if not is_allowed:
            yield PayloadChunk(refusal="that payload is being sent to you already")
            return
        peer, payload = _name(context), (wanted.owner, wanted.round, wanted.sha256)
        await self.payloads.wait_for_turn(peer, *payload)
        pieces = await self.payloads.pieces(peer, *payload)
        if pieces is None:
            yield PayloadChunk(refusal=NOT_HELD)
            return
        first, nbytes = range_
        sent, parts = 0, pieces if nbytes is None else within(pieces, first, nbytes)
        async for chunk in outgoing(parts, wanted.round, self._stage, self._line):
            sent += len(chunk.data)
            yield chunk
        # A receiver that was told another length, or of no bytes, does not close the stream.
        if sent and sent == (wanted.nbytes if nbytes is None else nbytes):
            await linger()

    async def rpc_push(self, stream: AsyncIterator[PayloadChunk], context: P2PContext) -> PushReply:
        """Take the payload of a member of this group that this peer cannot dial."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                descriptor = descriptor_from_pb((await anext(stream)).announced)
        except (HetnodeError, StopAsyncIteration, TimeoutError) as error:
            return PushReply(refusal=str(error)[:200] or "this call announces no payload")
        sender = context.remote_id.to_base58()
        # Only an awaited payload is received, so a peer can push no more than the one that it has announced.
        if not self.payloads.awaits(sender, descriptor):
            return PushReply(refusal="this peer awaits no such payload from you now")
        if self.payloads.holds(descriptor):
            return PushReply()
        with self._transfers.admit(sender, f"push {descriptor.sha256}", 1) as allowed:
            if not allowed:
                return PushReply(refusal="you are sending that payload already")
            with self.payloads.arriving(descriptor) as arrival:
                try:
                    payload = await receive(stream, descriptor, self._line, arrival)
                except (TransferError, TimeoutError) as error:
                    self.payloads.note_fault(descriptor, sender, error)
                    return PushReply(refusal=str(error) or "too slow")
                await self.payloads.hold(descriptor, payload)
        return PushReply()

    async def rpc_state(self, request: StateRequest, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a piece of a checkpoint."""
        peer = context.remote_id.to_base58()
        with self._transfers.admit(peer, "state", _CHECKPOINT_TRANSFERS) as allowed:
            if not allowed:
                yield PayloadChunk(refusal=f"{_CHECKPOINT_TRANSFERS} pieces are being sent to you already")
                return
            try:
                part = await self._checkpoints.find(request.stage, part_from_pb(request.part), request.round)
                if part is None:
                    yield PayloadChunk(refusal="this peer has no such checkpoint")
                    return
                async for piece in self._checkpoints.pieces(part, request.index):
                    async for chunk in paced(piece, self._line):
                        yield chunk
                await linger()
            except HetnodeError as error:
                yield PayloadChunk(refusal=error.cause[:200])
            except (IndexError, OSError) as error:
                log.info("%s did not get all of a checkpoint: %s", peer, error)
                yield PayloadChunk(refusal="this peer has no such piece of the checkpoint any more")


def _name(context: P2PContext) -> str:
    return str(context.remote_id.to_base58())
