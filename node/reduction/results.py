"""Reduction in parts for the worker and for trials; protocol.spec.exchanges registers it."""

from __future__ import annotations

from node.reduction.local import LocalReduction
from node.reduction.result import ReducedResult
from protocol.math.payload_layout import PayloadLayout
from protocol.reduction.counted_result import CountedResult, most_nbytes
from protocol.reduction.parts import ReductionLayout
from protocol.spec.run import RunSpec


class ReducedResults:
    """The node.core.optimizer.outcome.AgreedResults of reduction in parts."""

    def most_nbytes(self, spec: RunSpec, stage: int) -> int:
        return most_nbytes(spec.parameters_of(stage))

    def read(self, layout: PayloadLayout, data: bytes, position: int | None) -> tuple[ReducedResult, bool]:
        parts = ReductionLayout(layout.shapes, layout.outer)
        found = CountedResult.from_bytes(parts, data)
        if position is None or not found.counts(position):
            return ReducedResult(found.result), False
        return ReducedResult(found.result, found.uncounted(parts, position)), True

    def local(self, spec: RunSpec, replicas: int) -> LocalReduction:
        return LocalReduction(spec, replicas)
