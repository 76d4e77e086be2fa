"""Members that follow, come back, go on alone or break off: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from node import hooks
from node.data.stream import SampleStream, open_stream
from node.ipc.channel import Buffer, Reply
from node.ipc.worker_calls import (
    Abandon,
    Abort,
    BeginRound,
    Build,
    CommitEmbedding,
    Connect,
    Digests,
    EndInnerPhase,
    LoadInitial,
    LoadPart,
    ResetError,
    Restore,
    RestoredCheckpoint,
    WriteCheckpoint,
)
from node.ipc.worker_client import WorkerClient
from node.net.link import Link, LinkEndpoint, LinkLimits
from node.train.pipeline import Pipeline
from node.worker.trainer import Trainer
from node.worker.worker import Worker, handlers
from protocol.algorithm.microbatch_order import Op, OpKind, one_forward_one_backward
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import DType, Frame, FrameId, FrameKind, Part, Plan, Replica, StageRange, TensorHeader
from protocol.wire.framing import frame_limit
from protocol.wire.link_message import LinkMessage
from tests.support.fault_hooks import FaultHooks, checkpoint_faults
from tests.support.fault_script import Action, Fault, Moment, Script, read_report
from tests.support.running_replica import RunningReplica, ThreadWorker, replica_of, spec_of

SPEC = spec_of(**{"swarm.stages": 2, "inner.microbatches": 3, "recovery.cold_steps": 3})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stream() -> SampleStream:
    return open_stream(SPEC)


def chain(stream: SampleStream, members: int, spec: RunSpec = SPEC) -> list[Trainer]:
    """The members of a replica, to be driven by hand."""
    size = spec.swarm.stages // members
    trainers = [Trainer(spec, StageRange(i * size, (i + 1) * size), stream=stream) for i in range(members)]
    for i, trainer in enumerate(trainers):
        trainer.connect(spec.link.k if i else None, spec.link.k if i < members - 1 else None)
    return trainers


def inner_step(members: list[Trainer], step: int) -> None:
    for microbatch in range(SPEC.inner.microbatches):
        message = None
        for member in members:
            message = member.forward(step, microbatch, message)
        for member in reversed(members):
            message = member.backward(microbatch, message)
    norm = math.sqrt(sum(member.squared_gradient_norm() for member in members))
    for member in members:
        member.apply(step, norm)


def begin(members: list[Trainer], round_number: int, index: int = 0) -> None:
    first = (round_number * 10 + index) * SPEC.samples_per_round()
    for member in members:
        member.begin_round(round_number, range(first, first + SPEC.samples_per_round()))


def inner_phase(members: list[Trainer], round_number: int, index: int = 0) -> None:
    begin(members, round_number, index)
    for step in range(SPEC.inner.steps):
        inner_step(members, step)


def proposals(members: list[Trainer]) -> dict[int, bytes]:
    found = {stage: member.propose(stage) for member in members for stage in member.stages}
    return {stage: payload for stage, payload in found.items() if payload is not None}


def commit(
    members: list[Trainer], round_number: int, payloads: dict[int, list[bytes]], mine: bool
) -> list[str]:
    """Apply a round at all members; returns the digests by stage, and of each member's embedding."""
    digests = []
    for member in members:
        for stage in member.stages:
            weighted = [(payload, 1.0) for payload in payloads[stage]]
            digests.append(member.commit(stage, round_number, weighted, mine))
        if 0 not in member.stages:
            member.commit_embedding(round_number, [(payload, 1.0) for payload in payloads[0]])
    return digests + sorted({member.embedding_digest() for member in members})


