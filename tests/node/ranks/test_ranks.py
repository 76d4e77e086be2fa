"""A peer with two ranks in real processes, over gloo, beside a peer with one process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from node.core.model.init import initial_parameters
from node.core.optimizer.outer_stage import OuterStage
from node.ipc.channel import Child
from node.ipc.rank_channels import RankChannels
from node.ipc.ranks import DeviceList
from node.ipc.worker_calls import Abandon, EndInnerPhase, KeepTraining, LoadInitial, LoadPart
from node.ipc.worker_client import WorkerClient
from protocol.codec.payload import decode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.clipping import clipping_scales, payload_norm
from protocol.math.output_subspace import output_basis
from protocol.spec.run import RunSpec
from protocol.types import Part
from tests.support.commands import template
from tests.support.ranks import SPEC, FullReplica
from tests.support.running_replica import ThreadWorker

pytestmark = pytest.mark.usefixtures("one_thread")
TWO = DeviceList(("cpu", "cpu"))


async def ranks(stack: AsyncExitStack) -> WorkerClient:
    template()
    return await TWO.start(2, stack)


@pytest.mark.parametrize(
    ("optimizer", "sharded"),
    [
        ("adamw", False),
        pytest.param("adamw", True, marks=pytest.mark.slow),
        pytest.param("muon", False, marks=pytest.mark.slow),
        pytest.param("muon", True, marks=pytest.mark.slow),
    ],
)
async def test_two_ranks_train_like_one_process_and_commit_the_same_anchors(
    tmp_path: Path, optimizer: str, sharded: bool
) -> None:
    tree = SPEC.model_dump()
    tree["inner"]["optimizer"] = optimizer
    if optimizer == "muon":  # a full replica in a run of pipelines alone, in which outputs are projected
        tree["swarm"] |= {"replicas": 0, "pipelines": 1}
        tree["link"]["k"] = 8
    spec = RunSpec.model_validate(tree)
    assert (output_basis(spec, 0) is not None) == (optimizer == "muon")
    async with AsyncExitStack() as stack:
        one, two = FullReplica(ThreadWorker().client, spec), FullReplica(await ranks(stack), spec)
        await one.build()
        await two.build(sharded)
        for round_number in (1, 2):
            figures = [await each.train(round_number) for each in (one, two)]
            assert figures[0].loss == pytest.approx(figures[1].loss, abs=1e-5)
            assert figures[0].norm == pytest.approx(figures[1].norm, rel=1e-4)
            assert figures[0].validation == pytest.approx(figures[1].validation, abs=1e-5)
            proposed = [await each.propose() for each in (one, two)]
            both = {stage: (proposed[0][stage], proposed[1][stage]) for stage in one.stages}
            committed = [await each.commit(round_number, both) for each in (one, two)]
            assert [each.digest for each in committed[0]] == [each.digest for each in committed[1]]
        assert await one.digests() == await two.digests()
        # A round without its own payload leaves progress that only this peer has.
        await two.train(3)
        await two.propose()
        theirs = {stage: (payload,) for stage, payload in proposed[0].items()}
        await two.commit(3, theirs, mine_included=False)
        await two.write(tmp_path, 3)
        again = FullReplica(ThreadWorker().client, spec)
        await again.build()
        await again.restore(tmp_path)
        assert await again.digests() == await two.digests()
        proposed = [await each.propose() for each in (again, two)]
        assert proposed[0] == proposed[1]  # in every byte
        await again.abort(4)
        await again.write(tmp_path, 4)
    async with AsyncExitStack() as stack:
        two = FullReplica(await ranks(stack), spec)
        await two.build(sharded)
        await two.restore(tmp_path)
        figures = [await each.train(5) for each in (again, two)]
        assert figures[0].loss == pytest.approx(figures[1].loss, abs=1e-5)
        assert figures[0].validation == pytest.approx(figures[1].validation, abs=1e-5)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_two_ranks_train_a_tied_head_like_one_process(sharded: bool) -> None:
    tied = {"model": {**SPEC.model.model_dump(), "tied_head": True}}
    shape = {"swarm": {"stages": 1, "replicas": 1, "pipelines": 0}}
    spec = RunSpec.model_validate({**SPEC.model_dump(), **tied, **shape})
    async with AsyncExitStack() as stack:
        one, two = FullReplica(ThreadWorker().client, spec), FullReplica(await ranks(stack), spec)
        await one.build()
        await two.build(sharded)
        for round_number in (1, 2):
            figures = [await each.train(round_number) for each in (one, two)]
            assert figures[0].loss == pytest.approx(figures[1].loss, abs=1e-5)
            assert figures[0].norm == pytest.approx(figures[1].norm, rel=1e-4)
            proposed = [await each.propose() for each in (one, two)]
            both = {0: (proposed[0][0], proposed[1][0])}
            committed = [await each.commit(round_number, both) for each in (one, two)]
            assert [each.digest for each in committed[0]] == [each.digest for each in committed[1]]


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_two_ranks_overlap_rounds_and_take_failures_and_parts_like_one_process(
    tmp_path: Path, sharded: bool
) -> None:
    async with AsyncExitStack() as stack:
        single = ThreadWorker()
        one, two = FullReplica(single.client), FullReplica(await ranks(stack))
        await one.build()
        await two.build(sharded)
        await two.cancel_a_step()
        for each in (one, two):
            await each.train(1)
        first = [await each.propose() for each in (one, two)]
        both = {stage: (first[0][stage], first[1][stage]) for stage in one.stages}
        losses = []
        for each in (one, two):  # steps of round 2 before the decision on round 1
            await each.worker.call(KeepTraining())
            await each.take_steps(2)
            losses.append((await each.worker.call(EndInnerPhase())).result.loss)
            await each.commit(1, both)
            with pytest.raises(HetnodeError) as caught:
                await each.commit(2, {0: (b"no payload",)}, mine_included=False)
            assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT
            await each.propose()
            await each.abort(2)
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        last = [await each.propose() for each in (one, two)]
        both = {stage: (last[0][stage], last[1][stage]) for stage in one.stages}
        digests = [[each.digest for each in await replica.commit(3, both)] for replica in (one, two)]
        assert digests[0] == digests[1]
        await two.worker.call(LoadInitial())
        file = tmp_path / "part"
        with pytest.raises(HetnodeError) as caught:
            await two.worker.call(LoadPart(0, Part.STAGE, 3, file))
        assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
        for stage, digest in zip(one.stages, digests[0], strict=True):
            tensors = single.trainer.outer[stage].committed
            file.write_bytes(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
            assert await two.worker.call(LoadPart(stage, Part.STAGE, 3, file)) == digest
        # Only the rank that owns this tensor finds a value that is not finite.
        single.trainer.outer[1].error["norm_f"][0] = math.inf
        await one.write(tmp_path, 3)
        await two.restore(tmp_path)
        assert [*await two.propose()] == [0]
        await two.abort(4)
        assert math.isfinite((await two.train(5)).loss)
        assert [*await two.propose()] == [0, 1]


async def test_ranks_clip_payloads_by_the_norm_of_the_whole_stage() -> None:
    """Each rank applies a part of the parameters, and must see the norm of all."""
    async with AsyncExitStack() as stack:
        one, two = FullReplica(ThreadWorker().client), FullReplica(await ranks(stack))
        payloads = []
        for each in (one, two):
            await each.build()
            await each.train(1)
            payloads.append(await each.propose())
        round_ = {}
        for stage in one.stages:
            far = initial_parameters(SPEC, stage)
            other = OuterStage(SPEC, stage, far)
            generator = torch.Generator().manual_seed(stage)
            for value in far.values():
                value.add_(torch.randn(value.shape, generator=generator))
            third = other.propose(far)
            assert third is not None
            round_[stage] = (payloads[0][stage], payloads[1][stage], third)
            norms = [payload_norm(decode(other.layout, each)) for each in round_[stage]]
            assert min(clipping_scales(norms, SPEC.outer.clip)) < 0.9
        committed = [await each.commit(1, round_) for each in (one, two)]
        assert [each.digest for each in committed[0]] == [each.digest for each in committed[1]]


async def test_the_end_of_one_rank_ends_the_worker_with_one_error(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        worker = await ranks(stack)
        replica = FullReplica(worker)
        await replica.build()
        assert isinstance(worker.channel, RankChannels)
        killed = worker.channel.ranks[1]
        assert isinstance(killed, Child)
        training = asyncio.create_task(replica.train(1))
        await asyncio.sleep(0)  # the step has begun
        os.kill(killed.pid, signal.SIGKILL)
        for ended in (training, worker.guard(), worker.call(Abandon())):
            with pytest.raises(HetnodeError, match="worker of rank 1 process has ended") as caught:
                await ended
            assert caught.value.code is ErrorCode.WORKER_DIED


async def test_a_device_that_does_not_exist_is_named() -> None:
    template()
    async with AsyncExitStack() as stack:
        with pytest.raises(HetnodeError, match=r"cuda:9[89]") as caught:
            await DeviceList(("cuda:99", "cuda:98")).start(1, stack)
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE
