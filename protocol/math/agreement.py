"""How far one payload of a round agrees with the other payloads, measured while they are applied.

With the payloads p_m of a (stage, round) as vectors over all parameters of the stage, their weights w_m and
clipping scales s_m (protocol.math.clipping), f_m = w_m s_m and S = sum_m f_m p_m, the committed mean is
S / sum_m w_m. For the payload j:

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

from protocol.math.comparison import Comparison, MeasuredAgreement
from protocol.math.outer_step import factors_of
from protocol.math.topk import BLOCK, SparseTensor

_LEAST_OTHERS = 0.05
"""If the sum of the others is smaller than this part of the payload, rounding errors decide its direction."""


class AgreementMeter:
    """Measures one payload tensor by tensor.

    Costs one more pass over each sum, and with pairs memory of the size of the largest tensor.

    Args:
        payloads: of a round, decoded, in canonical order.
        weights: w_m of each.
        clip: `outer.clip` of the specification.

    Attributes:
        sums: over the tensors so far: |S|^2, <p_j, S>, and <p_j, p_i> of both pairs. Where several processes
            have added different tensors, set the sum of their sums before :meth:`result`.
    """

    def __init__(
        self,
        comparison: Comparison,
        payloads: Sequence[Mapping[str, SparseTensor]],
        weights: Sequence[float],
        clip: float,
    ) -> None:
        self._own, self._is_alone = payloads[comparison.position], len(payloads) == 1
        pairs = (comparison.alike, comparison.unlike)
        self._pairs = [None if position is None else payloads[position] for position in pairs]
        self._factor = factors_of(payloads, weights, clip)[comparison.position]
        self._total_weight = math.fsum(weights)
        self.sums = [0.0, 0.0, 0.0, 0.0]
        self._zeros = torch.zeros(0)

    def add(self, name: str, total: Tensor) -> None:
        """Count one tensor in; `total` is its S, flat, float32 on the CPU."""
        own = self._own[name]
        self.sums[0] += _squares(total)
        self.sums[1] += _product(own, total)
        if any(self._pairs):
            if len(self._zeros) < len(total):
                self._zeros = torch.zeros(len(total))
            dense = self._zeros[: len(total)]
            own.add_to(dense, 1.0)
            for index, other in enumerate(self._pairs, 2):
                if other is not None:
                    self.sums[index] += _product(other[name], dense)
            if own.indices_s is None:
                dense.zero_()
            else:  # far fewer than all elements
                dense.index_fill_(0, own.indices_s, 0.0)

    def result(self) -> MeasuredAgreement | None:
        """The figures; None if one is not finite. A single payload is compared with itself."""
        factor, own = self._factor, _squared_norm(self._own)
        sum_squares, with_sum, *with_pairs = self.sums
        with_others = with_sum - factor * own
        others = sum_squares - 2 * factor * with_sum + factor**2 * own
        cosine = None
        if self._is_alone:
            cosine = 1.0 if own > 0 else None
        elif others > (_LEAST_OTHERS * factor) ** 2 * own:
            cosine = _cosine(with_others, own, others)
        pairs = [
            None if other is None else _cosine(product, own, _squared_norm(other))
            for product, other in zip(with_pairs, self._pairs, strict=True)
        ]
        mean_norm = math.sqrt(sum_squares) / self._total_weight
        found = MeasuredAgreement(cosine, math.sqrt(own), mean_norm, *pairs)
        told = [each for each in (cosine, *pairs) if each is not None]
        return found if all(map(math.isfinite, (found.norm, mean_norm, *told))) else None


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
