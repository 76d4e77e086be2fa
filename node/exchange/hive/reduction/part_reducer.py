"""The two halves of hivemind's all-reduce in one member, for parts of payloads instead of tensors.

hivemind sums float tensors in the order of their arrival, answers each sender with the difference to its own
tensor, and puts a member's own values where a reducer fails. So its members end with different bytes. Here a
part is the bytes of a payload's run of chunks (protocol.reduction.parts): its reducer takes the members'
parts in canonical order, all members get the same bytes, and what a failed reducer has not sent is missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass

import torch
from hivemind.averaging.partition import AllreduceException, TensorPartContainer, TensorPartReducer

from protocol.errors import HetnodeError
from protocol.reduction.counted_result import mask_nbytes, mask_of, senders_of
from protocol.reduction.parts import Reducer


@dataclass(frozen=True)
class ReducedPart:
    """What a reducer sends to all members for one part.

    Attributes:
        senders: the positions in the group of the members whose parts are in the sum, ascending.
        data: the reduced part, as protocol.reduction.parts encodes it.
    """

    senders: tuple[int, ...]
    data: bytes

    def to_bytes(self, members: int) -> bytes:
        """The senders as protocol.reduction.counted_result.mask_of, then the data."""
        return mask_of(self.senders, members) + self.data

    @classmethod
    def from_bytes(cls, data: bytes, members: int) -> ReducedPart:
        """Raises ValueError where no member, or one that does not exist, is counted."""
        size = mask_nbytes(members)
        return cls(senders_of(data[:size], members), data[size:])


def answer_nbytes(members: int, nbytes: int) -> int:
    """Length of :meth:`ReducedPart.to_bytes` with `nbytes` of data."""
    return mask_nbytes(members) + nbytes


class PartContainer(TensorPartContainer):  # type: ignore[misc]  # hivemind has no type information
    """What one member sends to each reducer, and what it gets back.

    Args:
        cut: by reducer, the parts that go to it; none of them is empty.
    """

    def __init__(self, cut: Sequence[Sequence[bytes]]) -> None:
        parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for of_one in cut for part in of_one]
        nbytes = [sum(map(len, of_one)) for of_one in cut]
        # No tensor is split, and none lands between two reducers.
        super().__init__(parts, nbytes, part_size_bytes=max(map(len, parts)), return_deltas=False)
        assert self.num_parts_by_peer == tuple(map(len, cut)), "hivemind gives each reducer its bytes"

    def register_failed_reducer(self, peer_index: int) -> None:
        """All parts that this reducer has not sent are missing; hivemind would take this member's own."""
        for number in range(self._outputs_registered_by_peer[peer_index], self.num_parts_by_peer[peer_index]):
            self.register_processed_part(peer_index, number, None)

    async def iterate_output_tensors(self) -> AsyncIterator[ReducedPart | None]:
        """The reduced parts in canonical order; None for each that is missing.

        Raises AllreduceException if the exchange ends before.
        """
        for position, count in enumerate(self.num_parts_by_peer):
            arrived, available = self._output_parts_by_peer[position], self._output_part_available[position]
            for _ in range(count):
                while not arrived:
                    available.clear()
                    await available.wait()
                    if self.finished.is_set():
                        raise AllreduceException("the exchange of parts has ended")
                yield arrived.popleft()


