"""One replica's outer stage, with an inner phase that moves its parameters at random."""

from __future__ import annotations

import torch
from torch import Tensor

from node.core.model.init import initial_parameters
from node.core.optimizer.outer_state import OuterState
from protocol.spec.run import RunSpec


class Replica:
    """The stage, its live parameters and its round."""

    def __init__(self, spec: RunSpec, seed: int, stage: int = 0) -> None:
        self.local, self.stage = initial_parameters(spec, stage), stage
        self.state = OuterState(spec, {stage: self.local}, None)
        self.outer = self.state[stage]
        self._generator = torch.Generator().manual_seed(seed)

    def train(self) -> dict[str, Tensor]:
        """Returns what was added to the parameters."""
        steps = {
            name: 0.01 * torch.randn(value.shape, generator=self._generator)
            for name, value in self.local.items()
        }
        for name, step in steps.items():
            self.local[name].add_(step)
        return steps

    def propose(self, share: float = 1.0) -> bytes:
        payload = self.state.propose(self.stage, share)
        assert payload is not None
        return payload

    def settle(self, payloads: list[tuple[bytes, float]], mine_included: bool = False) -> None:
        """End the round: commit these payloads, or abort without any."""
        number = self.state.rounds[self.stage] + 1
        if payloads:
            self.state.commit(self.stage, number, payloads, mine_included)
        else:
            self.state.abort(self.stage, number)

    def snapshot(self) -> list[Tensor]:
        return [
            value.clone()
            for tensors in (self.outer.anchor, self.outer.error, self.local)
            for value in tensors.values()
        ]
