"""Counters and losses of the current inner phase of one member."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from node.ipc.worker_calls import InnerResult
from node.ranks.group import RankGroup


class InnerPhaseState(TypedDict):
    """State dict of :class:`InnerPhase`."""

    losses: tuple[float, ...]
    tokens: int
    steps: int
    skipped_steps: int
    norm: float


@dataclass
class InnerPhase:
    """Progress of the inner phase of `round_number`. Fields have the meaning of :class:`InnerResult`.

    `losses` has one entry for each microbatch of the completed steps, on the last member only. The tensors
    stay on the device, because reading a loss in every step would wait for the GPU.
    """

    round_number: int
    losses: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    skipped_steps: int = 0
    norm: float = math.nan

    def result(self, group: RankGroup = RankGroup()) -> InnerResult:  # noqa: B008  frozen
        """With the losses of all ranks of `group`; all of them call this together."""
        # float64: the mean of many losses does not depend on rounding in float32.
        losses = torch.stack([loss.cpu() for loss in self.losses]).double() if self.losses else torch.zeros(0)
        total, count = group.totals([float(losses.sum()), len(losses)])
        loss = total / count if count else math.nan
        return InnerResult(loss, self.tokens, self.steps, self.skipped_steps, self.norm)

    def state_dict(self) -> InnerPhaseState:
        return {
            "losses": tuple(float(loss) for loss in self.losses),
            "tokens": self.tokens,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "norm": self.norm,
        }

    def load_state_dict(self, state: InnerPhaseState) -> None:
        """Continue as if the steps of `state` had been taken here."""
        self.losses = [torch.tensor(loss) for loss in state["losses"]]
        self.tokens, self.steps, self.skipped_steps = state["tokens"], state["steps"], state["skipped_steps"]
        self.norm = state["norm"]
