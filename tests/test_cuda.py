"""What must hold when a member computes on a GPU. Skipped where there is none."""

from __future__ import annotations

import math

import pytest
import torch

from node.data.stream import open_stream
from node.train.inner import Trainer
from protocol.spec import RunSpec, resolve
from protocol.types import StageRange

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train(spec: RunSpec, members: list[Trainer], round_: int, first: int) -> float:
    """One inner phase of a replica whose members hand their messages over directly."""
    for member in members:
        member.begin_round(round_, range(first, first + spec.samples_per_round))
    for step in range(spec.inner.steps):
        for microbatch in range(spec.inner.microbatches):
            message = None
            for member in members:
                message = member.forward(step, microbatch, message)
            for member in reversed(members):
                message = member.backward(microbatch, message)
        norm = math.sqrt(sum(member.squared_gradient_norm() for member in members))
        for member in members:
            member.apply(step, norm)
    return members[-1].end_inner_phase().loss


def replica(spec: RunSpec, device: str, members: int) -> list[Trainer]:
    size = spec.swarm.stages // members
    stream = open_stream(spec)
    trainers = [
        Trainer(spec, StageRange(i * size, (i + 1) * size), device, None if i else stream)
        for i in range(members)
    ]
    for i, trainer in enumerate(trainers):
        trainer.connect(spec.link.k if i else None, spec.link.k if i < members - 1 else None)
    return trainers


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_replicas_on_gpu_and_cpu_learn_alike_and_hold_the_same_anchor(dtype: str) -> None:
    spec = resolve("nano", overrides={"link.dtype": dtype, "inner.steps": 5, "rounds": 3})
    replicas = [replica(spec, "cpu", 1), replica(spec, "cuda", 1), replica(spec, "cuda", 2)]
    for round_ in range(1, 4):
        losses = [train(spec, members, round_, 1000 * round_) for members in replicas]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)
        assert losses[0] == pytest.approx(losses[2], rel=0.05)
        for stage in range(spec.swarm.stages):
            hosts = [next(m for m in members if stage in m.stages) for members in replicas]
            proposals = [host.propose(stage) for host in hosts]
            payloads = [(payload, 1.0) for payload in proposals if payload is not None]
            assert len(payloads) == 3
            assert len({host.commit(stage, payloads, mine_included=True) for host in hosts}) == 1
            if stage == 0:
                replicas[2][1].commit_embedding(payloads)
        assert len({member.embedding_digest() for members in replicas for member in members}) == 1
        for members in replicas:
            for member in members:
                for stage in member.stages:
                    for name, parameter in member.modules[stage].canonical_parameters().items():
                        assert torch.equal(parameter.detach().cpu(), member.outer[stage].anchor[name])
