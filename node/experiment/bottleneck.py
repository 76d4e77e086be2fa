"""Full replicas that send a share of their microbatches through the projection of links.

They learn to do without what links do not carry, so that they differ less from compressed pipelines.

Shapes: b microbatch, L tokens, d width, k subspace width, V vocabulary. U [d, k] is the basis of a link.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.experiment.microbatch_counter import MicrobatchCounter
from node.worker.factories import run_basis
from node.worker.trainer import Trainer
from protocol.algorithm.subspace import perpendicular_table


def passes(number: int, share: float) -> bool:
    """Whether microbatch `number` (0-based, of the whole run) is one of the `share` that is projected.

    They are spread evenly over the run.
    """
    return int((number + 1) * share) > int(number * share)


def project_boundaries(trainer: Trainer, share: float) -> None:
    """Project activations and gradients between the stages of `trainer`, which hosts all stages.

    This concerns a `share` of the training microbatches, and no validation. X becomes X U U^T + T_perp[ids]
    with T_perp of the last committed round, as links have it (paper eqs 3 and 4), but without their rounding.
    """
    chosen = _Chosen(trainer, share, MicrobatchCounter(trainer))
    for stage in range(len(trainer.modules) - 1):
        _project_after(trainer, stage, chosen)


def _project_after(trainer: Trainer, stage: int, chosen: _Chosen) -> None:
    spec = trainer.spec
    basis_dk = run_basis(spec, stage + 1)[:, : spec.link.k].to(trainer.device)

    def hook(_: nn.Module, arguments: tuple[Tensor, ...], x_bld: Tensor) -> Tensor | None:
        if not x_bld.requires_grad:  # a validation pass
            return None
        if stage == 0:
            chosen.begin_microbatch(arguments[0])
        if not chosen.is_projected:
            return None
        with torch.no_grad():
            table_vd = perpendicular_table(trainer.outer.embedding.to(basis_dk), basis_dk)
            perpendicular_bld = table_vd[chosen.ids_bl]
        return x_bld @ basis_dk @ basis_dk.T + perpendicular_bld

    trainer.modules[stage].register_forward_hook(hook)


@dataclass
class _Chosen:
    """The present microbatch, its ids [b, L], and whether it is projected."""

    trainer: Trainer
    share: float
    counter: MicrobatchCounter
    is_projected: bool = False
    ids_bl: Tensor | None = None

    def begin_microbatch(self, ids_bl: Tensor) -> None:
        self.ids_bl, counter = ids_bl, self.counter
        counter.advance()
        round_number, step = counter.step
        steps = (round_number - 1) * self.trainer.spec.inner.steps + step
        number = steps * self.trainer.samples.microbatches + counter.microbatch
        self.is_projected = passes(number, self.share)
