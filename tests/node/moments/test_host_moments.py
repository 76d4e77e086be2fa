"""Moments in main memory change no bit, and hold the card's memory to what is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.inner_loop import inner_phase
from node.checkpoint import parts
from node.core.optimizer.inner import OPTIMIZERS, MakeOptimizer
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.moments.host_moments import HOST_OPTIMIZERS, HostMoments
from protocol.memory.needs import BY_PRICE, MemoryPolicy, memory_need
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange
from tests.support.card_memory import CardMemory, HostOuterState

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = {"emb": (40, 16), "0.wq": (16, 16), "0.wd": (16, 48), "norm": (16,), "unused": (3,)}


def groups() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    named = [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()]
    return [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:], "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("piece", [64, 2**20])
def test_steps_have_the_bits_of_moments_on_the_device(kind: str, piece: int) -> None:
    usual = OPTIMIZERS[kind](groups(), **OPTIONS)
    hosted = HostMoments(groups(), kind=OPTIMIZERS[kind], piece=piece, **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for one, other in zip(usual.param_groups, hosted.param_groups, strict=True):
            one["lr"] = other["lr"] = 0.02 / (step + 1)
            for name, mine, theirs in zip(one["param_names"], one["params"], other["params"], strict=True):
                if name != "unused":
                    mine.grad = torch.randn(mine.shape, generator=generator)
                    theirs.grad = mine.grad.clone()
        usual.step()
        hosted.step()
    for one, other in zip(usual.param_groups, hosted.param_groups, strict=True):
        for mine, theirs in zip(one["params"], other["params"], strict=True):
            assert torch.equal(mine, theirs)
            assert usual.state.get(mine, {}).keys() == hosted.state.get(theirs, {}).keys()
            assert all(
                torch.equal(hosted.state[theirs][key], each) for key, each in usual.state[mine].items()
            )


def spec_of(optimizer: str, **more: Any) -> RunSpec:
    settings = {"inner.optimizer": optimizer, "inner.steps": 2, "inner.microbatches": 2, "swarm.stages": 2}
    return resolve("nano", overrides={**settings, **more})


def trainer_of(
    spec: RunSpec, optimizers: Mapping[str, MakeOptimizer], checkpointing: bool = False
) -> Trainer:
    compute = Compute(activation_checkpointing=checkpointing)
    factories = replace(TrainerFactories(), optimizers=optimizers)
    trainer = Trainer(spec, StageRange(0, 2), compute, open_stream(spec), factories)
    trainer.connect(None, None)
    return trainer


def train_round(trainer: Trainer, number: int) -> list[str]:
    """Train and commit a round. Returns the digests."""
    inner_phase(trainer, number)
    return [commit(trainer, stage, number) for stage in trainer.stages]


def commit(trainer: Trainer, stage: int, number: int) -> str:
    payload = trainer.outer.propose(stage)
    assert payload is not None
    return trainer.commit(stage, number, [(payload, 1.0)], True)


CUT = {name: partial(HostMoments, kind=kind, piece=64) for name, kind in OPTIMIZERS.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_checkpoints_and_restarts_are_the_same_with_moments_in_either_place(
    optimizer: str, tmp_path: Path
) -> None:
    spec = spec_of(optimizer)
    ways = [trainer_of(spec, OPTIMIZERS), trainer_of(spec, CUT), trainer_of(spec, HOST_OPTIMIZERS, True)]
    assert len({tuple(train_round(each, 1)) for each in ways}) == 1
    for index, each in enumerate(ways):
        each.write_checkpoint(tmp_path / str(index) / "round-000001", 1)
    files = [sorted(path.glob("*/private/*.safetensors")) for path in tmp_path.iterdir()]
    assert len({tuple(file.read_bytes() for file in each) for each in files}) == 1
    after = {tuple(train_round(each, 2)) for each in ways}
    for index, optimizers in ((1, OPTIMIZERS), (0, CUT)):  # where the moments were does not matter
        again = trainer_of(spec, optimizers)
        assert again.restore(tmp_path / str(index))
        after.add(tuple(train_round(again, 2)))
    assert len(after) == 1


@pytest.mark.parametrize(
    ("optimizer", "policy"), [*(("adamw", each) for each in BY_PRICE), ("muon", BY_PRICE[-1])], ids=str
)
def test_nothing_exceeds_the_planned_memory_of_the_card(
    optimizer: str, policy: MemoryPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a round, a checkpoint, a restart and a late join; of the plan a tenth may be unused."""
    more = {
        "model.width": 128,
        "model.feed_forward": 384,
        "model.context": 64,
        "model.layers": 8,
        "inner.steps": 1,
    }
    spec = spec_of(optimizer, **more)
    need = memory_need(spec, StageRange(0, 2), 1, "", policy).device
    with CardMemory(bound=need) as card:
        monkeypatch.setattr("node.core.worker.trainer.OuterState", partial(HostOuterState, card))
        trainer = trainer_of(spec, card.optimizers(policy.host_moments, piece=2**14), policy.checkpointing)
        train_round(trainer, 1)
        with card.host():
            trainer.write_checkpoint(tmp_path / "round-000001", 1)
            assert trainer.restore(tmp_path)
        train_round(trainer, 2)
        assert card.peak > 0.9 * need
        stored = parts.find(tmp_path, 1, Part.STAGE, 1)
        assert stored is not None
        file = tmp_path / "part"
        file.write_bytes(b"".join(parts.pieces(stored, range(stored.nbytes), 1 << 16)))
        with card.host():
            trainer.load_part(1, Part.STAGE, 2, file)
        assert trainer.outer.rounds == {0: 2, 1: 2}
