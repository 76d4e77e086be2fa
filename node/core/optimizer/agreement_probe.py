"""Measures in a commit how far one payload agrees with the others (protocol.math.agreement)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from node.ranks.group import RankGroup
from protocol.math.agreement import AgreementMeter
from protocol.math.clipping import SentTensor
from protocol.math.comparison import Comparison, MeasuredAgreement
from protocol.math.topk import SparseTensor


class AgreementProbe:
    """Measures one commit without changing its result, on all ranks of a peer together."""

    def __init__(self, comparison: Comparison, clip: float, group: RankGroup) -> None:
        self._comparison, self._clip, self._group = comparison, clip, group
        self._meter: AgreementMeter | None = None

    def begin(
        self, payloads: Sequence[Mapping[str, SentTensor]], weights: Sequence[float]
    ) -> Callable[[str, Tensor], None]:
        """A function to call with the name and the weighted sum of each parameter, flat."""
        sparse = cast(Sequence[Mapping[str, SparseTensor]], payloads)
        self._meter = AgreementMeter(self._comparison, sparse, weights, self._clip)
        return self._meter.add

    def result(self) -> MeasuredAgreement | None:
        """The figures after a commit; None if a figure is not finite."""
        assert self._meter is not None, "the commit has begun"
        self._meter.sums = self._group.totals(self._meter.sums)
        return self._meter.result()
