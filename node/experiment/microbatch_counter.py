"""Which training microbatch a member of an in-process replica computes."""

from __future__ import annotations

from dataclasses import dataclass

from node.worker.trainer import Trainer


@dataclass
class MicrobatchCounter:
    """The present microbatch of `trainer`. It needs no state of its own between two steps.

    Attributes:
        step: the round, and the inner step in it (0-based).
        microbatch: 0-based in its step.
    """

    trainer: Trainer
    step: tuple[int, int] = (0, 0)
    microbatch: int = 0

    @property
    def frame(self) -> tuple[int, int, int]:
        """Round, step and microbatch."""
        return (*self.step, self.microbatch)

    def advance(self) -> None:
        """Call it once for each training microbatch, before it is used."""
        phase = self.trainer.phase
        step = phase.round_number, phase.steps + phase.skipped_steps
        self.microbatch = self.microbatch + 1 if step == self.step else 0
        self.step = step
