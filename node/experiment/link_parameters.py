"""Trained parameters of the link ends of one replica, beside the parameters of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from node.optimizer.inner import AdamWState, InnerOptimizer
from protocol.spec.run import RunSpec

_COUNTS, _FIRST, _SECOND, _VALUE = "counts", "exp_avg/", "exp_avg_sq/", "value/"
_STAGE = 0
"""The key of the parameters in their optimizer, which has no other."""


class LinkParameters:
    """The parameters of `module`, which a replica trains as those of its stages.

    AdamW has the settings of the run, its learning rate times `rate`, and no weight decay. Their gradients
    belong to the gradient norm of the replica, by which all its gradients are clipped.
    """

    def __init__(self, spec: RunSpec, module: nn.Module, rate: float = 1.0) -> None:
        self._steps, self._rate = spec.inner.steps, rate
        self.named = dict(module.named_parameters())
        self._optimizer = InnerOptimizer(spec, {_STAGE: self.named}, undecayed=self.named)

    def begin_round(self, round_number: int) -> None:
        """Call it before the first step of `round_number`."""
        self._optimizer.begin_round(round_number)

    def squared_gradient_norm(self) -> float:
        """As InnerOptimizer.squared_gradient_norm."""
        return self._optimizer.squared_gradient_norm()

    def apply(self, round_number: int, step: int, norm: float) -> None:
        """End inner step `step` of the round, as Trainer.apply does: a `norm` that is not finite skips it."""
        if math.isfinite(norm):
            number = (round_number - 1) * self._steps + min(step, self._steps - 1)
            self._optimizer.step(number, norm, self._rate)
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """Values and moments (float32), and the two counts of AdamWState (float64 [2]; -1 stands for None).

        Without the moments and the counts before the first step. The live tensors, not copied.
        """
        found = {f"{_VALUE}{name}": parameter.detach() for name, parameter in self.named.items()}
        state = self._optimizer.state_dict()[_STAGE]
        if state is not None:
            found |= {f"{_FIRST}{name}": value for name, value in state["exp_avg"].items()}
            found |= {f"{_SECOND}{name}": value for name, value in state["exp_avg_sq"].items()}
            cold = -1 if state["cold_steps"] is None else state["cold_steps"]
            found[_COUNTS] = torch.tensor((state["steps"], cold), dtype=torch.float64)
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the result of :meth:`state_dict`."""
        for name, parameter in self.named.items():
            parameter.copy_(state[f"{_VALUE}{name}"])
        moments: AdamWState | None = None
        if _COUNTS in state:
            steps, cold = state[_COUNTS].tolist()
            moments = {
                "steps": int(steps),
                "cold_steps": None if cold < 0 else int(cold),
                "exp_avg": {name: state[f"{_FIRST}{name}"] for name in self.named},
                "exp_avg_sq": {name: state[f"{_SECOND}{name}"] for name in self.named},
            }
        self._optimizer.load_state_dict({_STAGE: moments})
