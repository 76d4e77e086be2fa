"""Trainers of one replica that a test drives by hand, without processes and links."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.running_replica import spec_of

SPEC = spec_of(**{"swarm.stages": 2, "inner.microbatches": 3})


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
    norm = math.sqrt(sum(member.inner.squared_gradient_norm() for member in members))
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
    found = {stage: member.outer.propose(stage) for member in members for stage in member.stages}
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
    return digests + sorted({member.outer.embedding_digest() for member in members})


def state(members: list[Trainer]) -> dict[str, Tensor]:
    """The local parameters, anchors and error feedback of all members."""
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


def data_of(path: Path, into: Path) -> Path:
    """The tensor data of a checkpoint's file: what a donor sends of it."""
    content = path.read_bytes()
    into.write_bytes(content[8 + int.from_bytes(content[:8], "little") :])
    return into
