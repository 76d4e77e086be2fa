"""Shared by the tests of the mathematics: reference vectors, small specs, and a chain of stages by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from node.core.model.stage import Stage
from node.generate import next_token_loss
from protocol.math.subspace import ReceivingEnd, SendingEnd
from protocol.spec.run import RunSpec
from tests.support.paths import VECTORS


@cache
def vectors(name: str) -> dict[str, Any]:
    """The reference file `name`; treat it as read-only."""
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def f64(nested: Any) -> Tensor:
    return torch.tensor(nested, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Any, tolerance: float) -> None:
    """Equal in shape, and in every element to within the absolute `tolerance`."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=0, atol=tolerance)


def small_spec(**sections: Any) -> RunSpec:
    """A model of 4 layers, width 16, small enough for float64 and Hypothesis; sections override."""
    base: dict[str, Any] = {
        "model": {"vocabulary": 19, "width": 16, "layers": 4, "heads": 2, "feed_forward": 24, "context": 8},
        "link": {"k": 4},
        "swarm": {"stages": 4},
        "outer": {"chunk": 64, "top_k": 4},
    }
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return RunSpec.model_validate(base)


@dataclass
class Boundary:
    """What was seen at the boundary between two members."""

    x: Tensor
    wire: Tensor
    x_hat: Tensor
    grad_x_hat: Tensor = field(default_factory=lambda: torch.empty(0))
    grad_wire: Tensor = field(default_factory=lambda: torch.empty(0))
    grad_x: Tensor = field(default_factory=lambda: torch.empty(0))


def chain_step(
    members: Sequence[Sequence[Stage]],
    links: Sequence[tuple[SendingEnd, ReceivingEnd]],
    ids: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor, list[Boundary]]:
    """Forward and backward through members that share nothing but what their links carry.

    Gradients accumulate in the stages. Returns loss, logits and the boundaries.
    """
    boundaries: list[Boundary] = []
    x = ids
    for position, stages in enumerate(members):
        for stage in stages:
            x = stage(x)
        if position < len(links):
            sender, receiver = links[position]
            wire = sender.compress_forward(x.detach())
            x_hat = receiver.expand_forward(wire, ids).clone().requires_grad_()
            boundaries.append(Boundary(x, wire, x_hat))
            x = x_hat
    loss = next_token_loss(x, targets)
    loss.backward()
    for (sender, receiver), boundary in zip(reversed(links), reversed(boundaries), strict=True):
        assert boundary.x_hat.grad is not None
        boundary.grad_x_hat = boundary.x_hat.grad
        boundary.grad_wire = receiver.compress_backward(boundary.grad_x_hat)
        boundary.grad_x = sender.expand_backward(boundary.grad_wire)
        boundary.x.backward(boundary.grad_x)
    return loss.detach(), x.detach(), boundaries


def stages_of(spec: RunSpec, dtype: torch.dtype = torch.float64) -> list[Stage]:
    return [Stage(spec, stage).to(dtype) for stage in range(spec.swarm.stages)]


def parameters_of(stages: Sequence[Stage]) -> dict[str, torch.nn.Parameter]:
    """All parameters of a chain of stages, in canonical order."""
    return {name: value for stage in stages for name, value in stage.canonical_parameters().items()}


def gradients_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    gradients = {name: value.grad for name, value in parameters_of(stages).items()}
    assert all(gradient is not None for gradient in gradients.values())
    return gradients  # type: ignore[return-value]
