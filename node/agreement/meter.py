"""How far payloads of a round agree with the other payloads, measured while they are applied.

With the payloads p_m of a (stage, round) as vectors over all parameters of the stage, their weights w_m and
clipping scales s_m (protocol.math.clipping), f_m = w_m s_m and S = sum_m f_m p_m, the committed mean is
S / sum_m w_m, before a radial merge lengthens it. For the payload j:

    cosine    = <p_j, S - f_j p_j> / (|p_j| |S - f_j p_j|)     with the weighted sum of all *others*
    norm      = |p_j|                                          before clipping
    mean_norm = |S| / sum_m w_m                                of the committed mean of all
    pair      = <p_j, p_i> / (|p_j| |p_i|)                     with one other payload i

The others, and not all: a payload is a part of the mean of all, so that noise among M equal payloads would
have a cosine of about 1 / sqrt(M) with it. With the mean of the others it has one of about 0 for every M.

The figures come from the float32 sum S that every replica computes anyway, so that |S - f_j p_j| follows from
three sums: |S|^2 - 2 f_j <p_j, S> + f_j^2 |p_j|^2. Of these |S|^2 has a relative error of about 1e-7, the
others less. The cosine has an absolute error below 1e-3 wherever it is told (:data:`_LEAST_OTHERS`), and of
about 1e-6 among payloads of similar weight and norm. Machines may differ in the last digits: the figures are
no part of a digest, and nothing that is committed depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.ipc.worker_calls import Comparison, MeasuredAgreement
from protocol.math.outer_step import factors_of
from protocol.math.payload_layout import BLOCK
from protocol.math.topk import SparseTensor

_LEAST_OTHERS = 0.05
"""If the sum of the others is smaller than this part of the payload, rounding errors decide its direction."""


class AgreementMeter:
    """Measures some payloads tensor by tensor.

    Costs one more pass over each sum, one over each payload, and with pairs memory of the size of the largest
    tensor.

    Args:
        comparison: which payloads, by their positions in `payloads`.
        payloads: of a round, decoded: those that count in canonical order, then others, which have no weight.
        weights: w_m of each that counts.
        clip: `outer.clip` of the specification.

    Attributes:
        sums: over the tensors so far: |S|^2, <p_j, p_i> of both pairs, and <p_j, S> of all positions. Where
            several processes have added different tensors, set the sum of their sums before :meth:`results`.
    """

    def __init__(
        self,
        comparison: Comparison,
        payloads: Sequence[Mapping[str, SparseTensor]],
        weights: Sequence[float],
        clip: float,
    ) -> None:
        positions = comparison.positions
        self._measured = [payloads[position] for position in positions]
        pairs = (comparison.alike, comparison.unlike)
        self._pairs = [None if position is None else payloads[position] for position in pairs]
        factors = factors_of(payloads[: len(weights)], weights, clip) + [0.0] * (len(payloads) - len(weights))
        self._factors = [factors[position] for position in positions]
        self._total_weight, self._is_single = math.fsum(weights), len(weights) == 1
        self.sums = [0.0] * (3 + len(positions))
        self._zeros = torch.zeros(0)

    def add(self, name: str, total: Tensor) -> None:
        """Count one tensor in; `total` is its S, flat, float32 on the CPU."""
        self.sums[0] += _squares(total)
        for index, content in enumerate(self._measured, 3):
            self.sums[index] += _product(content[name], total)
        if any(self._pairs):
            own = self._measured[0][name]
            if len(self._zeros) < len(total):
                self._zeros = torch.zeros(len(total))
            dense = self._zeros[: len(total)]
            own.add_to(dense, 1.0)
            for index, other in enumerate(self._pairs, 1):
                if other is not None:
                    self.sums[index] += _product(other[name], dense)
            if own.indices_s is None:
                dense.zero_()
            else:  # far fewer than all elements
                dense.index_fill_(0, own.indices_s, 0.0)

    def results(self) -> list[MeasuredAgreement | None]:
        """The figures of each position; None if one is not finite. A single payload agrees with itself."""
        sum_squares, *with_pairs = self.sums[:3]
        own = _squared_norm(self._measured[0])
        pairs = [
            None if other is None else _cosine(product, own, _squared_norm(other))
            for product, other in zip(with_pairs, self._pairs, strict=True)
        ]
        mean_norm = math.sqrt(sum_squares) / self._total_weight if sum_squares >= 0 else math.nan
        found = []
        for content, factor, product in zip(self._measured, self._factors, self.sums[3:], strict=True):
            squares = _squared_norm(content)
            cosine = self._cosine_with_others(squares, factor, product)
            found.append(_finite(MeasuredAgreement(cosine, math.sqrt(squares), mean_norm, *pairs)))
            pairs = [None, None]  # of the first position alone
        return found

    def _cosine_with_others(self, squares: float, factor: float, with_sum: float) -> float | None:
        if self._is_single and factor:
            return 1.0 if squares > 0 else None
        others = self.sums[0] - 2 * factor * with_sum + factor**2 * squares
        if not others > (_LEAST_OTHERS * factor) ** 2 * squares:
            return None
        return _cosine(with_sum - factor * squares, squares, others)


def _finite(figures: MeasuredAgreement) -> MeasuredAgreement | None:
    cosines = (figures.cosine, figures.alike, figures.unlike)
    told = [each for each in cosines if each is not None]
    return figures if all(map(math.isfinite, (figures.norm, figures.mean_norm, *told))) else None


def _squared_norm(payload: Mapping[str, SparseTensor]) -> float:
    return math.fsum(sparse.squares for sparse in payload.values())


def _cosine(product: float, squares: float, other_squares: float) -> float | None:
    """None where a vector is 0. Rounding may lead a little beyond 1."""
    if squares <= 0 or other_squares <= 0:
        return None
    return max(-1.0, min(1.0, product / (math.sqrt(squares) * math.sqrt(other_squares))))


def _squares(flat: Tensor) -> float:
    """The sum of squares: in float32 within a block, and exact over the blocks.

    Float64 would take twice the time. The relative error of a block is about 1e-7, and below 1e-5.
    """
    runs = (flat[start : start + BLOCK] for start in range(0, len(flat), BLOCK))
    return math.fsum(float(run.dot(run)) for run in runs)


def _product(sparse: SparseTensor, flat: Tensor) -> float:
    """<sparse, flat> in float64, block by block."""
    return math.fsum(float(values.double().dot(flat[at].double())) for at, values in sparse.blocks())
