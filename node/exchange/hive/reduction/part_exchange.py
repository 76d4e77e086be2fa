"""One round of reduction between the members of a group: hivemind's butterfly, with rules for failures.

Each member sends to every reducer its parts, and gets the reduced parts back on the same stream. Rules:

- Who sends no more, or a part that is not valid, counts in the parts that it has sent before. A sender has
  the first half of the time.
- Weights come from the descriptors that the members have signed.
- A reducer with a checker (:mod:`node.exchange.hive.reduction.part_check`) counts only the senders of which
  both have all parts, and nobody takes sums that the checker has not signed.
- A part that a reducer has not sent, or that is not valid, is missing at this member alone: it goes on to
  reduce for the others, and gets the result by its hash when the round is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.averaging_pb2 import AVERAGED_PART, PROTOCOL_VIOLATION, AveragingData, MessageCode
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils.asyncio import attach_event_on_finished

from node import hooks
from node.exchange.hive.reduction.part_plan import RETRY_SECONDS, PartPlan, Reduction
from node.exchange.hive.reduction.part_reducer import PartContainer, PartReducer, ReducedPart
from node.exchange.transfer import linger
from protocol.errors import HetnodeError
from protocol.pb.payload_pb2 import CountRequest
from protocol.reduction.counted_result import mask_of, senders_of
from protocol.reduction.partition import PartRange
from protocol.reduction.parts import decode_part
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import UNLIMITED, Line
from protocol.trust.envelope import is_signed_by

log = logging.getLogger(__name__)
T = TypeVar("T")


class PartExchange(AllReduceRunner):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's all-reduce of one round in one member. Belongs to one event loop; :meth:`run` once.

    Args:
        servicer_type, prefix: name the remote calls of the members, as in hivemind.
        sent: this member's own payload, cut into all parts of the plan in their order.
        reducers: of this member in this stage.
        seconds: until :meth:`exchange` ends.
    """

    def __init__(
        self,
        p2p: P2P,
        servicer_type: type[ServicerBase],
        prefix: str | None,
        group_id: bytes,
        plan: PartPlan,
        sent: Sequence[bytes],
        reducers: StageReducers,
        seconds: float,
        line: Line = UNLIMITED,
    ) -> None:
        chunks = tuple(float(len(each)) for each in plan.ranges)
        super().__init__(
            p2p=p2p,
            servicer_type=servicer_type,
            prefix=prefix,
            group_id=group_id,
            tensors=(),
            ordered_peer_ids=plan.members,
            peer_fractions=chunks,
            sender_timeout=seconds / 2,
        )
        self._plan, self._line = plan, line
        self._own = plan.members.index(self.peer_id)
        by_reducer = plan.by_reducer(sent)
        # hivemind has made both for no tensors.
        self.tensor_part_container = PartContainer(by_reducer)
        self.tensor_part_reducer = PartReducer(len(plan.parts[self._own]), plan.weights)
        self._own_parts, self._reducers = by_reducer[self._own], reducers
        self._checker = plan.checkers[self._own]
        self._signature: asyncio.Future[bytes] = asyncio.Future()
        now = asyncio.get_running_loop().time()
        self._senders_end, self._ends = now + seconds / 2, now + seconds
        self._streams: set[PeerID] = set()

    async def exchange(self) -> Reduction:
        """Send all parts, reduce the own ones, and collect the results, until all have come or time is up."""
        if self._checker is None:
            await self._begin()
        try:
            parts = tuple([part async for part in self.run()])
            is_signed = self._signature.done() and self._signature.exception() is None
            return Reduction(self._plan, parts, self._checker if self._own_parts and not is_signed else None)
        finally:
            _fail(self._signature, "the exchange of parts has ended")
            await self.tensor_part_reducer.wait_idle()

    async def _begin(self) -> None:
        """Reduce from now on what all senders have sent that count."""
        checker, senders = self._checker, None
        partner = "" if checker is None else self._plan.members[checker].to_base58()
        if checker is not None:
            mask = mask_of(self.tensor_part_reducer.complete, self.group_size)
            request = CountRequest(group_id=self.group_id, since=self._reducers.since, senders=mask)
            reply = await self._get_peer_stub(self._plan.members[checker]).rpc_count(request)
            if reply.refusal:
                raise AllreduceException(reply.refusal[:200])
            if reply.since != self._reducers.since:
                self._reducers.clear()
            senders = senders_of(reply.senders, self.group_size)
        own = self._plan.parts[self._own]
        self.tensor_part_reducer.begin(
            await asyncio.to_thread(self._reducers.for_parts, own, partner), senders
        )

    async def _let_check(self) -> None:
        """Get the signature of the checker for all sums of this member."""
        assert self._checker is not None, "somebody checks"
        reducer, checker = self.tensor_part_reducer, self._plan.members[self._checker]
        reduced = [await reducer.reduced(number) for number in range(len(self._own_parts))]
        answers = [part.to_bytes(self.group_size) for part in reduced]

        async def messages() -> AsyncIterator[AveragingData]:
            for answer in answers:
                await self._line.up.take(len(answer))
                yield AveragingData(group_id=self.group_id, tensor_part=Tensor(buffer=answer))

        reply = await self._get_peer_stub(checker).rpc_sign(messages())
        if not self._is_signed(self._own, answers, reply.signature):
            raise AllreduceException(reply.refusal[:200] or "its signature is not valid")
        self._signature.set_result(reply.signature)

    def _is_signed(self, reducer: int, answers: Sequence[bytes], signature: bytes) -> bool:
        checker = self._plan.checkers[reducer]
        assert checker is not None, "somebody checks"
        message = self._plan.sums_message(self.group_id, reducer, answers)
        return is_signed_by(self._plan.members[checker].to_base58(), message, signature)

    # hivemind's run calls these.

    async def _handle_missing_senders(self) -> None:
        reducer = self.tensor_part_reducer
        try:
            async with asyncio.timeout_at(self._senders_end):
                await reducer.collected.wait()
        except TimeoutError:
            for peer, received in zip(self.sender_peer_ids, list(reducer.num_parts_received), strict=True):
                if received < reducer.num_parts:
                    log.warning("%s has sent %d of %d parts in time", peer, received, reducer.num_parts)
                    await self._ban_sender(peer)
        if self._checker is None:
            return
        try:
            async with asyncio.timeout_at(self._ends):
                await self._begin()
                await self._let_check()
        except Exception as error:  # hivemind and its transport raise many kinds
            reason = (
                f"{self._plan.members[self._checker]} has not signed: {str(error) or type(error).__name__}"
            )
            log.warning("group %s lacks the own parts: %s", self.group_id.decode(), reason)
            _fail(self._signature, reason)

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        """Send a reducer its parts, and register what it answers; the rest is missing."""
        position = self.ordered_peer_ids.index(peer_id)
        answers = self._own_answers() if position == self._own else self._answers_of(peer_id, position)
        try:
            async with asyncio.timeout_at(self._ends), aclosing(answers):
                number = 0
                async for answer in answers:
                    self.tensor_part_container.register_processed_part(position, number, answer)
                    number += 1
        except Exception as error:  # hivemind and its transport raise many kinds
            reason = error.cause if isinstance(error, HetnodeError) else str(error) or type(error).__name__
            log.warning("group %s lacks parts of %s: %s", self.group_id.decode(), peer_id, reason)
        finally:
            self.tensor_part_container.register_failed_reducer(position)

    async def _own_answers(self) -> AsyncGenerator[ReducedPart, None]:
        for part in self._own_parts:
            self.tensor_part_reducer.add(self._own, part)
        if self._checker is not None:
            await asyncio.shield(self._signature)
        for number in range(len(self._own_parts)):
            yield await self.tensor_part_reducer.reduced(number)

    async def _answers_of(self, peer_id: PeerID, position: int) -> AsyncGenerator[ReducedPart, None]:
        sent = asyncio.Event()
        stream = await self._stream_to(peer_id, position, sent)
        async with aclosing(stream):  # closing tells the reducer that all has arrived
            if self.should_delay_results(self.peer_id):
                await sent.wait()
            if self._plan.checkers[position] is None:
                for part in self._plan.parts[position]:
                    yield await self._next_answer(stream, part)
                return
            # Only all sums together are signed.
            found = [await self._next_answer(stream, part) for part in self._plan.parts[position]]
            signature = (await _next(stream)).tensor_part.buffer
            if not self._is_signed(position, [part.to_bytes(self.group_size) for part in found], signature):
                raise AllreduceException("its checker has not signed its sums")
            for each in found:
                yield each

    async def _stream_to(self, peer_id: PeerID, position: int, sent: asyncio.Event) -> Any:
        """Begin to send a reducer its parts. Returns its answers. Raises what the transport raises."""
        while True:
            outgoing = attach_event_on_finished(self._generate_input_for_peer(position), sent)
            try:
                return await self._get_peer_stub(peer_id).rpc_aggregate_part(outgoing)
            except ControlFailure as error:  # nothing was sent
                if asyncio.get_running_loop().time() > self._senders_end - RETRY_SECONDS:
                    raise
                log.info("%s takes no parts yet: %s", peer_id, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _next_answer(self, stream: AsyncIterator[AveragingData], part: PartRange) -> ReducedPart:
        message = await _next(stream)
        await self._line.down.take(len(message.tensor_part.buffer))
        return await asyncio.to_thread(self._answer, part, message)

    def _get_peer_stub(self, peer: PeerID) -> Any:
        hooks.current().before_contact(peer.to_base58())
        return super()._get_peer_stub(peer)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[AveragingData]:
        async for message in super()._generate_input_for_peer(peer_index):
            await self._line.up.take(len(message.tensor_part.buffer))
            yield message

    def _answer(self, part: PartRange, message: AveragingData) -> ReducedPart:
        """Raises AllreduceException or HetnodeError PAYLOAD_CORRUPT if it is not valid."""
        if message.code != AVERAGED_PART:
            raise AllreduceException(f"it answered {MessageCode.Name(message.code)}")
        return self._plan.read_answer(part, message.tensor_part.buffer)

    # Answers to the calls of other members

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        """Take the parts of a member, and answer each with its sum."""
        sender = context.remote_id
        # A second stream would count a sender twice, and hivemind raises on a peer that is not in the group.
        if sender not in self.sender_peer_ids or sender in self._streams or not self._own_parts:
            yield AveragingData(code=PROTOCOL_VIOLATION)
            await linger()  # else the refusal may be lost
            return
        self._streams.add(sender)
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
        if sender not in self.banned_senders:
            await linger()

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[AveragingData], sender_index: int
    ) -> AsyncIterator[AveragingData]:
        """Take all parts of a sender as they come; yield the answers. hivemind calls this for each stream."""
        # In a task: a part waits for the slowest sender, and the next ones come meanwhile.
        receiving = asyncio.create_task(self._receive(stream, sender_index))
        try:
            for number in range(len(self._own_parts)):
                answer = (
                    await self._while_receiving(self.tensor_part_reducer.reduced(number), receiving)
                ).to_bytes(self.group_size)
                await self._line.up.take(len(answer))
                yield AveragingData(code=AVERAGED_PART, tensor_part=Tensor(buffer=answer))
            if self._checker is not None:
                # Last: while the checker works, the sums are on their way already.
                signature = await self._while_receiving(asyncio.shield(self._signature), receiving)
                yield AveragingData(code=AVERAGED_PART, tensor_part=Tensor(buffer=signature))
            await receiving
        finally:
            receiving.cancel()
            await self._stop_counting(sender_index)

    async def _while_receiving(self, awaited: Awaitable[T], receiving: asyncio.Task[None]) -> T:
        """Wait for `awaited`, as long as `receiving` does not fail. Raises what either raises."""
        waiting = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait({receiving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await waiting
        finally:
            waiting.cancel()

    async def _receive(self, stream: AsyncIterator[AveragingData], sender_index: int) -> None:
        """Take the parts of a sender until its stream ends. Raises as :meth:`_part`."""
        number = 0
        try:
            async for message in stream:
                if number == len(self._own_parts):
                    raise AllreduceException(f"more than {number} parts")
                await self._line.down.take(len(message.tensor_part.buffer))
                self.tensor_part_reducer.add(
                    sender_index, await asyncio.to_thread(self._part, number, message)
                )
                number += 1
        finally:
            await self._stop_counting(sender_index)

    async def _stop_counting(self, sender_index: int) -> None:
        """If a sender has not sent all parts, it counts in those that have come, and in no other."""
        reducer = self.tensor_part_reducer
        if reducer.num_parts_received[sender_index] < reducer.num_parts:
            await self._ban_sender(self.sender_peer_ids[sender_index])

    def _part(self, number: int, message: AveragingData) -> bytes:
        """Raises AllreduceException or HetnodeError PAYLOAD_CORRUPT if it is not valid."""
        part, data = self._plan.parts[self._own][number], message.tensor_part.buffer
        expected = self._plan.layout.part_sent(part).nbytes
        if len(data) != expected:
            raise AllreduceException(f"a part of {len(data)} bytes instead of {expected}")
        decode_part(self._plan.layout, part, data)
        return bytes(data)


async def _next(stream: AsyncIterator[AveragingData]) -> AveragingData:
    """Raises AllreduceException at the end of the stream."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise AllreduceException("it has ended the stream") from None


def _fail(future: asyncio.Future[bytes], reason: str) -> None:
    if not future.done():
        future.set_exception(AllreduceException(reason))
        future.exception()  # perhaps nobody waits for it
