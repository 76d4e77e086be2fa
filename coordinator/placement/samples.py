"""Samples whose training is lost, because their rounds were aborted and no replica of them is left."""

from __future__ import annotations

from coordinator.run.state.state import State
from protocol.types import Aborted, Committed


def lost_from(state: State, round_number: int) -> int:
    """The first of the aborted rounds of the newest plan that end before `round_number`, or that number.

    A round of which a stage is committed counts as trained. The first decision of a round makes the plan: a
    stage that commits the same round later trains its samples twice.
    """
    while round_number > state.plans[-1].from_round:
        kinds = {type(state.decisions.get((stage, round_number - 1))) for stage in range(state.stages)}
        if Aborted not in kinds or Committed in kinds:
            break
        round_number -= 1
    return round_number
