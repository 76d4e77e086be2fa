"""How like a payload is to another one: a copy, altered or not, has trained nothing.

For the payload p_j of a round, the payloads p_i that count in it, those that counted in one of the last
:data:`ROUNDS` rounds, q_i, and the weighted sums Q of these rounds:

    likeness = max(cos(p_j, p_i) for i != j, cos(p_j, q_i), cos(p_j, Q))

Honest payloads have up to 0.55 in small runs, a copy with noise of its own size 0.7, the mean of two payloads
about as much, and a former sum with an error of 30 % at least 0.7. What counted leaves the error feedback, so
that nobody who trains sends it again. What is older agrees with nothing (:mod:`node.agreement.meter`).

The cosines are those of some elements of the stage. Each worker draws its own, so that nobody knows which.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from protocol.math.topk import SparseTensor

ROUNDS = 4
VALUES = 2048
"""About so many values of each payload are compared; a cosine of them has an error of about 0.02."""


class LikenessMemory:
    """What counted in the last rounds of each stage, on the elements that this worker compares.

    Args:
        draw: a random number from the first argument to the second, such as :meth:`random.Random.randint`. It
            draws the elements, a run of consecutive ones from each tensor; others should not know them.
    """

    def __init__(self, draw: Callable[[int, int], int]) -> None:
        self._draw = draw
        self._starts: dict[tuple[int, str], int] = {}
        self._rounds: dict[int, deque[Parts]] = {}

    def run(self, stage: int, name: str, size: int, share: float) -> slice:
        """The elements that are compared of a tensor of `size` elements: this share of them."""
        length = math.ceil(size * share)
        start = self._starts.setdefault((stage, name), self._draw(0, size - length))
        return slice(start, start + length)

    def of(self, stage: int) -> deque[Parts]:
        """The last rounds of a stage: the payloads that counted, then their weighted sum."""
        return self._rounds.setdefault(stage, deque(maxlen=ROUNDS))


@dataclass(frozen=True)
class Parts:
    """The payloads that count in a round, on the elements that are compared: values and their columns.

    Attributes:
        ends: where the values of each payload end, after a 0.
        factors: f of each payload in the weighted sum of the round.
        sum_squares: of the norm of this sum.
    """

    ends: Tensor
    columns_n: Tensor
    values_n: Tensor
    factors: Tensor
    sum_squares: float

    def products(self, dense_je: Tensor) -> Tensor:
        """The products of the rows with each payload, then with the weighted sum, float64."""
        found = self._sums((dense_je[:, self.columns_n] * self.values_n).double())
        return torch.cat((found, (found @ self.factors)[:, None]), dim=1)

    def squares(self) -> Tensor:
        """Of the norms of each payload and of the weighted sum, float64."""
        found = self._sums(self.values_n.double().square()[None])[0]
        return torch.cat((found, torch.tensor([self.sum_squares], dtype=torch.float64)))

    def _sums(self, terms_jn: Tensor) -> Tensor:
        until = torch.nn.functional.pad(terms_jn.cumsum(dim=1), (1, 0))
        return until[:, self.ends].diff(dim=1)


class LikenessMeter:
    """Measures the payloads at `positions` of a round of `stage`.

    Args:
        payloads: of the round, decoded: those that count, then others.
        factors: what each that counts is multiplied with in the sum (protocol.math.outer_step.factors_of).
    """

    def __init__(
        self,
        memory: LikenessMemory,
        stage: int,
        positions: Sequence[int],
        payloads: Sequence[Mapping[str, SparseTensor]],
        factors: Sequence[float],
    ) -> None:
        self._memory, self._stage, self._positions = memory, stage, positions
        self._payloads, self._factors = payloads, factors
        sent = sum(len(sparse.codes_s) for sparse in payloads[0].values())
        self._share = min(1.0, VALUES / max(1, sent))
        self._width, self._sum_squares = 0, 0.0
        self._columns: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int64)] for _ in payloads]
        self._values: list[list[Tensor]] = [[torch.zeros(0)] for _ in payloads]

    def add(self, name: str, total: Tensor) -> None:
        """Count one tensor in; `total` is the weighted sum of the payloads that count, flat, on the CPU."""
        run = self._memory.run(self._stage, name, len(total), self._share)
        for content, columns, values in zip(self._payloads, self._columns, self._values, strict=True):
            at, sent = within(content[name], run if self._share < 1 else None)
            columns.append(at + self._width)
            values.append(sent)
        self._width += run.stop - run.start
        self._sum_squares += float(total[run].dot(total[run]))

    def sums(self) -> Tensor:
        """Of each measured payload (rows) its products with all candidates, in the last column its squares.

        In the last row are the squares of the candidates. All are sums over the tensors: where several
        processes have added different ones, :meth:`results` takes the sum of theirs. From now on this round
        is the last one.
        """
        columns, values = ([torch.cat(each) for each in pieces] for pieces in (self._columns, self._values))
        counted = len(self._factors)
        ends = torch.tensor([0, *accumulate(map(len, columns[:counted]))])
        parts = torch.cat(columns[:counted]), torch.cat(values[:counted])
        now = Parts(ends, *parts, torch.tensor(self._factors, dtype=torch.float64), self._sum_squares)
        rounds = self._memory.of(self._stage)
        candidates = [now, *rounds]
        rounds.appendleft(now)
        dense_je = torch.zeros(len(self._positions), self._width)
        for row_e, position in zip(dense_je, self._positions, strict=True):
            row_e[columns[position]] = values[position]
        rows = torch.cat([each.products(dense_je) for each in candidates], dim=1)
        squares = torch.cat([each.squares() for each in candidates])
        own = dense_je.double().square().sum(dim=1)
        return torch.cat((torch.cat((rows, own[:, None]), dim=1), torch.cat((squares, torch.zeros(1)))[None]))

    def results(self, sums: Tensor) -> list[float | None]:
        """The likeness of each payload; None for one without a candidate or without a direction."""
        cosines = sums[:-1, :-1] / (sums[:-1, -1:] * sums[-1:, :-1]).sqrt()
        counted = len(self._factors)
        for row, position in zip(cosines, self._positions, strict=True):
            row[counted] = row[min(position, counted)] = math.nan  # the sum of this round has the payload
        return [max((min(1.0, x) for x in row if math.isfinite(x)), default=None) for row in cosines.tolist()]


def within(sparse: SparseTensor, run: slice | None) -> tuple[Tensor, Tensor]:
    """The places in a run of elements that are sent, and their values; None is the run of all elements."""
    indices_s = sparse.indices_s
    if run is None:
        return torch.arange(len(sparse.codes_s)) if indices_s is None else indices_s, sparse.values_s
    if indices_s is None:
        columns, at = torch.arange(run.stop - run.start), run
    else:
        at = slice(*np.searchsorted(indices_s.numpy(), (run.start, run.stop)).tolist())
        columns = indices_s[at] - run.start
    return columns, replace(sparse, indices_s=None, codes_s=sparse.codes_s[at]).values_s