def state(members: list[Trainer]) -> dict[str, Tensor]:
    """Everything that a member has learned, sent or not."""
    found: dict[str, Tensor] = {}
    for member in members:
        for stage in member.stages:
            outer = member.outer[stage]
            for name, parameter in member.modules[stage].canonical_parameters().items():
                found |= {
                    f"local {name}": parameter.detach(),
                    f"anchor {name}": outer.anchor[name],
                    f"error {name}": outer.error[name],
                }
    return {name: value.clone() for name, value in found.items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("members", [1, 2])
def test_a_replica_that_follows_two_rounds_and_then_joins_holds_the_same_anchors(
    stream: SampleStream, members: int
) -> None:
    leader, follower = chain(stream, 1), chain(stream, members)
    for round_number in (1, 2):
        inner_phase(leader, round_number)
        payloads = {stage: [payload] for stage, payload in proposals(leader).items()}
        assert commit(leader, round_number, payloads, True) == commit(follower, round_number, payloads, False)
    for index, replica in enumerate((leader, follower)):
        inner_phase(replica, 3, index)
    both = [proposals(leader), proposals(follower)]
    payloads = {stage: [each[stage] for each in both] for stage in range(SPEC.swarm.stages)}
    assert commit(leader, 3, payloads, True) == commit(follower, 3, payloads, True)
    assert [member.rounds for member in follower] == [dict.fromkeys(member.stages, 3) for member in follower]
    assert {member.embedding_round for member in follower} == {3}


@pytest.mark.parametrize("members", [1, 2])
def test_what_is_restored_goes_on_exactly_as_if_it_had_never_stopped(
    stream: SampleStream, tmp_path: Path, members: int
) -> None:
    other, running = chain(stream, 1), chain(stream, members)
    for round_number in (1, 2):
        for index, replica in enumerate((other, running)):
            inner_phase(replica, round_number, index)
        sent = [proposals(other), proposals(running)]
        # The second round leaves this replica out: it has progress that is not sent.
        payloads = {stage: [each[stage] for each in sent[: 3 - round_number]] for stage in sent[0]}
        commit(other, round_number, payloads, True)
        commit(running, round_number, payloads, round_number == 1)
    folders = [tmp_path / str(i) / "round-000002" for i in range(members)]
    for member, folder in zip(running, folders, strict=True):
        member.write_checkpoint(folder, 2)
    returned = chain(stream, members)
    for member, folder in zip(returned, folders, strict=True):
        restored = member.restore(folder.parent)
        assert restored is not None
        assert restored.private is not None
    assert_same_bits(state(returned), state(running))
    for replica in (running, returned):
        inner_phase(replica, 3)
    sent = [proposals(running), proposals(returned)]
    assert sent[0] == sent[1]
    payloads = {stage: [payload] for stage, payload in sent[0].items()}
    assert commit(running, 3, payloads, True) == commit(returned, 3, payloads, True)
    assert_same_bits(state(returned), state(running))


def data_of(path: Path, into: Path) -> Path:
    """What a donor hands on of a checkpoint's file."""
    content = path.read_bytes()
    into.write_bytes(content[8 + int.from_bytes(content[:8], "little") :])
    return into


def test_a_latecomer_takes_over_the_parts_of_others_and_follows_from_there(
    stream: SampleStream, tmp_path: Path
) -> None:
    donors = chain(stream, 2)
    inner_phase(donors, 1)
    payloads = {stage: [payload] for stage, payload in proposals(donors).items()}
    digests = commit(donors, 1, payloads, True)
    for i, donor in enumerate(donors):
        donor.write_checkpoint(tmp_path / str(i) / "round-000001", 1)
    files = {
        (stage, Part.STAGE): tmp_path / str(stage) / "round-000001" / f"stage-0{stage}.safetensors"
        for stage in (0, 1)
    }
    files[0, Part.EMBEDDING] = tmp_path / "1" / "round-000001" / "embedding.safetensors"
    raw = {key: data_of(path, tmp_path / f"{key[1]}-{key[0]}") for key, path in files.items()}
    late = chain(stream, 2)
    inner_phase(late, 1)  # what it had learned from the wrong start is given up
    found = [late[stage].load_part(stage, Part.STAGE, 1, raw[stage, Part.STAGE]) for stage in (0, 1)]
    found.append(late[1].load_part(0, Part.EMBEDDING, 1, raw[0, Part.EMBEDDING]))
    assert found == digests
    expected = {name: value for name, value in state(donors).items() if not name.startswith("error")}
    assert_same_bits({n: v for n, v in state(late).items() if not n.startswith("error")}, expected)
    assert not any(value.any() for name, value in state(late).items() if name.startswith("error"))
    for replica in (donors, late):
        inner_phase(replica, 2)
    for stage, donor, latecomer in zip((0, 1), donors, late, strict=True):
        # Cold moments: the first steps are short, and shorter than those of who has moments.
        moved = [
            sum(
                float((member.outer[stage].anchor[name] - parameter.detach()).abs().sum())
                for name, parameter in member.modules[stage].canonical_parameters().items()
            )
            for member in (donor, latecomer)
        ]
        assert 0 < moved[1] < 0.8 * moved[0]
    sent = [proposals(donors), proposals(late)]
    payloads = {stage: [each[stage] for each in sent] for stage in (0, 1)}
    assert commit(donors, 2, payloads, True) == commit(late, 2, payloads, True)


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_part_that_cannot_be_read_changes_nothing(
    stream: SampleStream, tmp_path: Path, damage: str
) -> None:
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    before = state([member])
    if damage == "short":
        (tmp_path / "part").write_bytes(b"\0" * 100)
    with pytest.raises(HetnodeError) as caught:
        member.load_part(0, Part.STAGE, 5, tmp_path / "part")
    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert_same_bits(state([member]), before)
    assert member.rounds == {0: 0, 1: 0}


def test_the_initial_parameters_can_be_had_again(stream: SampleStream) -> None:
    member, fresh = chain(stream, 2)[1], chain(stream, 2)[1]
    other = chain(stream, 2)
    inner_phase(other, 1)
    commit([other[0], member], 1, {stage: [data] for stage, data in proposals(other).items()}, False)
    member.load_initial()
    assert_same_bits(state([member]), state([fresh]))
    assert member.embedding_digest() == fresh.embedding_digest()
    assert (member.rounds, member.embedding_round) == ({1: 0}, 0)


def test_steps_beyond_h_before_the_decision_are_kept_by_it(stream: SampleStream) -> None:
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
    covered = state([member])
    member.keep_training()
    for step in (SPEC.inner.steps + 1, SPEC.inner.steps + 2):
        inner_step([member], step)
    learned = {n: v - covered[n] for n, v in state([member]).items() if n.startswith("local")}
    assert any(value.any() for value in learned.values())
    result = member.end_inner_phase()
    assert result.steps == SPEC.inner.steps  # they are none of the round's
    assert result.tokens == result.steps * SPEC.samples_per_round() // SPEC.inner.steps * SPEC.model.context
    commit([member], 1, payloads, True)
    after = state([member])
    for name, value in learned.items():
        assert torch.equal(after[name], after[name.replace("local", "anchor")] + value)


def test_a_stage_that_proposes_only_after_training_went_on_loses_nothing(stream: SampleStream) -> None:
    """The coordinator went away between the proposals of two stages."""
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads, covered = {0: [member.propose(0) or b""]}, learned_by(member, 0)
    member.keep_training()
    inner_step([member], SPEC.inner.steps + 1)
    payloads[1] = [member.propose(1) or b""]
    covered |= learned_by(member, 1)
    inner_step([member], SPEC.inner.steps + 2)
    since = {
        name: value - covered[name] for name, value in (learned_by(member, 0) | learned_by(member, 1)).items()
    }
    assert all(any(value.any() for name, value in since.items() if name[0] == stage) for stage in (0, 1))
    commit([member], 1, payloads, True)
    for (stage, name), value in since.items():
        local = learned_by(member, stage)[stage, name]
        assert torch.equal(local, member.outer[stage].anchor[name] + value)


def learned_by(member: Trainer, stage: int) -> dict[tuple[int, str], Tensor]:
    """The local parameters of a stage."""
    found = member.modules[stage].canonical_parameters()
    return {(stage, name): parameter.detach().clone() for name, parameter in found.items()}


def test_the_round_after_steps_beyond_h_is_a_usual_one(stream: SampleStream) -> None:
    (member,) = chain(stream, 1)
    for round_number in (1, 2):
        inner_phase([member], round_number)
        payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
        if round_number == 1:
            member.keep_training()
            inner_step([member], SPEC.inner.steps + 1)
        commit([member], round_number, payloads, True)
    for name, value in state([member]).items():
        if name.startswith("local"):
            assert torch.equal(value, state([member])[name.replace("local", "anchor")])


def test_what_a_payload_of_ones_own_has_brought_is_not_learned_a_second_time(stream: SampleStream) -> None:
    """A node that lost its memory of a round finds its own payload in the log."""
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
    commit([member], 1, payloads, False)
    for stage in member.stages:
        member.forget_error(stage)
    for name, value in state([member]).items():
        if name.startswith("local"):
            assert torch.equal(value, state([member])[name.replace("local", "anchor")])


def test_an_aborted_round_moves_no_anchor_but_is_counted(stream: SampleStream) -> None:
    members = chain(stream, 2)
    before = state(members)
    for member in members:
        for stage in member.stages:
            member.abort(stage, 1)
    digest = members[1].embedding_digest()
    assert members[1].commit_embedding(1, []) == digest
    assert_same_bits(state(members), before)
    assert [member.rounds for member in members] == [{0: 1}, {1: 1}]
    assert [member.embedding_round for member in members] == [1, 1]


def test_rounds_are_applied_in_their_order(stream: SampleStream) -> None:
    members = chain(stream, 2)
    inner_phase(members, 1)
    sent = proposals(members)
    with pytest.raises(AssertionError, match="after round 0"):
        members[0].commit(0, 2, [(sent[0], 1.0)], True)
    members[0].commit(0, 1, [(sent[0], 1.0)], True)
    with pytest.raises(AssertionError, match="after round 1"):
        members[0].commit(0, 1, [(sent[0], 1.0)], False)
    with pytest.raises(AssertionError, match="after round 0"):
        members[1].commit_embedding(2, [(sent[0], 1.0)])


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


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), members=st.sampled_from([1, 2]), by_begin_round=st.booleans())
def test_a_step_that_was_broken_off_anywhere_counts_nothing(
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
        norm = math.sqrt(sum(member.squared_gradient_norm() for member in replica))
        for member in replica:
            member.apply(step, norm)
    assert_same_bits(state(broken), state(undisturbed))
    assert broken[-1].end_inner_phase() == undisturbed[-1].end_inner_phase()


async def test_all_members_take_as_many_steps_as_the_first_one_wants() -> None:
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
        assert {task for task in asyncio.all_tasks() - tasks_before if not task.done()} == set()
        before = {name: tensor.clone() for name, tensor in replica.parameters().items()}
        await replica.workers[0].client.call(Abandon())
        assert replica.workers[0].trainer.squared_gradient_norm() == 0.0
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


class NoHands:
    """For faults that strike no process."""

    def kill(self) -> None: ...

    def stop(self, seconds: float) -> None: ...

    def pause(self, seconds: float) -> None: ...


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[None]:
    """The disk is full in round 2, and turns a bit in round 3."""
    planned = [
        Fault(Moment.CHECKPOINT, Action.FULL, round_number=2),
        Fault(Moment.CHECKPOINT, Action.CORRUPT, round_number=3),
    ]
    hooks.install(FaultHooks(Script(planned, tmp_path / "fired", NoHands())))
    with checkpoint_faults():
        yield
    assert [fired.fault for fired in read_report(tmp_path / "fired")] == [0, 1]
    hooks.install(hooks.Hooks())


@pytest.mark.usefixtures("faulty")
def test_faults_strike_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    worker = Worker()
    worker.build(Build(SPEC, StageRange(0, 2)))
    kept = tmp_path / "kept"
    for round_number in (1, 2, 3):
        for stage in (0, 1):
            worker.abort(Abort(stage, round_number))
        request = WriteCheckpoint(kept / f"round-{round_number:06d}", round_number)
        if round_number == 2:
            with pytest.raises(HetnodeError) as caught:
                worker.write_checkpoint(request)
            assert caught.value.code is ErrorCode.DISK_FULL
        else:
            worker.write_checkpoint(request)
    assert sorted(path.name for path in kept.iterdir()) == ["round-000001", "round-000003"]
    assert worker.restore(Restore(kept)) == RestoredCheckpoint(1, has_private_state=True)


async def test_the_workers_calls_of_recovery_round_trip(tmp_path: Path) -> None:
    worker = ThreadWorker().client
    built = await worker.call(Build(SPEC, StageRange(1, 2)))
    assert list(built.parts) == [(1, Part.STAGE), (0, Part.EMBEDDING)]
    for k_upstream in (8, 4):
        await worker.call(Connect(k_upstream, None))
    at_start = await worker.call(Digests())
    assert [(part, round_number) for part, (round_number, _) in at_start.items()] == [
        ((1, Part.STAGE), 0),
        ((0, Part.EMBEDDING), 0),
    ]
    assert await worker.call(Restore(tmp_path)) is None
    await worker.call(Abort(1, 1))
    await worker.call(CommitEmbedding(1, (), ()))
    written = tmp_path / "round-000001"
    await worker.call(WriteCheckpoint(written, 1))
    assert (written / "stage-01.safetensors").stat().st_size > built.parts[1, Part.STAGE].nbytes
    await worker.call(LoadInitial())
    assert await worker.call(Digests()) == at_start
    assert await worker.call(Restore(tmp_path)) == RestoredCheckpoint(1, has_private_state=True)
    (_, stage_digest), (_, embedding_digest) = at_start.values()
    assert (await worker.call(Digests()))[1, Part.STAGE] == (1, stage_digest)
    file = data_of(written / "embedding.safetensors", tmp_path / "part")
    assert file.stat().st_size == built.parts[0, Part.EMBEDDING].nbytes
    assert await worker.call(LoadPart(0, Part.EMBEDDING, 4, file)) == embedding_digest
    assert (await worker.call(Digests()))[0, Part.EMBEDDING] == (4, embedding_digest)
    await worker.call(ResetError(1))


class InlineWorker:
    """The production worker's calls, each done when it is made: what happens depends on no thread."""

    def __init__(self, trainer: Trainer) -> None:
        worker = Worker()
        worker.trainer = trainer
        self._handlers = handlers(worker)
        self.client = WorkerClient(self)

    def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Awaitable[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        answer.set_result(self._handlers[method](body, blobs))
        return answer

    async def wait_closed(self) -> None:
        raise NotImplementedError


class NoisyWire:
    """One direction of a link. Frames of which `again` says so come twice; `late` ones came too late before.

    Both ends are production links over it: what they are given is what a neighbour could send.
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
    """One attempt at a step by the members of a chain, under a plan of its own, over noisy links."""

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

        def end(other: int, read: NoisyWire, write: NoisyWire) -> Link:
            neighbour = LinkEndpoint(SPEC.run_id, SPEC.hash, replica.members[other].peer, 0, other, epoch)
            return Link(neighbour, read.read, write.write, limits)

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
        """All members' inner step; where that is given, all of it is broken off after so many frames."""
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


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), members=st.sampled_from([2, 4]), microbatches=st.integers(1, 5), step=st.integers(0, 1)
)
def test_frames_that_come_again_or_from_a_broken_attempt_count_nothing(
    stream: SampleStream, data: st.DataObject, members: int, microbatches: int, step: int
) -> None:
    """Whatever was under way when a member died, and whatever of it still arrives: the step counts once."""
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
        norm = math.sqrt(math.fsum(member.squared_gradient_norm() for member in reversed(replica)))
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
