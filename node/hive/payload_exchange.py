"""Bytes between the peers of a stage: the payloads that this one holds, and its checkpoints.

It serves both to others, and gets both from them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase

from node import hooks
from node.hive.allow_list import AllowList, Gated
from node.transport.checkpoint_transfer import CheckpointServer, fetch_checkpoint
from node.transport.payload_store import PayloadStore
from node.transport.transfer import (
    CHUNK_BYTES,
    CHUNK_SECONDS,
    TransferError,
    WrongBytes,
    linger,
    outgoing,
    receive,
    receive_exactly,
)
from node.transport.transport import CheckpointDownload
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply, StateRequest
from protocol.types import ManifestEntry, PayloadDescriptor, PeerId
from protocol.wire.convert.fields import part_from_pb
from protocol.wire.convert.payloads import descriptor_from_pb, descriptor_to_pb

log = logging.getLogger(__name__)

_DIAL_SECONDS = 5.0
_EARLY_SECONDS = 1.0
"""Longest that a request for this peer's own payload waits for its turn; see PayloadPeer.exchange."""
_EARLY_REQUESTS = 2  # of one peer
_HASHING_SECONDS = 60.0  # a donor reads all of a part once, before it can name its chunks
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_PUSHES = 2
_PAYLOAD_TRANSFERS = 2  # to one peer, of one payload: it may have come back while the first is still open
_STATE_TRANSFERS = 4  # to one peer


def stage_prefix(run: str, stage: int) -> str:
    """Names the peers of `stage` on the wire and in the DHT."""
    return f"{run}-stage-{stage}"


