"""Stages that exchange in turn, as the fragments of Streaming DiLoCo (arXiv 2501.18512).

With n turns a round exchanges every n-th stage. It skips the others: they keep their progress for the round
in which they are due, as after an aborted round. So n rounds of H steps lie between two updates of a stage,
an overlap of D steps delays its update by D of these n H steps, and the exchange of a round has 1/n of the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.spec.run import RunSpec


def is_due(spec: RunSpec, stage: int, round_number: int) -> bool:
    """Whether `stage` exchanges in a round: in its turn, and in the last one, so that no progress is left."""
    turns = spec.outer.turns
    return round_number == spec.rounds or stage % turns == round_number % turns


def due_stages(spec: RunSpec, round_number: int, among: Iterable[int] | None = None) -> list[int]:
    """The stages that exchange in a round; `among`: those that are asked about, by default all."""
    stages = range(spec.swarm.stages) if among is None else among
    return [stage for stage in stages if is_due(spec, stage, round_number)]


def rounds_behind(spec: RunSpec, stage: int, round_number: int) -> int:
    """How many rounds of progress a payload of a due stage has, if its last one was committed."""
    turns = spec.outer.turns
    since = (round_number - stage) % turns or turns  # less than `turns` in the last round alone
    return min(since, round_number)
