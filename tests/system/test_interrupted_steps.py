"""Steps that are interrupted, and links that repeat frames: nothing counts twice."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.core.train.pipeline import Pipeline
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream
from node.ipc.worker_calls import Abandon, BeginRound, EndInnerPhase
from node.ipc.worker_client import WorkerClient
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.worker.process import NodeWorker
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.microbatch_order import Op, OpKind, one_forward_one_backward
from protocol.types import DType, Frame, FrameId, FrameKind, Plan, Replica, TensorHeader
from protocol.wire.framing import frame_limit
from protocol.wire.link_message import LinkMessage
from protocol.wire.typed_calls import Call, Reply
from tests.support.examples import examples
from tests.support.hand_driven_replica import SPEC, assert_same_bits, begin, chain, inner_step, state
from tests.support.running_replica import RunningReplica, replica_of

pytestmark = pytest.mark.usefixtures("one_thread")


def operations(members: int) -> list[tuple[int, Op]]:
    """One inner step of all members in an order that their neighbours allow."""
    waiting = [
        list(one_forward_one_backward(position, members, SPEC.inner.microbatches))
        for position in range(members)
    ]
    order: list[tuple[int, Op]] = []
    while any(waiting):
        for position, operations_left in enumerate(waiting):
            if not operations_left:
                continue
            op = operations_left[0]
            source = position - 1 if op.kind is OpKind.FORWARD else position + 1
            if not 0 <= source < members or (source, op) in order:
                order.append((position, operations_left.pop(0)))
    return order


def run_operations(members: list[Trainer], step: int, order: list[tuple[int, Op]]) -> None:
    messages: dict[tuple[int, Op], Any] = {}
    for position, op in order:
        member = members[position]
        if op.kind is OpKind.FORWARD:
            received = messages.get((position - 1, op))
            messages[position, op] = member.forward(step, op.microbatch, received)
        else:
            received = messages.get((position + 1, op))
            messages[position, op] = member.backward(op.microbatch, received)


@settings(
    deadline=None,
    max_examples=examples(gate=15, search=40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), members=st.sampled_from([1, 2]), by_begin_round=st.booleans())
def test_a_step_that_is_interrupted_at_any_operation_changes_nothing(
    stream: SampleStream, data: st.DataObject, members: int, by_begin_round: bool
) -> None:
    order = operations(members)
    done = data.draw(st.integers(0, len(order)), label="operations before the failure")
    undisturbed, broken = chain(stream, members), chain(stream, members)
    for replica in (undisturbed, broken):
        begin(replica, 1)
        if not by_begin_round:
            inner_step(replica, 0)
    step = 0 if by_begin_round else 1
    run_operations(broken, step, order[:done])
    if by_begin_round:
        begin(broken, 1)
    else:
        for member in broken:
            member.abandon()
    for replica in (undisturbed, broken):
        run_operations(replica, step, order)
        norm = math.sqrt(sum(member.inner.squared_gradient_norm() for member in replica))
        for member in replica:
            member.apply(step, norm)
    assert_same_bits(state(broken), state(undisturbed))
    assert broken[-1].end_inner_phase() == undisturbed[-1].end_inner_phase()


async def test_all_members_take_as_many_steps_as_the_first_member() -> None:
    async with AsyncExitStack() as stack:
        replica = RunningReplica(SPEC, members=2)
        await replica.start(stack)

        async def train(position: int) -> int:
            pipeline, worker = replica.pipelines[position], replica.workers[position]
            await worker.client.call(BeginRound(1, range(SPEC.samples_per_round())))
            step = 0
            while await pipeline.phase(1, step, wanted=position == 0 and step < 1):
                await pipeline.inner_step(1, step)
                step += 1
            return (await worker.client.call(EndInnerPhase())).result.steps

        assert await asyncio.gather(train(0), train(1)) == [1, 1]


async def test_a_lost_neighbour_ends_the_step_with_one_error_and_leaves_no_task() -> None:
    async with AsyncExitStack() as stack:
        replica = RunningReplica(SPEC, members=2)
        await replica.start(stack)
        for worker in replica.workers:
            await worker.client.call(BeginRound(1, range(SPEC.samples_per_round())))
        tasks_before = asyncio.all_tasks()
        step = asyncio.create_task(replica.pipelines[0].inner_step(1, 0))
        link = replica.upstream[1]
        assert link is not None
        await link.take(FrameId(replica.plan.epoch, 1, 0, 0, FrameKind.FORWARD), 60)
        await link.close()
        with pytest.raises(HetnodeError) as caught:
            await step
        assert caught.value.code is ErrorCode.NEIGHBOUR_LOST
        left = {task for task in asyncio.all_tasks() - tasks_before if not task.done()}
        # The event loop itself makes a task where the garbage collector ends an async generator.
        assert {task for task in left if type(task.get_coro()).__name__ != "async_generator_athrow"} == set()
        before = {name: tensor.clone() for name, tensor in replica.parameters().items()}
        await replica.workers[0].client.call(Abandon())
        assert replica.workers[0].trainer.inner.squared_gradient_norm() == 0.0
        assert_same_bits(dict(replica.parameters()), before)


async def test_a_phase_frame_that_says_neither_yes_nor_no_is_corrupt() -> None:
    class Upstream:
        async def take(self, frame_id: FrameId, _: float) -> Frame:
            return Frame(frame_id, (TensorHeader("value", DType.F64, ()),), struct.pack("<d", 0.5))

    async with AsyncExitStack() as stack:
        replica = RunningReplica(SPEC, members=1)
        await replica.start(stack)
        chained: Any = (
            SPEC,
            replica.plan,
            replica.replica,
            0,
            replica.workers[0].client,
            Upstream(),
            None,
        )
        with pytest.raises(HetnodeError) as caught:
            await Pipeline(*chained).phase(1, 0, wanted=True)
        assert caught.value.code is ErrorCode.FRAME_CORRUPT


class InlineWorker:
    """The production worker without a thread: each call is executed when it is made."""

    def __init__(self, trainer: Trainer) -> None:
        worker = NodeWorker()
        worker.trainer = trainer
        self._handlers = worker.handlers()
        self.client = WorkerClient(self)

    def call(self, call: Call) -> Awaitable[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        answer.set_result(self._handlers[call.method](call))
        return answer

    async def wait_closed(self) -> None:
        raise NotImplementedError


class NoisyWire:
    """One direction of a link. `again`: which frames come twice. `late`: frames that come first.

    Both ends are production links, so a neighbour could send all that they receive.
    """

    def __init__(
        self, again: Iterator[bool], late: list[list[LinkMessage]], tell: Callable[[], None]
    ) -> None:
        self.sent: list[list[LinkMessage]] = []
        self._again, self._left, self._tell = again, 0, tell
        self._queue: asyncio.Queue[LinkMessage] = asyncio.Queue()
        for frame in late:
            self._deliver(frame)

    async def write(self, message: LinkMessage) -> None:
        if message.header is not None:
            self.sent.append([])
            self._left = message.header.nbytes
        if message.chunk is not None:
            self._left -= len(message.chunk)
        self.sent[-1].append(message)
        if not self._left:
            for _ in range(1 + next(self._again)):
                self._deliver(self.sent[-1])
            self._tell()

    async def read(self) -> LinkMessage:
        return await self._queue.get()

    def _deliver(self, frame: list[LinkMessage]) -> None:
        for message in frame:
            self._queue.put_nowait(message)


class Attempt:
    """One attempt at a step by the members of a chain, with its own plan, over noisy links."""

    def __init__(
        self,
        workers: list[InlineWorker],
        replica: Replica,
        epoch: int,
        again: Iterator[bool],
        before: Attempt | None,
    ) -> None:
        self._frames, self._last, self._enough = 0, -1, asyncio.Event()
        plan = Plan(epoch, 1, 0, (replica,), "test")
        limits, members = LinkLimits(frame_limit(SPEC), 1000), len(workers)
        self.wires = [
            NoisyWire(again, before.wires[number].sent if before else [], self._count)
            for number in range(2 * members - 2)
        ]
        down, up = self.wires[: members - 1], self.wires[members - 1 :]

        def end(other: int, read: NoisyWire, write: NoisyWire) -> LiveLink:
            neighbour = LinkMember(SPEC.name, SPEC.hash, replica.members[other].peer, 0, other, epoch)
            return LiveLink(neighbour, read.read, write.write, limits)

        above = [end(i + 1, up[i], down[i]) for i in range(members - 1)]
        below = [end(i, down[i], up[i]) for i in range(members - 1)]
        self.links = [*above, *below]
        self.pipelines = [
            Pipeline(SPEC, plan, replica, i, worker.client, up_link, down_link)  # type: ignore[arg-type]
            for i, (worker, up_link, down_link) in enumerate(
                zip(workers, [None, *below], [*above, None], strict=True)
            )
        ]

    def _count(self) -> None:
        self._frames += 1
        if self._frames == self._last:
            self._enough.set()

    async def step(self, step: int, killed_after: int | None = None) -> None:
        """One inner step of all members; it is cancelled after `killed_after` frames, if given."""
        self._last = killed_after or -1
        tasks = [asyncio.create_task(pipeline.inner_step(1, step)) for pipeline in self.pipelines]
        try:
            if killed_after is None:
                await asyncio.gather(*tasks)
                return
            if killed_after:
                await self._enough.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for link in self.links:
                await link.close()


@settings(
    deadline=None,
    max_examples=examples(gate=10, search=25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(), members=st.sampled_from([2, 4]), microbatches=st.integers(1, 5), step=st.integers(0, 1)
)
def test_repeated_frames_and_frames_of_an_interrupted_attempt_count_nothing(
    stream: SampleStream, data: st.DataObject, members: int, microbatches: int, step: int
) -> None:
    """A member dies during the step, and its frames arrive in the next attempt: the step counts once."""
    spec = SPEC.model_copy(update={"swarm": SPEC.swarm.model_copy(update={"stages": 4})})
    shared = replace(replica_of(spec, members), microbatches=microbatches)
    again = cycle(data.draw(st.lists(st.booleans(), min_size=1, max_size=7), label="comes again"))
    frames = 2 * microbatches * (members - 1)
    killed_after = data.draw(st.integers(0, frames - 1), label="frames before the death")

    def trained() -> list[Trainer]:
        """One step of the round is done, if it is the second that breaks."""
        replica = chain(stream, members, spec)
        for member in replica:
            member.begin_round(1, range(spec.samples_per_round(microbatches)))
        for done in range(step):
            one_step(replica, done)
        return replica

    def one_step(replica: list[Trainer], number: int) -> None:
        for microbatch in range(microbatches):
            message = None
            for member in replica:
                message = member.forward(number, microbatch, message)
            for member in reversed(replica):
                message = member.backward(microbatch, message)
        norm = math.sqrt(math.fsum(member.inner.squared_gradient_norm() for member in reversed(replica)))
        for member in replica:
            member.apply(number, norm)

    async def broken_and_repeated(replica: list[Trainer]) -> None:
        workers = [InlineWorker(trainer) for trainer in replica]
        first = Attempt(workers, shared, 1, again, None)
        await first.step(step, killed_after)
        for worker in workers:
            await worker.client.call(Abandon())
        await Attempt(workers, shared, 2, again, first).step(step)

    undisturbed, broken = trained(), trained()
    one_step(undisturbed, step)
    asyncio.run(broken_and_repeated(broken))
    assert broken[-1].end_inner_phase().steps == step + 1
    assert_same_bits(state(broken), state(undisturbed))
