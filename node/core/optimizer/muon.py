"""Muon: the momentum of each matrix of a layer, made orthogonal, is its update; AdamW updates all else.

K. Jordan et al., 2024. With the scale 0.2 sqrt(max(rows, columns)) of arXiv 2502.16982 an update has the root
mean square of one of AdamW, so that both take the same learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn

from node.core.model.shapes import is_of_layer
from node.core.optimizer.adamw import MOMENTS, AdamW, ParameterGroup
from node.ranks.parameters import local_part
from node.ranks.sharding import part_like, whole
from protocol.math.output_subspace import OUTPUTS

MOMENTUM = 0.95
_SCALE = 0.2
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""The quintic of Newton-Schulz that takes singular values to between 0.7 and 1.2 fastest."""
PRECISION = {"cuda": torch.bfloat16}
"""By kind of device: what its matrix units are fast in. The iteration corrects its own rounding."""


class Muon(AdamW):
    """Has the interface of AdamW. The matrices of layers have one moment, `exp_avg`, and no `exp_avg_sq`.

    All ranks that share sharded parameters step together.
    """

    def step_group(self, group: ParameterGroup) -> None:
        others: ParameterGroup = {**group, "params": [], "param_names": []}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if not is_of_layer(name, parameter.dim()):
                others["params"].append(parameter)
                others["param_names"].append(name)
            elif parameter.grad is not None:
                self._turn(parameter, parameter.grad, group)
        super().step_group(others)

    def _turn(self, parameter: nn.Parameter, gradient: Tensor, group: ParameterGroup) -> None:
        state = self.state_of(parameter, MOMENTS[:1])
        state["step"] += 1
        moment = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
        # Nesterov's: the gradient once more, as if one step ahead.
        update = orthogonal(whole(gradient.lerp(moment, MOMENTUM)))
        mine = local_part(parameter)
        mine.mul_(1 - group["lr"] * group["weight_decay"])
        mine.add_(part_like(parameter, update), alpha=-group["lr"] * _SCALE * sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T, nearly, of the singular value decomposition U S V^T, by Newton-Schulz."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(PRECISION.get(matrix.device.type, torch.float32))
    found = found.T if is_tall else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return (found.T if is_tall else found).to(matrix.dtype)


@torch.no_grad()
def project_outputs(parameters: Mapping[str, Tensor], basis_dk: Tensor | None) -> None:
    """W := U U^T W, in place, for each W that writes into the residual stream; without a basis nothing.

    All ranks that share sharded parameters call it together.
    """
    for name, parameter in parameters.items():
        if basis_dk is not None and name.endswith(OUTPUTS):
            basis = basis_dk.to(parameter.device, parameter.dtype)
            local_part(parameter).copy_(part_like(parameter, basis @ (basis.T @ whole(parameter))))
