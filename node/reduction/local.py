"""The reducers of a run whose exchange is "reduced", in this process: one for each replica and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from node.core.model.shapes import parameter_shapes
from node.core.optimizer.outcome import WeightedPayload
from node.reduction.result import ReducedResult
from protocol.reduction.partition import partition
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.spec.run import RunSpec

_PREFIX = "reducer/"


class LocalReduction:
    """Reduces every stage in equal parts, one for each of `replicas`."""

    def __init__(self, spec: RunSpec, replicas: int) -> None:
        stages = range(spec.swarm.stages)
        self._layouts = [ReductionLayout(parameter_shapes(spec, stage), spec.outer) for stage in stages]
        self._ranges = [partition(each.chunks.total, [1.0] * replicas) for each in self._layouts]
        self._reducers = [
            [Reducer(layout, part) for part in ranges]
            for layout, ranges in zip(self._layouts, self._ranges, strict=True)
        ]

    def result(self, stage: int, payloads: Sequence[WeightedPayload]) -> ReducedResult:
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

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals."""
        found = dict[str, Tensor]()
        for stage, reducers in enumerate(self._reducers):
            for position, reducer in enumerate(reducers):
                found[f"{_PREFIX}{stage}/{position}"] = reducer.residual
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state of a reduction of the same run; other names are left alone."""
        for stage, reducers in enumerate(self._reducers):
            for position, reducer in enumerate(reducers):
                residual = state[f"{_PREFIX}{stage}/{position}"]
                reducer.residual = residual
