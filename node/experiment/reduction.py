"""The reducers of a run whose exchange is "reduced", in this process: one for each replica and stage."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.model.shapes import parameter_shapes
from node.optimizer.outcome import ReducedResult, WeightedPayload
from protocol.reduction.partition import partition
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)

_PREFIX = "reducer/"


class LocalReduction:
    """Reduces every stage in equal parts, one for each of `replicas`.

    Args:
        leave_every: after every so many rounds one reducer leaves, in turn, and another one takes its place
            without its residual. 0: none leaves.

    Attributes:
        lost_norm: by stage, the L2 norm of all residuals that were lost.
    """

    def __init__(self, spec: RunSpec, replicas: int, leave_every: int = 0) -> None:
        self._leave_every = leave_every
        stages = range(spec.swarm.stages)
        self._layouts = [ReductionLayout(parameter_shapes(spec, stage), spec.outer) for stage in stages]
        self._ranges = [partition(each.chunks.total, [1.0] * replicas) for each in self._layouts]
        self._reducers = [
            [Reducer(layout, part) for part in ranges]
            for layout, ranges in zip(self._layouts, self._ranges, strict=True)
        ]
        self._lost_squares = [0.0] * len(stages)

    @property
    def lost_norm(self) -> list[float]:
        return [squares**0.5 for squares in self._lost_squares]

    def reduce(self, stage: int, payloads: Sequence[WeightedPayload]) -> ReducedResult:
        """The committed result of a round. Raises HetnodeError PAYLOAD_CORRUPT where the sum overflows."""
        layout, ranges, reducers = self._layouts[stage], self._ranges[stage], self._reducers[stage]
        cut = [cut_payload(layout, payload, ranges) for payload, _ in payloads]
        weights = [weight for _, weight in payloads]
        parts = [
            reducer.reduce([each[position] for each in cut], weights)
            for position, reducer in enumerate(reducers)
        ]
        result = join_parts(layout, parts, ranges)
        for reducer in reducers:
            reducer.commit()
        return ReducedResult(result)

    def after_round(self, round_number: int) -> None:
        """Let a reducer leave, if one is due."""
        if not self._leave_every or round_number % self._leave_every:
            return
        for stage, reducers in enumerate(self._reducers):
            position = (round_number // self._leave_every - 1) % len(reducers)
            lost = reducers[position].residual_norm
            self._lost_squares[stage] += lost**2
            all_squares = sum(reducer.residual_norm**2 for reducer in reducers)
            log.info(
                "round %d, stage %d: reducer %d leaves; a residual of norm %.3g is lost: %.1f %% of squares",
                *(round_number, stage, position, lost, 100 * lost**2 / all_squares if all_squares else 0.0),
            )
            reducers[position] = Reducer(self._layouts[stage], reducers[position].part)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals, and what was lost."""
        found = {f"{_PREFIX}lost": torch.tensor(self._lost_squares, dtype=torch.float64)}
        for stage, reducers in enumerate(self._reducers):
            for position, reducer in enumerate(reducers):
                found[f"{_PREFIX}{stage}/{position}"] = reducer.state_dict()["residual"]
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state of a reduction of the same run; other names are left alone."""
        self._lost_squares = state[f"{_PREFIX}lost"].tolist()
        for stage, reducers in enumerate(self._reducers):
            for position, reducer in enumerate(reducers):
                residual = state[f"{_PREFIX}{stage}/{position}"]
                reducer.load_state_dict({**reducer.state_dict(), "residual": residual})
