"""A trainer's checkpoint and parts: what they hold is all that is needed to continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from node.checkpoint import files, node_checkpoint, parts
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream, open_stream
from protocol.errors import HetnodeError
from protocol.types import Part, StageRange
from tests.support.running_replica import spec_of

SPEC = spec_of(**{"swarm.stages": 2, "inner.microbatches": 2, "inner.steps": 2})
NESTEROV = spec_of(
    **{"swarm.stages": 2, "inner.microbatches": 2, "inner.steps": 2, "outer.optimizer": "nesterov"}
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stream() -> SampleStream:
    return open_stream(SPEC)


def samples(round_number: int) -> range:
    size = SPEC.samples_per_round()
    return range(round_number * size, (round_number + 1) * size)


def train(trainer: Trainer, steps: range) -> None:
    for step in steps:
        for microbatch in range(SPEC.inner.microbatches):
            trainer.forward(step, microbatch, None)
            trainer.backward(microbatch, None)
        trainer.apply(step, trainer.inner.squared_gradient_norm() ** 0.5)


def settle(trainer: Trainer, round_number: int) -> list[str]:
    digests = []
    for stage in trainer.stages:
        payload = trainer.outer.propose(stage)
        assert payload is not None
        digests.append(trainer.commit(stage, round_number, [(payload, 1.0)], True))
    return digests


def train_into_round_2(trainer: Trainer, steps: int) -> None:
    trainer.begin_round(1, samples(0))
    train(trainer, range(2))
    settle(trainer, 1)
    trainer.begin_round(2, samples(1))
    train(trainer, range(steps))


def test_a_checkpoint_with_momentum_is_restored_and_its_embedding_is_one_range_of_bytes(
    stream: SampleStream, tmp_path: Path
) -> None:
    running, other = (Trainer(NESTEROV, StageRange(0, 2), stream=stream) for _ in range(2))
    follower = Trainer(NESTEROV, StageRange(1, 2))
    running.begin_round(1, samples(0))
    train(running, range(2))
    digests = settle(running, 1)
    running.write_checkpoint(tmp_path / "round-000001", 1)
    assert "emb/momentum" in load_file(tmp_path / "round-000001" / "stage-00.safetensors")
    assert other.restore(tmp_path) is not None
    assert [outer.digest() for outer in other.outer.values()] == digests
    for stage, part in ((0, Part.EMBEDDING), (1, Part.STAGE)):
        stored = parts.find(tmp_path, stage, part, 1)
        assert stored is not None
        file = tmp_path / f"{part.value}-{stage}"
        file.write_bytes(b"".join(parts.pieces(stored, range(stored.nbytes), 1 << 16)))
        digest = follower.load_part(stage, part, 1, file)
        assert digest == (digests[1] if part is Part.STAGE else running.outer.embedding_digest())
    for trainer in (running, other):
        trainer.begin_round(2, samples(1))
        train(trainer, range(2))
    assert settle(other, 2) == settle(running, 2)


def test_back_at_the_initial_parameters_there_is_no_momentum(stream: SampleStream) -> None:
    member, fresh = (Trainer(NESTEROV, StageRange(0, 2), stream=stream) for _ in range(2))
    member.begin_round(1, samples(0))
    train(member, range(2))
    settle(member, 1)
    member.load_initial()
    assert [outer.digest() for outer in member.outer.values()] == [
        outer.digest() for outer in fresh.outer.values()
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_a_checkpoint_during_an_exchange_has_all_progress_that_was_not_committed(
    stream: SampleStream, tmp_path: Path, optimizer: str
) -> None:
    options = {"outer.overlap": 1, "outer.optimizer": optimizer}
    spec = spec_of(**{"swarm.stages": 2, "inner.microbatches": 2, "inner.steps": 2, **options})
    running, other = (Trainer(spec, StageRange(0, 2), stream=stream) for _ in range(2))
    train_into_round_2(running, steps=2)
    learned = {stage: named_values(running, stage) for stage in running.stages}
    for stage in running.stages:
        assert running.outer.propose(stage) is not None
    running.outer.keep_training()
    moved = any(
        not torch.equal(value, learned[stage][name])
        for stage in running.stages
        for name, value in named_values(running, stage).items()
    )
    assert moved, "steps that overlap begin from an estimate"
    running.write_checkpoint(tmp_path / "round-000001", 1)
    assert other.restore(tmp_path) is not None
    for stage, values in learned.items():
        for name, value in named_values(other, stage).items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["part", "checkpoint"])
def test_a_disk_that_dies_while_an_anchor_is_read_leaves_the_initial_one(
    stream: SampleStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of a mixture, nothing could tell which round it is after."""
    running, other, fresh = (Trainer(SPEC, StageRange(0, 2), stream=stream) for _ in range(3))
    for trainer in (running, other):
        train_into_round_2(trainer, steps=1)
    running.write_checkpoint(tmp_path / "round-000001", 1)
    stored = parts.find(tmp_path, 1, Part.STAGE, 1)
    assert stored is not None
    file = tmp_path / "part"
    file.write_bytes(b"".join(parts.pieces(stored, range(stored.nbytes), 1 << 16)))
    is_dying, library, name = False, *((np, "fromfile") if kind == "part" else (files, "safe_open"))
    read = getattr(library, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        if is_dying and (kind == "checkpoint" or options["offset"]):
            raise OSError("Input/output error")
        return read(*arguments, **options)

    def load() -> None:
        nonlocal is_dying
        if kind == "part":
            is_dying = True
            other.load_part(1, Part.STAGE, 1, file)
        found = node_checkpoint.newest(tmp_path, SPEC, StageRange(0, 2))
        assert found is not None
        is_dying = True
        other.load_checkpoint(found)

    monkeypatch.setattr(library, name, dying)
    with pytest.raises(HetnodeError, match="checkpoint-corrupt"):
        load()
    assert other.outer[1].digest() == fresh.outer[1].digest()
    assert other.outer.rounds[1] == 0


def named_values(trainer: Trainer, stage: int) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.parameters(stage).items()}
