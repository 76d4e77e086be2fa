"""Counters and losses of the current inner phase of one member."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from node.ipc.worker_calls import InnerResult
from node.ranks.group import RankGroup


@dataclass
class InnerPhase:
    """Progress of the inner phase of `round_number`. Fields have the meaning of :class:`InnerResult`.

    `losses` has one entry for each microbatch of the completed steps, on the last member only. The tensors
    stay on the device, because reading a loss in every step would wait for the GPU. `squares` are those of
    this member's gradients in the present step.
    """

    round_number: int
    losses: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    skipped_steps: int = 0
    nonfinite_step: int = 0
    squares: float = 0.0
    norm: float = math.nan

    def result(self, group: RankGroup = RankGroup()) -> InnerResult:  # noqa: B008  frozen
        """With the losses of all ranks of `group`; all of them call this together."""
        # float64: the mean of many losses does not depend on rounding in float32.
        losses = torch.stack([loss.cpu() for loss in self.losses]).double() if self.losses else torch.zeros(0)
        total, count = group.totals([float(losses.sum()), len(losses)])
        loss = total / count if count else math.nan
        return InnerResult(loss, self.tokens, self.steps, self.skipped_steps, self.norm, self.nonfinite_step)
