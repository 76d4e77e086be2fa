"""Statistics of activations and gradients between the stages of a replica: sums of outer products.

Shapes: d width, b micro-batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.model.shapes import EMBEDDING
from node.worker.trainer import Trainer


class Covariances:
    """Sums [d, d] of x^T x, float64 on the CPU, by kind and boundary.

    Boundary s is before stage s. The kinds are "activation" and "gradient". Activations are counted without
    the token embedding.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, kind: str, boundary: int, x_bld: Tensor) -> None:
        flat = x_bld.detach().flatten(0, -2).float()
        product = (flat.T @ flat).double().cpu()
        name = f"{kind}/{boundary}"
        self.sums[name] = self.sums[name] + product if name in self.sums else product

    def of(self, boundary: int) -> Tensor:
        """Activations plus gradients at `boundary`, each divided by its trace, so both have equal weight."""
        return sum(
            (total / total.trace() for total in (self.sums[f"{kind}/{boundary}"] for kind in _KINDS)),
            start=torch.zeros(()),
        )

    def total(self, kind: str) -> Tensor:
        """The sum of one kind over all boundaries."""
        return torch.stack([value for name, value in self.sums.items() if name.startswith(kind)]).sum(0)


_KINDS = ("activation", "gradient")


def observe_boundaries(trainer: Trainer, seen: Covariances) -> None:
    """Add activations and gradients between the stages of `trainer`, which must host all stages."""
    ids: list[Tensor] = []
    table = trainer.parameters(0)[EMBEDDING]

    def after(stage: int) -> None:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], x_bld: Tensor) -> None:
            if not x_bld.requires_grad:  # a validation pass
                return
            if stage == 0:
                ids[:] = [arguments[0]]
            seen.add("activation", stage + 1, x_bld.detach() - F.embedding(ids[0], table.detach()))
            _on_gradient(x_bld, lambda gradient: seen.add("gradient", stage + 1, gradient))

        trainer.modules[stage].register_forward_hook(hook)

    for stage in range(len(trainer.modules) - 1):
        after(stage)


def observe_gradients(trainer: Trainer, seen: Covariances) -> None:
    """Add the gradient of the activations that `trainer` receives, before the link compresses it."""

    def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments[0].requires_grad:
            first = trainer.stages.first
            _on_gradient(arguments[0], lambda gradient: seen.add("gradient", first, gradient))

    trainer.modules[trainer.stages.first].register_forward_pre_hook(before)


def _on_gradient(x_bld: Tensor, action: Callable[[Tensor], None]) -> None:
    x_bld.register_hook(action)  # type: ignore[no-untyped-call]
