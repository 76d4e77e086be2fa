"""Checkpoints of a node with known content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoint import node_checkpoint
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState
from node.core.model.init import initial_parameters
from node.core.optimizer.inner import Moments
from protocol.run_files.resolve import resolve
from protocol.types import StageRange

SPEC = resolve("nano", overrides={"model.layers": 3, "swarm.stages": 3, "model.vocabulary": 16})
HOSTED = StageRange(1, 3)


def anchors_of(round_number: int) -> dict[int, dict[str, Tensor]]:
    return {
        stage: {name: tensor + round_number for name, tensor in initial_parameters(SPEC, stage).items()}
        for stage in HOSTED
    }


def embedding_of(round_number: int) -> dict[str, Tensor]:
    return {"emb": initial_parameters(SPEC, 0)["emb"] + round_number}


def private_of(round_number: int) -> dict[int, StageState]:
    """Stage 1 has learned something and has moments, stage 2 has neither."""
    anchors = anchors_of(round_number)
    error = {stage: {name: tensor * 0.5 for name, tensor in anchors[stage].items()} for stage in HOSTED}
    first = {name: tensor * 2 for name, tensor in anchors[1].items()}
    second = {name: tensor * tensor for name, tensor in anchors[1].items()}
    local = {"1.wq": anchors[1]["1.wq"] - 3}
    return {
        1: StageState(error[1], local, Moments(steps=7, cold_steps=2, exp_avg=first, exp_avg_sq=second)),
        2: StageState(error[2], {}, None),
    }


def write_checkpoint(root: Path, round_number: int) -> Path:
    folder = root / f"round-{round_number:06d}"
    node_checkpoint.write(
        folder,
        SPEC,
        round_number,
        anchors_of(round_number),
        embedding_of(round_number),
        private_of(round_number),
    )
    return folder


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].detach(), expected[name]) for name in expected)


def assert_holds(found: Restored | None, round_number: int, private: bool = True) -> None:
    assert found is not None
    assert found.round_number == round_number
    for stage, parameters in anchors_of(round_number).items():
        assert_same(dict(found.stages[stage]), parameters)
    assert found.embedding is not None
    assert_same(dict(found.embedding), embedding_of(round_number))
    assert (found.private is not None) == private
    for stage, state in (found.private or {}).items():
        expected = private_of(round_number)[stage]
        assert_same(dict(state.error), dict(expected.error))
        assert_same(dict(state.local), dict(expected.local))
        assert (state.moments is None) == (expected.moments is None)
        if state.moments is not None and expected.moments is not None:
            assert (state.moments["steps"], state.moments["cold_steps"]) == (7, 2)
            assert_same(state.moments["exp_avg"], expected.moments["exp_avg"])
            assert_same(state.moments["exp_avg_sq"], expected.moments["exp_avg_sq"])


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sizes_to_try(root: Path) -> Iterator[int]:
    """Disk space in bytes that ends at different places of a checkpoint like the one below `root`."""
    total = sum(path.stat().st_size for path in files_of(root))
    yield from (total * percent // 100 for percent in (3, 20, 45, 70, 90))
