"""AdamW with one second moment for many entries of some matrices ("modified AdamW" in the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from node.core.optimizer.adamw import AdamW, ParameterGroup


class RowWiseAdamW(AdamW):
    """AdamW. If `shared(name)` is true, the second moment is the mean over the first axis of the matrix.

    Subspace Networks keep the values that are written into the residual stream in a subspace. An AdamW step
    with a different rate for every entry leaves the subspace. A step with one rate for all d entries of one
    input stays in it. These entries are a row in the paper (inputs first) and a column of our [d, in].

    Args:
        groups: as in AdamW.
        shared: tells for the name of a parameter whether it shares second moments.

    The state has the same names and shapes as that of AdamW.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        shared: Callable[[str], bool],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._shared = shared

    def step_group(self, group: ParameterGroup) -> None:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is not None:
                self._update(group, parameter, self._shared(name))

    def _update(self, group: ParameterGroup, parameter: torch.nn.Parameter, shared: bool) -> None:
        gradient, state = parameter.grad, self.state_of(parameter)
        assert gradient is not None
        state["step"] += 1
        beta1, beta2 = self.betas
        squares = gradient.square()
        if shared:
            # Expanded to the full shape, so that the state has the shapes of AdamW.
            squares = squares.mean(dim=0, keepdim=True).expand_as(gradient)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(squares, 1 - beta2)
        taken = float(state["step"])
        first = state["exp_avg"] / (1 - beta1**taken)
        second = state["exp_avg_sq"] / (1 - beta2**taken)
        # Decoupled weight decay, before the step, as in AdamW.
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, second.sqrt_().add_(self.eps), value=-group["lr"])
