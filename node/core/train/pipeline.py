"""The inner step of one member, seen from the main process: 1F1B microbatches between worker and neighbours.

Frames arrive, are computed on and leave at the same time: operations are queued at the worker before their
turn, and results are sent while the next operation computes. A full replica is a pipeline without links.

The outer exchange uses the same worker, which does all calls in the order in which they are queued. A call
that proposes, or changes anchors or parameters (Commit, LoadPart, Restore, ...), must not come between the
calls of an inner step or validation: the worker holds activations of the old parameters then.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.ipc.worker_calls import Apply, Backward, EndValidation, Evaluate, Forward, Message, SquaredNorm
from node.ipc.worker_client import QueuedCall, WorkerClient
from node.monitoring.figures import Waits
from node.net.link import FrameRefused, LiveLink
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.microbatch_order import Op, OpKind, one_forward_one_backward
from protocol.spec.run import RunSpec
from protocol.status import Wait
from protocol.types import DType, Frame, FrameId, FrameKind, Plan, Replica, TensorHeader

_SCALAR = struct.Struct("<d")
_QUEUED_OPERATIONS = 3  # one computing, one read ahead by the worker, one on its way


class _Slots:
    """Bounds the operations at the worker. Those of a turn get their slots together, at its first `take`.

    So a cancelled caller has queued whole turns. A turn is one operation; of several ranks that share the
    microbatches, those of one microbatch for each: where parameters are sharded, each pass of a rank waits
    for a pass of every other one.
    """

    def __init__(self, turn: int) -> None:
        # Two turns at least: the next one is at the worker when the first one ends.
        self._turn, self._free = turn, asyncio.Semaphore(max(_QUEUED_OPERATIONS, 2 * turn))
        self._taken = 0  # that no operation of the turn uses yet

    async def take(self) -> None:
        """A slot for the next operation. Suspends only before the first one of a turn."""
        if not self._taken:
            for _ in range(self._turn):
                await self._free.acquire()
            self._taken = self._turn
        self._taken -= 1

    def release(self) -> None:
        self._free.release()


class Pipeline:
    """One member of a replica, between its neighbours.

    Args:
        plan: of the round `round_number`, from which the epoch in every frame follows.
        position: this member's index in `replica`.
        worker: the process that computes.
        upstream, downstream: the links to both neighbours, None at the ends.
        waits: notes how long this member waits for its neighbours.

    Every method raises HetnodeError (NEIGHBOUR_LOST, FRAME_CORRUPT, WORKER_DIED, ...) on failure, and may be
    cancelled. Discard the object then: its neighbours are at another frame. No task of it is left. The worker
    still does the calls that were queued; Abandon after them drops the unfinished step.
    """

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        replica: Replica,
        position: int,
        worker: WorkerClient,
        upstream: LiveLink | None,
        downstream: LiveLink | None,
        waits: Waits | None = None,
        round_number: int = 0,
    ) -> None:
        self._spec, self._position, self._waits = spec, position, waits or Waits()
        self._worker, self._upstream, self._downstream = worker, upstream, downstream
        self._order: tuple[Op, ...]
        self._samples_per_round: int
        self.adopt(plan, replica, round_number)
        # Some frames have to wait until the neighbour has finished its own round.
        timing = spec.timing
        self._frame_seconds = timing.link
        self._round_seconds = timing.link + timing.match_window + timing.fetch + timing.decide

    @property
    def bytes_sent(self) -> int:
        """Bytes that this member has sent over its links so far."""
        return sum(link.bytes_sent for link in self._links)

    @property
    def dense_bytes_per_round(self) -> int:
        """Bytes that this member would send in an inner phase if activations were uncompressed float32."""
        spec = self._spec
        return len(self._links) * 4 * self._samples_per_round * spec.model.context * spec.model.width

    def adopt(self, plan: Plan, replica: Replica, round_number: int = 0) -> None:
        """Continue under a new plan with the same members, between two rounds."""
        self._epoch = plan.epoch_of_links(replica, round_number)
        microbatches = self._spec.microbatches_of(replica)
        self._order = one_forward_one_backward(self._position, len(replica.members), microbatches)
        self._samples_per_round = self._spec.samples_per_round(microbatches)

    def drop_frames_before(self, round_number: int) -> None:
        """Drop frames of earlier rounds that were not taken."""
        for link in self._links:
            link.drop_before(round_number)

    async def part(self, seconds: float | None = None) -> None:
        """End the links in order. Waits `seconds` for the neighbours; None: as long as a round may take."""
        patience = self._round_seconds if seconds is None else seconds
        await asyncio.gather(*(link.part(patience) for link in self._links))

    async def close(self) -> None:
        """End the links at once: this member has lost one of its neighbours."""
        await asyncio.gather(*(link.close() for link in self._links))

    async def phase(self, round_number: int, step: int, wanted: bool) -> bool:
        """Agree on whether the replica trains inner step `step` (0-based in its round).

        The first member decides by its `wanted`, and the answer is the same on all members. Call this before
        every step, and once more to end the inner phase.
        """
        frame_id = self._id(round_number, step, 0, FrameKind.PHASE)
        if self._upstream is not None:
            # The first member can be in an exchange before these steps.
            after_exchange = step in (0, self._spec.outer.overlap) or step >= self._spec.inner.steps
            patience = self._round_seconds if after_exchange else self._frame_seconds
            wanted = _decision_of(await self._received(self._upstream, frame_id, patience))
        if self._downstream is not None:
            await self._downstream.send(_scalar_frame(frame_id, float(wanted)), self._frame_seconds)
        return wanted

    async def inner_step(self, round_number: int, step: int) -> None:
        """One inner step (0-based in its round): all microbatches, the global norm, a step of the optimizer.

        A step beyond the spec's H trains on the round's samples again, at the last step's learning rate.
        """
        ranks = self._worker.ranks
        slots = _Slots(1 if ranks == 1 else 2 * ranks)  # a forward and a backward of each
        async with _failing_as_one() as group:
            for operation in self._order:
                forward = operation.kind is OpKind.FORWARD
                kind = FrameKind.FORWARD if forward else FrameKind.BACKWARD
                frame_id = self._id(round_number, step, operation.microbatch, kind)
                source = self._upstream if forward else self._downstream
                received = await self._take(source, frame_id)
                await slots.take()
                message, microbatch = _message_of(received), operation.microbatch
                ahead = Forward(step, microbatch, message, round_number)
                queued = await self._worker.queue(ahead if forward else Backward(microbatch, message))
                target = self._downstream if forward else self._upstream
                group.create_task(self._pass_on(queued, frame_id, source, target, slots))
        norm = await self._agree_on_norm(round_number, step)
        await self._worker.call(Apply(step, norm))

    async def validate(self, round_number: int) -> float:
        """Forward passes over the validation samples. Returns the mean loss at the last member, else NaN."""
        slots = _Slots(self._worker.ranks)
        async with _failing_as_one() as group:
            for microbatch in range(self._spec.data.validation_batches):
                frame_id = self._id(round_number, 0, microbatch, FrameKind.EVALUATE)
                received = await self._take(self._upstream, frame_id)
                await slots.take()
                queued = await self._worker.queue(Evaluate(microbatch, _message_of(received)))
                group.create_task(self._pass_on(queued, frame_id, self._upstream, self._downstream, slots))
        return await self._worker.call(EndValidation())

    @property
    def _links(self) -> list[LiveLink]:
        return [link for link in (self._upstream, self._downstream) if link is not None]

    def _id(self, round_number: int, step: int, microbatch: int, kind: FrameKind) -> FrameId:
        return FrameId(self._epoch, round_number, step, microbatch, kind)

    async def _take(self, link: LiveLink | None, frame_id: FrameId) -> Frame | None:
        if link is None:
            return None
        # The validation follows an exchange, in which the neighbour can still be.
        first = frame_id.kind is FrameKind.EVALUATE and frame_id.microbatch == 0
        return await self._received(link, frame_id, self._round_seconds if first else self._frame_seconds)

    async def _received(self, link: LiveLink, frame_id: FrameId, patience: float) -> Frame:
        with self._waits.on(Wait.NEIGHBOUR):
            return await link.take(frame_id, patience)

    async def _pass_on(
        self,
        queued: QueuedCall[Message | None],
        frame_id: FrameId,
        source: LiveLink | None,
        link: LiveLink | None,
        slots: _Slots,
    ) -> None:
        """Send the answer of a call, about a frame of `source`, to a neighbour, if there is one."""
        try:
            message = await queued.answer()
        except HetnodeError as error:
            if source is not None and error.code is ErrorCode.FRAME_CORRUPT:
                raise FrameRefused(source.neighbour.peer, error) from None
            raise
        if link is not None:
            assert message is not None, "a member with a neighbour has something to send"
            await link.send(Frame(frame_id, message.tensors, message.payload), self._round_seconds)
        slots.release()  # only now: results must not pile up here while a neighbour takes none

    async def _agree_on_norm(self, round_number: int, step: int) -> float:
        """The global gradient norm: squares are summed upstream, the norm travels downstream."""
        squares = await self._worker.call(SquaredNorm())
        norm_id = self._id(round_number, step, 0, FrameKind.NORM)
        step_id = self._id(round_number, step, 0, FrameKind.STEP)
        if self._downstream is not None:
            squares += _scalar_of(await self._received(self._downstream, norm_id, self._frame_seconds))
        if self._upstream is None:
            norm = math.sqrt(squares) if squares >= 0 else math.nan
        else:
            await self._upstream.send(_scalar_frame(norm_id, squares), self._frame_seconds)
            norm = _scalar_of(await self._received(self._upstream, step_id, self._frame_seconds))
        if self._downstream is not None:
            await self._downstream.send(_scalar_frame(step_id, norm), self._frame_seconds)
        return norm


@asynccontextmanager
async def _failing_as_one() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure is raised alone, because the others follow from it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        expected = [failure for failure in failures.exceptions if isinstance(failure, HetnodeError)]
        raise (expected or failures.exceptions)[0] from None


def _message_of(frame: Frame | None) -> Message | None:
    return None if frame is None else Message(frame.tensors, frame.payload)


def _decision_of(frame: Frame) -> bool:
    value = _scalar_of(frame)
    if value not in (0.0, 1.0):
        raise HetnodeError(
            ErrorCode.FRAME_CORRUPT,
            "A neighbour's frame does not say whether another inner step follows.",
            "Update the older program of the two ends.",
        )
    return value == 1.0


def _scalar_frame(frame_id: FrameId, value: float) -> Frame:
    return Frame(frame_id, (TensorHeader("value", DType.F64, ()),), _SCALAR.pack(value))


def _scalar_of(frame: Frame) -> float:
    if len(frame.payload) != _SCALAR.size:
        return math.nan  # every member skips the step then
    return float(_SCALAR.unpack(frame.payload)[0])
