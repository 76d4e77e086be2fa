"""Models that are not trained, but whose figures are of the size of trained ones."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoint import global_model
from node.core.model.shapes import parameter_shapes
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

PLAIN = resolve(
    "nano",
    overrides={
        "model.width": 64,
        "model.heads": 4,
        "model.layers": 3,
        "model.feed_forward": 96,
        "model.context": 64,
        "model.rope_base": 50_000.0,
        "model.norm_epsilon": 3e-4,
        "swarm.stages": 2,
    },
)
"""Nothing that a default could stand in for: neither of hetnode nor of transformers."""


def scalars_of(spec: RunSpec, stage: int) -> int:
    """In the tensors that a worker makes for `stage`."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec, stage).values())


def random_model(spec: RunSpec, seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """Parameters by stage, whose logits have a standard deviation of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def parameter(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1 + 0.3 * values
        return values * (0.5 if name == "emb" else 0.15)

    return {
        stage: {name: parameter(name, shape) for name, shape in parameter_shapes(spec, stage).items()}
        for stage in range(spec.swarm.stages)
    }


def write_model(folder: Path, spec: RunSpec, round_number: int = 3) -> Path:
    """A run folder with a complete checkpoint of such a model; returns the checkpoint's folder."""
    global_model.write(folder / "checkpoint", spec, round_number, random_model(spec))
    return folder / "checkpoint"
