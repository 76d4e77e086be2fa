"""Measures in a commit how far payloads agree with the others (node.agreement.meter)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from node.agreement.meter import AgreementMeter
from node.ipc.stored_payload import Payload
from node.ipc.worker_calls import Comparison, MeasuredAgreement
from node.ranks.group import RankGroup
from protocol.math.clipping import SentTensor
from protocol.math.topk import SparseTensor


class AgreementProbe:
    """A :class:`node.core.optimizer.outer_stage.CommitProbe`, on all ranks of a peer together.

    `uncounted` are payloads of the round that have no weight; their positions follow those that count.
    """

    def __init__(
        self, comparison: Comparison, uncounted: Sequence[Payload], clip: float, group: RankGroup
    ) -> None:
        self._comparison, self._clip, self._group = comparison, clip, group
        self.uncounted = uncounted
        self._meter: AgreementMeter | None = None

    def begin(
        self, payloads: Sequence[Mapping[str, SentTensor]], weights: Sequence[float]
    ) -> Callable[[str, Tensor], None]:
        """A function to call with the name and the weighted sum of each parameter, flat."""
        sparse = cast(Sequence[Mapping[str, SparseTensor]], payloads)
        self._meter = AgreementMeter(self._comparison, sparse, weights, self._clip)
        return self._meter.add

    def results(self) -> list[MeasuredAgreement | None]:
        """The figures of each position after a commit; None where one is not finite, or was not measured."""
        if self._meter is None:
            return [None for _ in self._comparison.positions]
        self._meter.sums = self._group.totals(self._meter.sums)
        return self._meter.results()