class PayloadPeer(ServicerBase):  # type: ignore[misc]  # hivemind has no type information
    """One peer among those that exchange the payloads of a stage. Belongs to one event loop.

    hivemind derives the names of the remote calls from the name of this class: renaming it changes the wire.

    Args:
        capacity: the largest payload of `stage`, in bytes.
        store: of the payloads of `stage`.
        checkpoints: the folder of this node's checkpoints.
    """

    def __init__(
        self, p2p: P2P, run: str, stage: int, capacity: int, store: PayloadStore, checkpoints: Path
    ) -> None:
        self._p2p, self._run, self._stage, self._capacity = p2p, run, stage, capacity
        self._me = p2p.peer_id.to_base58()
        self._awaited: dict[str, PayloadDescriptor] = {}  # by owner, who may push it
        self._faults: dict[str, str] = {}  # what owners themselves sent in place of the awaited
        self._transfers: Counter[tuple[PeerID, str]] = Counter()  # that others have opened
        self._gathering: tuple[asyncio.Task[object], ...] = ()
        self._round = 0  # of the newest exchange
        self._to_ask: set[str] | None = set()  # owners that it has to ask yet; None: they are not known
        self._progress = asyncio.Event()  # set, and then replaced, when one of these two changes
        self._shelf = CheckpointServer(checkpoints)
        self.store = store

    async def serve(self, allow_list: AllowList) -> None:
        """Answer the peers of the roster from now on."""
        await self.add_p2p_handlers(
            self._p2p, Gated(self, allow_list), namespace=stage_prefix(self._run, self._stage)
        )

    @contextmanager
    def exchange(self, round_number: int) -> Iterator[None]:
        """Within, the own payload of `round` is given away after :meth:`gather` has asked for others'.

        All that two peers say to each other goes over one connection. A request behind a payload would wait
        for all of that, and a round would fill one direction of a link after the other. So a groupmate that
        asks before this peer has joined the group, or asked itself, waits a moment.
        """
        self._advance(round_number, None)
        try:
            yield
        finally:
            self._advance(round_number, set())

    async def gather(
        self, own: PayloadDescriptor, others: Sequence[PayloadDescriptor], seconds: float, push: bool
    ) -> dict[str, str]:
        """Get the payloads of `others` into the store; ends when all are there or after `seconds`.

        Args:
            own: this peer's, which is in the store.
            others: of one (stage, round), at most one of each owner, authentic, within the capacity.
            push: nobody can dial this peer, so it has to bring its payload to others.

        Returns:
            by owner: what is wrong, where the owner itself has sent other bytes than those that it signed.
            What is only missing, for whatever reason, is not the fault of its owner.
        """
        self._faults = {}
        reasons: dict[str, dict[str, str]] = {descriptor.owner: {} for descriptor in others}
        owners = [descriptor.owner for descriptor in others]
        self._awaited = {descriptor.owner: descriptor for descriptor in others}
        self._advance(own.round_number, set(owners))
        work: list[Coroutine[Any, Any, object]] = [
            self._obtain(descriptor, [owner, *self._spread(set(owners) - {owner})], reasons[owner])
            for owner, descriptor in self._awaited.items()
        ]
        if push and owners:
            work.append(self._push(own, self._spread(owners)))
        tasks = self._gathering = tuple(asyncio.create_task(each) for each in work)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=seconds)
        finally:
            self.break_off()
            await asyncio.gather(*tasks, return_exceptions=True)
        missing = [each for each in others if not self.store.has(each.round_number, each.sha256)]
        for each in missing:
            tried = "; ".join(f"{holder}: {why}" for holder, why in reasons[each.owner].items())
            where = f"stage {each.stage}, round {each.round_number}"
            log.warning("%s: no payload of %s (%s)", where, each.owner, tried or "no answer in time")
        return {each.owner: self._faults[each.owner] for each in missing if each.owner in self._faults}

    def break_off(self) -> None:
        """Let :meth:`gather` end now, with what is there."""
        for task in self._gathering:
            task.cancel()
        self._gathering = ()

    async def fetch(self, entry: ManifestEntry, seconds: float) -> bytes:
        """A payload of any stage and round, from the store or any of its holders, asked in their order.

        Raises:
            HetnodeError: PAYLOAD_UNAVAILABLE when no holder sent the right bytes within `seconds`;
                PAYLOAD_CORRUPT when it exceeds the capacity.
        """
        descriptor, holders = entry.descriptor, entry.holders
        if descriptor.stage == self._stage and descriptor.nbytes > self._capacity:
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"The payload {descriptor.sha256[:16]} of {descriptor.owner} has {descriptor.nbytes} bytes, "
                f"more than the {self._capacity} that a payload of stage {descriptor.stage} can have.",
                "The coordinator committed what no peer may apply: tell its operator.",
            )
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                return await self._obtain(descriptor, holders, reasons)
        except TimeoutError:
            tried = "; ".join(f"{holder}: {why}" for holder, why in reasons.items()) or "no answer in time"
            raise HetnodeError(
                ErrorCode.PAYLOAD_UNAVAILABLE,
                f"The payload {descriptor.sha256[:16]} of {descriptor.owner} (stage {descriptor.stage}, "
                f"round {descriptor.round_number}) could not be had from its {len(holders)} holders: {tried}.",
                "Wait for a holder to come back; without this payload the round cannot be applied.",
            ) from None

    async def _obtain(
        self, descriptor: PayloadDescriptor, holders: Sequence[str], reasons: dict[str, str]
    ) -> bytes:
        """Ask one holder after the other until the payload is held; runs until cancelled if need be.

        Args:
            reasons: takes note of why each holder did not send it.
        """
        own_stage = descriptor.stage == self._stage
        pause = _FIRST_PAUSE
        while True:
            for holder in holders or [self._me]:
                if own_stage and (held := await self._held(descriptor)) is not None:
                    self._note_asked(descriptor.owner)
                    return held
                if holder == self._me:
                    continue
                try:
                    payload = await self._fetch_from(holder, descriptor)
                except Exception as error:  # hivemind and libp2p raise anything here
                    log.debug("no payload from %s: %r", holder, error)
                    reasons[holder] = _brief(error)
                    self._note_fault(descriptor, holder, error)
                    continue
                if own_stage:
                    await self.hold(descriptor, payload)
                return payload
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def hold(self, descriptor: PayloadDescriptor, payload: bytes) -> None:
        """On return the payload is in the store: on the disk, if that takes it."""
        await asyncio.to_thread(self.store.put, descriptor.round_number, descriptor.sha256, payload)

    async def _held(self, descriptor: PayloadDescriptor) -> bytes | None:
        if not self.store.has(descriptor.round_number, descriptor.sha256):
            return None
        return await asyncio.to_thread(self.store.get, descriptor.round_number, descriptor.sha256)

    async def _fetch_from(self, holder: str, descriptor: PayloadDescriptor) -> bytes:
        try:
            stub = self._stub(holder, descriptor.stage)
            async with asyncio.timeout(_DIAL_SECONDS):
                stream = await stub.rpc_fetch(descriptor_to_pb(descriptor))
        finally:
            self._note_asked(descriptor.owner)
        async with aclosing(stream):
            return await receive(stream, descriptor)

    async def rpc_fetch(self, request: DescriptorMessage, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a held payload to any peer of the roster."""
        with self._transfer(context.remote_id, request.sha256, _PAYLOAD_TRANSFERS) as allowed:
            if not allowed:
                yield PayloadChunk(refusal="that payload is being sent to you already")
                return
            await self._wait_for_turn(request, context.remote_id)
            pieces = None
            if self.store.has(request.round, request.sha256):
                pieces = await asyncio.to_thread(
                    self.store.pieces, request.round, request.sha256, CHUNK_BYTES
                )
            if pieces is None:
                yield PayloadChunk(refusal="this peer does not hold that payload")
                return
            sent = 0
            async for chunk in outgoing(pieces, request.round, self._stage):
                sent += len(chunk.data)
                yield chunk
            if sent == request.nbytes:
                await linger()

    async def fetch_checkpoint(self, download: CheckpointDownload, seconds: float) -> None:
        """See :meth:`node.transport.transport.Transport.fetch_checkpoint`."""
        record, donors = download.record, download.donors

        async def ask(donor: str, index: int, size: int) -> bytes:
            wanted = StateRequest(
                stage=record.stage, part=record.part.value, round=record.round_number, index=index
            )
            async with asyncio.timeout(_DIAL_SECONDS):
                stream = await self._stub(donor, donors[PeerId(donor)]).rpc_state(wanted)
            async with aclosing(stream):
                patience = _HASHING_SECONDS if index == 0 else CHUNK_SECONDS
                return bytes(await receive_exactly(stream, size, patience))

        others = self._spread(set(donors) - {self._me})
        await fetch_checkpoint(download, others, seconds, ask)

    async def rpc_state(self, request: StateRequest, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a piece of a checkpoint to any peer of the roster, a few at a time to each."""
        with self._transfer(context.remote_id, "state", _STATE_TRANSFERS) as allowed:
            if not allowed:
                yield PayloadChunk(refusal="as much as you may ask for at once is being sent to you")
                return
            try:
                part = await self._shelf.find(request.stage, part_from_pb(request.part), request.round)
                if part is None:
                    yield PayloadChunk(refusal="this peer has no such checkpoint")
                    return
                async for piece in self._shelf.pieces(part, request.index):
                    yield PayloadChunk(data=piece)
                await linger()
            except HetnodeError as error:
                yield PayloadChunk(refusal=error.cause[:200])
            except (IndexError, OSError) as error:
                log.info("%s did not get all of a checkpoint: %s", context.remote_id, error)
                yield PayloadChunk(refusal="this peer has no such piece of the checkpoint any more")

    async def _push(self, own: PayloadDescriptor, listeners: Sequence[str]) -> None:
        """Hand the own payload to a few groupmates, from whom the others get it."""
        payload = await self._held(own)
        if payload is None:
            return  # the disk has lost it since the exchange began
        pause = _FIRST_PAUSE
        holders = 0
        while not holders:
            for listener in listeners:
                try:
                    await self._push_to(listener, own, payload)
                except Exception as error:  # hivemind and libp2p raise anything here
                    log.debug("%s did not take the payload: %r", listener, error)
                    continue
                holders += 1
                if holders == _PUSHES:
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _push_to(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        async def parts() -> AsyncIterator[PayloadChunk]:
            yield PayloadChunk(announced=descriptor_to_pb(own))
            pieces = (payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES))
            async for chunk in outgoing(pieces, own.round_number, own.stage):
                yield chunk

        reply = await self._stub(listener, own.stage).rpc_push(parts())
        if reply.refusal:
            raise TransferError(f"refused: {reply.refusal[:200]}")

    async def rpc_push(self, stream: AsyncIterator[PayloadChunk], context: P2PContext) -> PushReply:
        """Take the awaited payload of a groupmate that cannot be asked for it."""
        async with asyncio.timeout(_DIAL_SECONDS):
            first = await anext(stream)
        try:
            descriptor = descriptor_from_pb(first.announced)
        except HetnodeError as error:
            return PushReply(refusal=error.cause)
        if self._awaited.get(context.remote_id.to_base58()) != descriptor:
            return PushReply(refusal="this peer awaits no such payload from you now")
        if self.store.has(descriptor.round_number, descriptor.sha256):
            return PushReply()
        with self._transfer(context.remote_id, f"push {descriptor.sha256}", 1) as allowed:
            if not allowed:
                return PushReply(refusal="you are sending that payload already")
            try:
                payload = await receive(stream, descriptor)
            except (TransferError, TimeoutError) as error:
                self._note_fault(descriptor, context.remote_id.to_base58(), error)
                return PushReply(refusal=str(error) or "too slow")
        await self.hold(descriptor, payload)
        return PushReply()

    async def _wait_for_turn(self, request: DescriptorMessage, peer: PeerID) -> None:
        """Until the own payload may be given away, but not for long; see :meth:`exchange`."""
        if request.owner != self._me:
            return
        with self._transfer(peer, "early", _EARLY_REQUESTS) as allowed, suppress(TimeoutError):
            async with asyncio.timeout(_EARLY_SECONDS if allowed else 0):
                while self._is_early(request):
                    await self._progress.wait()

    def _is_early(self, request: DescriptorMessage) -> bool:
        if request.round == self._round:
            return self._to_ask is None or bool(self._to_ask)
        return request.round > self._round and not self.store.has(request.round, request.sha256)

    def _note_asked(self, owner: str) -> None:
        """The request for the payload of `owner` is out, or need not be made."""
        if self._to_ask:
            self._advance(self._round, self._to_ask - {owner})

    def _advance(self, round_number: int, to_ask: set[str] | None) -> None:
        self._round, self._to_ask = round_number, to_ask
        self._progress.set()
        self._progress = asyncio.Event()

    def _note_fault(self, descriptor: PayloadDescriptor, sender: str, error: Exception) -> None:
        # libp2p authenticates who sent the bytes, and that they arrived as sent.
        if sender == descriptor.owner and isinstance(error, WrongBytes):
            self._faults[sender] = str(error)

    def _stub(self, peer: str, stage: int) -> Any:
        hooks.current().before_contact(peer)
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=stage_prefix(self._run, stage))

    def _spread(self, holders: Iterable[str]) -> list[str]:
        """The holders in an order of this peer's own, so that not everybody asks the same one first."""
        return sorted(holders, key=lambda holder: hashlib.sha256(f"{self._me}{holder}".encode()).digest())

    @contextmanager
    def _transfer(self, peer: PeerID, what: str, most: int) -> Iterator[bool]:
        """Whether `peer` may open one more transfer of `what`, of which it may have `most` at a time."""
        transfer = (peer, what)
        if self._transfers[transfer] == most:
            yield False
            return
        self._transfers[transfer] += 1
        try:
            yield True
        finally:
            self._transfers[transfer] -= 1
            if not self._transfers[transfer]:
                del self._transfers[transfer]


def _brief(error: Exception) -> str:
    """libp2p tells every address that it has tried, over many lines."""
    return " ".join((str(error) or type(error).__name__).split())[:300]
