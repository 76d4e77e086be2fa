"""The whole state of a trainer between two inner steps, and the part of it that a node keeps for itself."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from node.checkpoint.private_state import StageState
from node.optimizer.inner import AdamWState
from node.optimizer.outer_state import OuterStateDict
from node.worker.phase import InnerPhaseState


class TrainerState(TypedDict):
    """State dict of :class:`node.worker.trainer.Trainer` between two inner steps.

    Links are not in it: they are derived from the embedding.
    """

    parameters: dict[int, dict[str, Tensor]]  # by stage and canonical name
    inner: dict[int, AdamWState | None]
    outer: OuterStateDict
    phase: InnerPhaseState


def private_states(state: TrainerState) -> dict[int, StageState]:
    """The private part of a checkpoint, by stage. Tensors that are on the CPU are not copied."""
    parameters, outer, inner = state["parameters"], state["outer"]["stages"], state["inner"]
    return {stage: StageState.of(parameters[stage], outer[stage], inner[stage]) for stage in outer}
