"""One round of reduction between the members of a group: hivemind's butterfly, with rules for failures.

Each member sends to every reducer its parts, and gets the reduced parts back on the same stream. Rules:

- Who sends no more, or a part that is not valid, counts in the parts that it has sent before. A sender has
  the first half of the time.
- Weights come from the descriptors that the members have signed.
- A part that a reducer has not sent, or that is not valid, is missing at this member alone: it goes on to
  reduce for the others, and gets the result by its hash when the round is committed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto.averaging_pb2 import AVERAGED_PART, PROTOCOL_VIOLATION, AveragingData, MessageCode
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils.asyncio import attach_event_on_finished

from node import hooks
from node.hive.part_reducer import PartContainer, PartReducer, ReducedPart, answer_nbytes
from node.transport.line import UNLIMITED, Line
from node.transport.transfer import chunk_bytes, linger
from protocol.algorithm.partition import PartRange, partition, reducer_shares
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import ExchangeGroup, PeerId, ResultClaim
from protocol.wire.counted_result import CountedResult
from protocol.wire.payload_codec import decode
from protocol.wire.reduction import Reducer, ReductionLayout, decode_part, join_parts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartPlan:
    """Who reduces what in one round of a stage; all members have the same.

    Attributes:
        members: sorted by peer id, as text.
        weights: of their payloads, from the signed descriptors.
        ranges: by member, what it reduces; empty for those that reduce nothing.
    """

    layout: ReductionLayout
    members: tuple[PeerID, ...]
    weights: tuple[float, ...]
    ranges: tuple[PartRange, ...]

    @classmethod
    def of_group(cls, layout: ReductionLayout, group: ExchangeGroup) -> PartPlan:
        """The plan that all members make of the same group of the coordinator.

        Members that others cannot dial reduce nothing. If no uplink is known, all others reduce equal parts.

        Raises ValueError if there is no such member, or an owner is not a peer id.
        """
        owners = [descriptor.owner for descriptor in group.descriptors]
        is_open = [line.is_open for line in group.lines] or [True] * len(owners)
        uplinks = [line.uplink * line.is_open for line in group.lines]
        weights = tuple(descriptor.weight for descriptor in group.descriptors)
        ratio = max(1.0, layout.result.nbytes / layout.payload.nbytes)
        shares = reducer_shares(uplinks if any(uplinks) else list(map(int, is_open)), ratio)
        ranges = tuple(partition(layout.chunks.total, shares))
        return cls(layout, tuple(map(PeerID.from_base58, owners)), weights, ranges)

    @cached_property
    def parts(self) -> tuple[tuple[PartRange, ...], ...]:
        """By member: its range in parts of about one message each; hivemind reduces one after the other."""
        return tuple(tuple(self._parts_of(each)) for each in self.ranges)

    @property
    def all_parts(self) -> list[PartRange]:
        return [part for of_one in self.parts for part in of_one]

    def traffic(self, position: int) -> tuple[int, int]:
        """Bytes that a member sends and receives in a round: parts, and answers, without libp2p's own."""
        others, sent, received = len(self.members) - 1, 0, 0
        for reducer, parts in enumerate(self.parts):
            out = sum(self.layout.part_sent(part).nbytes for part in parts)
            back = sum(self.answer_nbytes(part) for part in parts)
            sent += others * back if reducer == position else out
            received += others * out if reducer == position else back
        return sent, received

    def answer_nbytes(self, part: PartRange) -> int:
        """Length of every answer of the reducer of `part`."""
        return answer_nbytes(len(self.members), self.layout.part_reduced(part).nbytes)

    def read_answer(self, part: PartRange, data: bytes) -> ReducedPart:
        """Raises HetnodeError PAYLOAD_CORRUPT for what no reducer of `part` answers."""
        if len(data) != (nbytes := self.answer_nbytes(part)):
            raise _corrupt(f"It has {len(data)} bytes for a part of {nbytes}.")
        try:
            reduced = ReducedPart.from_bytes(data, len(self.members))
        except ValueError as error:
            raise _corrupt(f"{error}.") from None
        decode(self.layout.part_reduced(part), reduced.data)
        return reduced

    def _parts_of(self, whole: PartRange) -> list[PartRange]:
        if not len(whole):
            return []
        nbytes = max(self.layout.part_sent(whole).nbytes, self.layout.part_reduced(whole).nbytes)
        count = min(len(whole), -(-nbytes // chunk_bytes(len(self.members) - 1)))
        return [
            PartRange(whole.first_chunk + part.first_chunk, whole.first_chunk + part.last_chunk)
            for part in partition(len(whole), [1.0] * count)
        ]


@dataclass(frozen=True)
class Reduction:
    """What one member has at the end: a reduced part, or None where it is missing, for each of all parts."""

    plan: PartPlan
    parts: tuple[ReducedPart | None, ...]

    @property
    def result(self) -> bytes | None:
        """The result of the round; None if a part is missing."""
        found = [part.data for part in self.parts if part is not None]
        if len(found) < len(self.parts):
            return None
        return join_parts(self.plan.layout, found, self.plan.all_parts)

    @property
    def lacks(self) -> list[int]:
        """The positions of the reducers of whose parts at least one is missing, ascending."""
        owners = [position for position, parts in enumerate(self.plan.parts) for _ in parts]
        return sorted({owner for owner, part in zip(owners, self.parts, strict=True) if part is None})

    def to_bytes(self) -> bytes | None:
        """What members serve and hash (protocol.wire.counted_result); None if a part is missing."""
        if (result := self.result) is None:
            return None
        senders = tuple(part.senders for part in self.parts if part is not None)
        return CountedResult(len(self.plan.members), senders, result).to_bytes()

    def claim(self, data: bytes) -> ResultClaim:
        """What a member that has all parts tells the coordinator; `data` are its bytes."""
        counted = {position for part in self.parts if part is not None for position in part.senders}
        left_out = (each for position, each in enumerate(self.plan.members) if position not in counted)
        without = tuple(PeerId(each.to_base58()) for each in left_out)
        return ResultClaim(hashlib.sha256(data).hexdigest(), len(data), without)


class PartExchange(AllReduceRunner):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's all-reduce of one round in one member. Belongs to one event loop; :meth:`run` once.

    Args:
        servicer_type, prefix: name the remote calls of the members, as in hivemind.
        sent: this member's own payload, cut into all parts of the plan in their order.
        reducers: one for each part that this member reduces.
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
        reducers: Sequence[Reducer],
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
        assert len(reducers) == len(plan.parts[self._own]), "each own part has its reducer"
        parts = iter(sent)
        by_reducer = [[next(parts) for _ in of_one] for of_one in plan.parts]
        # hivemind has made both for no tensors.
        self.tensor_part_container = PartContainer(by_reducer)
        self.tensor_part_reducer = PartReducer(reducers, plan.weights)
        self._own_parts = by_reducer[self._own]
        now = asyncio.get_running_loop().time()
        self._senders_end, self._ends = now + seconds / 2, now + seconds
        self._streams: set[PeerID] = set()

    async def exchange(self) -> Reduction:
        """Send all parts, reduce the own ones, and collect the results, until all have come or time is up."""
        try:
            return Reduction(self._plan, tuple([part async for part in self.run()]))
        finally:
            await self.tensor_part_reducer.wait_idle()

    # hivemind's run calls these.

    async def _handle_missing_senders(self) -> None:
        reducer = self.tensor_part_reducer
        try:
            async with asyncio.timeout_at(self._senders_end):
                await reducer.finished.wait()
        except TimeoutError:
            for peer, received in zip(self.sender_peer_ids, list(reducer.num_parts_received), strict=True):
                if received < reducer.num_parts:
                    log.warning("%s has sent %d of %d parts in time", peer, received, reducer.num_parts)
                    await self._ban_sender(peer)

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
        for number in range(len(self._own_parts)):
            yield await self.tensor_part_reducer.reduced(number)

    async def _answers_of(self, peer_id: PeerID, position: int) -> AsyncGenerator[ReducedPart, None]:
        sent = asyncio.Event()
        outgoing = attach_event_on_finished(self._generate_input_for_peer(position), sent)
        stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(outgoing)
        async with aclosing(stream):  # closing tells the reducer that all has arrived
            if self.should_delay_results(self.peer_id):
                await sent.wait()
            for part in self._plan.parts[position]:
                try:
                    message = await anext(stream)
                except StopAsyncIteration:
                    raise AllreduceException("it has ended the stream") from None
                await self._line.down.take(len(message.tensor_part.buffer))
                yield await asyncio.to_thread(self._answer, part, message)

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
                answer = (await self._reduced(number, receiving)).to_bytes(self.group_size)
                await self._line.up.take(len(answer))
                yield AveragingData(code=AVERAGED_PART, tensor_part=Tensor(buffer=answer))
            await receiving
        finally:
            receiving.cancel()
            await self._stop_counting(sender_index)

    async def _reduced(self, number: int, receiving: asyncio.Task[None]) -> ReducedPart:
        """Wait for the sum of a part, as long as `receiving` does not fail. Raises what it raises."""
        reduced = asyncio.create_task(self.tensor_part_reducer.reduced(number))
        try:
            await asyncio.wait({receiving, reduced}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await reduced
        finally:
            reduced.cancel()

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


def _corrupt(cause: str) -> HetnodeError:
    remedy = "It is not applied. The other member must run the same version and specification."
    return HetnodeError(ErrorCode.PAYLOAD_CORRUPT, f"A result cannot be used. {cause}", remedy)
