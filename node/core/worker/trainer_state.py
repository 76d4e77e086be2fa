"""The whole state of a trainer between two inner steps, and the part of it that a node keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from torch import Tensor

from node.checkpoint.private_state import StageState, TableState
from node.core.model.link_table import LINK_TABLE
from node.core.optimizer.inner import AdamWState
from node.core.optimizer.outer_state import OuterStateDict
from node.core.worker.phase import InnerPhaseState


class TrainerState(TypedDict):
    """State dict of :class:`node.core.worker.trainer.Trainer` between two inner steps.

    Links are not in it, but for the table: they are derived from the embedding.
    """

    parameters: dict[int, dict[str, Tensor]]  # by stage and canonical name
    table: Mapping[str, Tensor] | None  # of the link upstream
    inner: dict[int, AdamWState | None]  # by stage; that of the table by LINK_TABLE
    outer: OuterStateDict
    phase: InnerPhaseState


def private_states(state: TrainerState) -> dict[int, StageState]:
    """The private part of a checkpoint, by stage. Tensors that are on the CPU are not copied."""
    parameters, outer, inner = state["parameters"], state["outer"]["stages"], state["inner"]
    private = {stage: StageState.of(parameters[stage], outer[stage], inner[stage]) for stage in outer}
    return with_table(private, state["table"], inner)


def with_table(
    private: Mapping[int, StageState],
    table: Mapping[str, Tensor] | None,
    inner: Mapping[int, AdamWState | None],
) -> dict[int, StageState]:
    """`private` with the table of the link upstream, if there is one, as a part of the first stage."""
    if table is None:
        return dict(private)
    values, first = {name: value.detach().cpu() for name, value in table.items()}, min(private)
    return {**private, first: replace(private[first], table=TableState(values, inner[LINK_TABLE]))}
