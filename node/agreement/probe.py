"""Measures in a commit how far payloads agree with the others, and how like they are to single ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from node.agreement.likeness import LikenessMemory, LikenessMeter
from node.agreement.meter import AgreementMeter
from node.ipc.stored_payload import Payload
from node.ipc.worker_calls import Comparison, MeasuredAgreement
from node.ranks.group import RankGroup
from protocol.math.clipping import SentTensor
from protocol.math.outer_step import factors_of
from protocol.math.topk import SparseTensor


class AgreementProbe:
    """A :class:`node.core.optimizer.outer_stage.CommitProbe`, on all ranks of a peer together.

    `uncounted` are payloads of the round that have no weight; their positions follow those that count.
    """

    def __init__(
        self,
        memory: LikenessMemory,
        stage: int,
        comparison: Comparison,
        uncounted: Sequence[Payload],
        clip: float,
        group: RankGroup,
    ) -> None:
        self._memory, self._stage, self._comparison = memory, stage, comparison
        self._clip, self._group = clip, group
        self.uncounted = uncounted
        self._meters: tuple[AgreementMeter, LikenessMeter] | None = None

    def begin(
        self, payloads: Sequence[Mapping[str, SentTensor]], weights: Sequence[float]
    ) -> Callable[[str, Tensor], None]:
        """A function to call with the name and the weighted sum of each parameter, flat."""
        sparse = cast(Sequence[Mapping[str, SparseTensor]], payloads)
        agreement = AgreementMeter(self._comparison, sparse, weights, self._clip)
        factors = factors_of(sparse[: len(weights)], weights, self._clip)
        likeness = LikenessMeter(self._memory, self._stage, self._comparison.positions, sparse, factors)
        self._meters = agreement, likeness

        def add(name: str, total: Tensor) -> None:
            agreement.add(name, total)
            likeness.add(name, total)

        return add

    def results(self) -> list[MeasuredAgreement | None]:
        """The figures of each position after a commit; None where one is not finite, or was not measured."""
        if self._meters is None:
            return [None for _ in self._comparison.positions]
        agreement, likeness = self._meters
        agreement.sums = self._group.totals(agreement.sums)
        sums = likeness.sums()
        totals = torch.tensor(self._group.totals(sums.flatten().tolist()), dtype=torch.float64).view_as(sums)
        return [
            figures and replace(figures, likeness=found)
            for figures, found in zip(agreement.results(), likeness.results(totals), strict=True)
        ]
