"""Stages that exchange in turn, as the fragments of Streaming DiLoCo (arXiv 2501.18512).

Each round exchanges one stage. The others keep their progress for the rounds in which they are due, as after
an aborted round. So with S stages a round has the bytes of one of them, and S rounds of H steps lie between
two updates of a stage. An overlap of D steps delays its update by D of these S H steps.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.spec.run import RunSpec


def due_stages(spec: RunSpec, round_number: int) -> Collection[int]:
    """The stages that exchange in a round: one, and in the last round all, so that no progress is left."""
    stages = range(spec.swarm.stages)
    return stages if round_number == spec.rounds else (stages[round_number % len(stages)],)
