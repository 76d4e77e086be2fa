"""Stages that exchange in turn, as the fragments of Streaming DiLoCo (arXiv 2501.18512).

With n turns a round exchanges every n-th stage. The others keep their progress for the rounds in which they
are due, as after an aborted round. So n rounds of H steps lie between two updates of a stage, an overlap of D
steps delays its update by D of these n H steps, and the exchange of a round has 1/n of the bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.spec.run import RunSpec


def due_stages(spec: RunSpec, round_number: int, turns: int) -> Collection[int]:
    """The stages that exchange in a round: those of its turn; in the last round all, to leave no progress."""
    stages = range(spec.swarm.stages)
    return stages if round_number == spec.rounds else stages[round_number % turns :: turns]