class PartReducer(TensorPartReducer):  # type: ignore[misc]  # hivemind has no type information
    """Reduces the parts of one member for all, each as soon as all senders that are left have sent it.

    A sender that fails counts in the parts that it has sent before, and in no other. Parts wait here for
    those of other senders: as many bytes as a payload has, if all members reduce equal parts.

    Args:
        parts: their number.
        weights: by member, in canonical order. What senders say of their weight does not count.

    Attributes:
        collected: set once each sender has sent all parts, or has failed.
    """

    def __init__(self, parts: int, weights: Sequence[float]) -> None:
        self._weights = weights
        self._reducers: Sequence[Reducer] | None = None
        self._received: list[dict[int, bytes]] = [{} for _ in range(parts)]
        self._reduced: list[asyncio.Future[ReducedPart]] = [asyncio.Future() for _ in range(parts)]
        self._running: dict[int, asyncio.Task[None]] = {}
        self.collected = asyncio.Event()
        super().__init__([torch.Size([0])] * parts, len(weights))

    @property
    def complete(self) -> list[int]:
        """The positions of the senders that have sent all parts, ascending."""
        return [each for each, count in enumerate(self.num_parts_received) if count == self.num_parts]

    def begin(self, reducers: Sequence[Reducer], senders: Collection[int] | None = None) -> None:
        """Reduce from now on, each part as soon as it is there.

        Args:
            reducers: one for each part, in canonical order. A caller commits or aborts them after the round.
            senders: the positions of those that may count; None: all.
        """
        self._reducers = reducers
        for index in range(self.num_senders):
            if senders is not None and index not in senders:
                self.sender_failed_after[index] = 0
        self._reduce_complete()

    def add(self, sender_index: int, part: bytes) -> None:
        """Take the next part of a sender, which is valid; it is dropped if the sender has failed."""
        number = self.num_parts_received[sender_index]
        if self.sender_failed_after[sender_index] == math.inf:
            self._received[number][sender_index] = part
            self.num_parts_received[sender_index] += 1
            self._note_progress()

    async def reduced(self, part_index: int) -> ReducedPart:
        """Wait for the sum of a part. Raises AllreduceException if it cannot be encoded, or at the end."""
        # All senders wait for one future. The stream of one that ends must not cancel it for the others.
        return await asyncio.shield(self._reduced[part_index])

    async def wait_idle(self) -> None:
        """Wait until no sum is being computed, so that the reducers may be used for another round."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def on_sender_failed(self, sender_index: int) -> None:
        """hivemind calls this once for each sender that fails, or that is late."""
        received = self.num_parts_received[sender_index]
        self.sender_failed_after[sender_index] = min(self.sender_failed_after[sender_index], received)
        self._note_progress()

    def finalize(self) -> None:
        """hivemind calls this at the end of the exchange: parts that are not reduced never will be."""
        for future in getattr(self, "_reduced", ()):
            if not future.done():
                future.set_exception(AllreduceException("the exchange of parts has ended"))
                future.exception()  # perhaps nobody waits for it
        self.finished.set()

    def _note_progress(self) -> None:
        states = zip(self.num_parts_received, self.sender_failed_after, strict=True)
        if all(received == self.num_parts or failed_after < math.inf for received, failed_after in states):
            self.collected.set()
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Begin to reduce each part that no more sender will add to."""
        if self._reducers is None:
            return
        for number, received in enumerate(self._received):
            if number not in self._running and self._counted(number) <= received.keys():
                self._running[number] = asyncio.create_task(self._reduce(self._reducers[number], number))
        if len(self._running) == self.num_parts:
            self.finished.set()

    def _counted(self, number: int) -> set[int]:
        """The senders that count in a part."""
        return {sender for sender, end in enumerate(self.sender_failed_after) if number < end}

    async def _reduce(self, reducer: Reducer, number: int) -> None:
        received, self._received[number] = self._received[number], {}
        senders = tuple(sorted(self._counted(number)))
        parts, weights = [received[sender] for sender in senders], [self._weights[each] for each in senders]
        try:
            # In a thread: sums of many parts would block the event loop.
            data = await asyncio.to_thread(reducer.reduce, parts, weights)
        except (HetnodeError, ValueError) as error:
            if not self._reduced[number].done():
                reason = error.cause if isinstance(error, HetnodeError) else str(error)
                self._reduced[number].set_exception(AllreduceException(reason))
                self._reduced[number].exception()  # perhaps nobody waits for it
            return
        if not self._reduced[number].done():
            self._reduced[number].set_result(ReducedPart(senders, data))
