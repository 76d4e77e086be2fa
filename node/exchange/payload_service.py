"""Payloads and checkpoints of one stage over any transport: calls to other peers, and answers to theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Protocol, TypeAlias

from node import hooks
from node.checkpoint.download import CheckpointDownload, TransferError
from node.checkpoint.initial import InitialAnchors
from node.checkpoint.transfer import CheckpointServer, fetch_checkpoint
from node.exchange.allow_list import AllowList
from node.exchange.arrivals import Arrival
from node.exchange.object_client import ObjectClient
from node.exchange.object_parts import STORE, read_piece
from node.exchange.object_source import LentPart, LentPayloads
from node.exchange.open_transfers import OpenTransfers
from node.exchange.payload_calls import PayloadCalls
from node.exchange.payload_exchange import PayloadExchange, own_order
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import (
    CHUNK_BYTES,
    CHUNK_SECONDS,
    NOT_HELD,
    RANGES,
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
from node.exchange.transport import ExchangeResult, ServedStages
from protocol.errors import HetnodeError
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply, RangeRequest, StateRequest
from protocol.server.line import UNLIMITED, Line
from protocol.trust.envelope import is_authentic, misfit
from protocol.types import ExchangeGroup, PayloadDescriptor, PeerId, Rejection
from protocol.wire.convert.fields import part_from_pb
from protocol.wire.convert.payloads import descriptor_from_pb, descriptor_to_pb

log = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
_HASHING_SECONDS = 60.0  # a donor reads the whole part once before it can list the hashes of its chunks
_PAYLOAD_TRANSFERS = 2  # of one payload to one peer: after a restart of that peer the first is still open
_CHECKPOINT_TRANSFERS = 4  # to one peer at a time

Wanted: TypeAlias = DescriptorMessage | RangeRequest | StateRequest
"""What a call asks for: a payload, a range of one, or a piece of a checkpoint."""


class PeerCalls(Protocol):
    """The calls to other peers that a transport carries. They may raise any exception."""

    async def ask(self, peer: str, stage: int, wanted: Wanted) -> AsyncGenerator[PayloadChunk, None]:
        """Send `wanted` to the service of `stage` at `peer`; the chunks of the answer."""

    async def push(self, peer: str, stage: int, parts: AsyncIterator[PayloadChunk]) -> PushReply:
        """Send `parts` to the service of `stage` at `peer`."""


def checkpoint_server(hosted: ServedStages) -> CheckpointServer:
    """The server of the checkpoints of a node that hosts these stages."""
    initial = None
    if hosted.spec is not None:
        initial = InitialAnchors(hosted.spec, hosted.initial_folder, tuple(hosted.capacities))
    return CheckpointServer(hosted.checkpoint_folder, initial)


class PayloadService(PayloadCalls):
    """One of the peers that exchange the payloads of a stage. Belongs to one event loop.

    Args:
        me: the id of this peer.
        capacity: the largest payload of `stage`, in bytes.
        store: keeps the payloads of `stage`.
        checkpoints: serves this node's checkpoints.
        calls: to other peers.
        line: what this node may send and receive.

    Attributes:
        payloads: decides which peer is asked for which payload.
    """

    def __init__(
        self,
        me: PeerId,
        stage: int,
        capacity: int,
        store: PayloadStore,
        checkpoints: CheckpointServer,
        calls: PeerCalls,
        line: Line = UNLIMITED,
    ) -> None:
        self._me, self._stage, self._capacity, self._calls, self._line = me, stage, capacity, calls, line
        self._transfers = OpenTransfers()
        self._checkpoints = checkpoints
        self._objects = ObjectClient(line)
        self.payloads = PayloadExchange(me, stage, capacity, store, self, self._objects)

    async def exchange(
        self,
        own: PayloadDescriptor,
        announced: Iterable[PayloadDescriptor],
        seconds: float,
        *,
        allow_list: AllowList,
        push: bool,
        group: ExchangeGroup | None = None,
        lent: LentPayloads | None = None,
    ) -> ExchangeResult:
        """Gather the announced payloads until all have arrived or time is up. The own one is in the store.

        A descriptor that proves nothing about its owner is only logged. A misfit is signed by its owner, so
        it is rejected. For the other arguments see :meth:`PayloadExchange.gather`.
        """
        members: dict[PeerId, PayloadDescriptor] = {own.owner: own}
        rejected = []
        for each in announced:
            where = f"left {each.owner} out of round {own.round_number}"
            if problem := self._problem(each, own, allow_list):
                log.warning("%s: %s", where, problem)
            elif reason := misfit(each, own):
                log.warning("%s: %s", where, reason)
                rejected.append(Rejection(each, reason))
            else:
                members.setdefault(each.owner, each)  # this peer's own entry stays
        others = [descriptor for owner, descriptor in members.items() if owner != own.owner]
        faults = await self.payloads.gather(own, others, seconds, push, group, lent)
        rejected += [Rejection(members[owner], reason) for owner, reason in faults.items()]
        held = filter(self.payloads.holds, members.values())
        return ExchangeResult(tuple(sorted(held, key=lambda each: each.owner)), tuple(rejected))

    def _problem(self, each: PayloadDescriptor, own: PayloadDescriptor, allow_list: AllowList) -> str:
        """Why an announced payload cannot be part of the exchange of `own`; "" if it can."""
        if each.owner not in allow_list and each.owner != own.owner:
            return "it is not in the plan"
        if (each.run, each.stage, each.round_number) != (own.run, own.stage, own.round_number):
            return "it announced a payload of another run, stage or round"
        if each.nbytes > self._capacity:
            return f"it announced {each.nbytes} bytes; a payload of this stage has at most {self._capacity}"
        return "" if is_authentic(each, own.run) else "its descriptor has no valid signature"

    # Calls to other peers

    async def fetch(
        self,
        holder: str,
        descriptor: PayloadDescriptor,
        when_asked: Callable[[], None],
        arrival: Arrival | None = None,
    ) -> bytes:
        ranges = ranges_of(descriptor.nbytes, self.payloads.members)
        if len(ranges) > 1:
            return await self._fetch_ranges(holder, descriptor, ranges, when_asked)
        try:
            stream = await self._ask(holder, descriptor.stage, descriptor_to_pb(descriptor))
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
    ) -> bytes:
        """As :meth:`fetch`, each range by a stream of its own."""
        message, streams = descriptor_to_pb(descriptor), []
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    for first, nbytes in ranges:
                        wanted = RangeRequest(descriptor=message, first=first, nbytes=nbytes)
                        stream = await self._ask(holder, descriptor.stage, wanted)
                        streams.append(await stack.enter_async_context(aclosing(stream)))
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

        hooks.current().before_contact(listener)
        reply = await self._calls.push(listener, own.stage, parts())
        if reply.refusal:
            raise TransferError(f"refused: {reply.refusal[:200]}")

    async def fetch_checkpoint(
        self, download: CheckpointDownload, seconds: float, lent: LentPart | None = None
    ) -> None:
        """See :meth:`node.exchange.transport.Transport.fetch_checkpoint`. A store is one more donor."""
        record, donors = download.record, download.donors

        async def ask(donor: str, index: int, size: int) -> bytes:
            if donor == STORE and lent is not None:
                return await read_piece(self._objects, lent, download.nbytes, index, size)
            wanted = StateRequest(
                stage=record.stage, part=record.part.value, round=record.round_number, index=index
            )
            stream = await self._ask(donor, donors[PeerId(donor)], wanted)
            async with aclosing(stream):
                patience = _HASHING_SECONDS if index == 0 else CHUNK_SECONDS  # index 0 is the list of hashes
                return bytes(await receive_exactly(stream, size, patience, self._line))

        others = own_order(set(donors) - {self._me}, self._me)  # spreads the load over the donors
        await fetch_checkpoint(download, [*([STORE] if lent else ()), *others], seconds, ask)

    async def _ask(self, peer: str, stage: int, wanted: Wanted) -> AsyncGenerator[PayloadChunk, None]:
        hooks.current().before_contact(peer)
        async with asyncio.timeout(DIAL_SECONDS):
            return await self._calls.ask(peer, stage, wanted)

    # Answers to the calls of other peers, whose ids the transport has authenticated

    def answer(self, peer: str, wanted: Wanted) -> AsyncGenerator[PayloadChunk, None]:
        """The chunks that `peer` gets for `wanted`, or a refusal. Their receiver closes the stream."""
        if isinstance(wanted, StateRequest):
            return self._answer_state(peer, wanted)
        if isinstance(wanted, RangeRequest):
            return self._answer_payload(peer, wanted.descriptor, (wanted.first, wanted.nbytes))
        return self._answer_payload(peer, wanted, None)

    async def _answer_payload(
        self, peer: str, wanted: DescriptorMessage, range_: tuple[int, int] | None
    ) -> AsyncGenerator[PayloadChunk, None]:
        """A held payload, or so many of its bytes from a first one on."""
        what = f"range {wanted.sha256}" if range_ else wanted.sha256
        most = RANGES * _PAYLOAD_TRANSFERS if range_ else _PAYLOAD_TRANSFERS
        with self._transfers.admit(peer, what, most) as is_allowed:
            if not is_allowed:
                yield PayloadChunk(refusal="that payload is being sent to you already")
                return
            payload = wanted.owner, wanted.round, wanted.sha256
            await self.payloads.wait_for_turn(peer, *payload)
            pieces = await self.payloads.pieces(peer, *payload)
            if pieces is None:
                yield PayloadChunk(refusal=NOT_HELD)
                return
            sent, expected = 0, range_[1] if range_ else wanted.nbytes
            parts = within(pieces, *range_) if range_ else pieces
            async for chunk in outgoing(parts, wanted.round, self._stage, self._line):
                sent += len(chunk.data)
                yield chunk
            # A receiver that was told another length, or of no bytes, does not close the stream.
            if sent and sent == expected:
                await linger()

    async def take_push(self, sender: str, stream: AsyncIterator[PayloadChunk]) -> PushReply:
        """Take the payload of a member of this group that this peer cannot dial."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                descriptor = descriptor_from_pb((await anext(stream)).announced)
        except (HetnodeError, StopAsyncIteration, TimeoutError) as error:
            return PushReply(refusal=str(error)[:200] or "this call announces no payload")
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

    async def _answer_state(self, peer: str, request: StateRequest) -> AsyncGenerator[PayloadChunk, None]:
        """A piece of a checkpoint."""
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
