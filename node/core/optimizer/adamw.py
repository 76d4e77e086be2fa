"""AdamW without torch.optim's classes, with the bits of ``torch.optim.AdamW(fused=True)``.

The fused form changes parameters and moments in one pass over memory; the plain form needs eight.

The classes import torch's compiler at the first step: 2 CPU seconds and 70 MB in each process that trains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from node.ranks.parameters import local_part

MOMENTS = "exp_avg", "exp_avg_sq"


class ParameterGroup(TypedDict):
    """Parameters with equal settings; `param_names` are in the order of `params`."""

    params: list[nn.Parameter]
    param_names: list[str]
    weight_decay: float
    lr: float


class AdamW:
    """AdamW with the interface of torch.optim.AdamW that node.core.optimizer.inner.StageOptimizer uses.

    Args:
        groups: for each group its named parameters, ``"params"``, and its ``"weight_decay"``.

    Attributes:
        state: by parameter: `step` (a scalar), `exp_avg` and `exp_avg_sq` (of the parameter's shape), on the
            parameter's device. Empty before the first step.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.betas, self.eps = betas, eps
        self.param_groups: list[ParameterGroup] = [
            {
                "params": [parameter for _, parameter in group["params"]],
                "param_names": [name for name, _ in group["params"]],
                "weight_decay": group["weight_decay"],
                "lr": lr,
            }
            for group in groups
        ]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Change all parameters that have a gradient."""
        for group in self.param_groups:
            self.step_group(group)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_of(self, parameter: Tensor, moments: Iterable[str] = MOMENTS) -> dict[str, Tensor]:
        """The state of `parameter` with these `moments`, which the first call creates."""
        if not (state := self.state[parameter]):
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {moment: self.new_moment(parameter) for moment in moments}
        return state

    def new_moment(self, parameter: Tensor) -> Tensor:
        """Zeros of the shape of `parameter`, sharded like it."""
        return torch.zeros_like(parameter)

    def step_group(self, group: ParameterGroup) -> None:
        """Change the parameters of `group` that have a gradient."""
        changed: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state_of(parameter) for parameter in changed]
        # Each rank steps on its part of parameters that are sharded.
        adamw(
            [local_part(parameter) for parameter in changed],
            [local_part(parameter.grad) for parameter in changed if parameter.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.eps,
            maximize=False,
        )
