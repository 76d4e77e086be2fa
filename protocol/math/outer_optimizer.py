"""Outer optimizers: how an anchor moves along the aggregated pseudo-gradient of a round.

The optimizer's state is committed with the parameters: the anchor's digest covers it, checkpoints hold it,
late joiners receive it. So its arithmetic must give the same bits on every machine: float32 on the CPU, one
rounding per operation. torch.optim.SGD does not: its ``add_(alpha=...)`` is fused on some processors.

A new optimizer is one class with its line here, and its line in `protocol/spec/outer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protocol.spec.outer import OuterSpec

State = Mapping[str, Tensor]
"""The state of one parameter, by slot."""

LEAST_MOMENTUM = 2.0**-64
"""Smaller values of a momentum become 0: they would decay to denormal numbers, which some machines flush."""


class OuterOptimizer(Protocol):
    """Moves one tensor at a time. It keeps nothing itself: a round that fails midway changes nothing."""

    def step(self, parameter: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
        """The parameter and its state after one committed round.

        Args:
            gradient: the aggregated pseudo-gradient, in the dtype and shape of `parameter`.

        Returns:
            New tensors; the arguments keep their values.
        """


@dataclass(frozen=True)
class Sgd:
    """parameter - learning_rate * gradient (algorithm, eq 2)."""

    learning_rate: float

    def step(self, parameter: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
        return parameter - gradient.mul(self.learning_rate), {}


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum, as torch.optim.SGD(nesterov=True) and DiLoCo (arXiv 2311.08105).

    v' = momentum v + gradient; parameter' = parameter - learning_rate (gradient + momentum v').
    """

    learning_rate: float
    momentum: float

    def step(self, parameter: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
        velocity = state["momentum"].mul(self.momentum).add_(gradient)
        # An element that no payload sends for many rounds decays; see LEAST_MOMENTUM.
        velocity.masked_fill_(velocity.abs() < LEAST_MOMENTUM, 0.0)
        direction = velocity.mul(self.momentum).add_(gradient)
        return parameter - direction.mul_(self.learning_rate), {"momentum": velocity}


OPTIMIZERS: Mapping[str, Callable[[OuterSpec], OuterOptimizer]] = {
    "sgd": lambda outer: Sgd(outer.learning_rate),
    "nesterov": lambda outer: Nesterov(outer.learning_rate, outer.momentum or 0.0),  # the spec fills it in
}
"""By the name in ``outer.optimizer``."""


def outer_optimizer(outer: OuterSpec) -> OuterOptimizer:
    """The optimizer that the run asks for."""
    return OPTIMIZERS[outer.optimizer](outer)


def state_name(parameter: str, slot: str) -> str:
    """The name of a state tensor in digests and files.

    In ascending order it follows its parameter at once, so the embedding and its state are one range of bytes
    in the file of stage 0. Names of parameters have no slash.
    """
    return f"{parameter}/{slot}"


def committed_shapes(shapes: Mapping[str, tuple[int, ...]], outer: OuterSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all that is committed for parameters of these `shapes`."""
    states = {state_name(name, slot): shape for name, shape in shapes.items() for slot in outer.slots}
    return dict(shapes) | states


def parameters_of(committed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters in `committed`, without the optimizer's state."""
    return {name: tensor for name, tensor in committed.items() if "/" not in name}


def initial_state(parameters: Mapping[str, Tensor], slots: Sequence[str]) -> dict[str, Tensor]:
    """The optimizer's state before round 1, by :func:`state_name`."""
    return {
        state_name(name, slot): torch.zeros_like(parameter)
        for name, parameter in parameters.items()
        for slot in slots
    }
