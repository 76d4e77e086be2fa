"""The indices of a chunk as their rank among all choices (T. M. Cover, 1973): no gaps between chunks.

267 bits for 32 of 4096, where the entropy is 266.2. It needs a table, and more time to decode than
:class:`protocol.math.indices.EliasFano`.

Shapes: c chunks, k indices of each, l limbs of 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from protocol.math.indices import IndexCode

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1


@dataclass(frozen=True, eq=False)
class Binomials:
    """C(x, i + 1) for x = 0..n and i = 0..k-1: exact, and as floats.

    Attributes:
        limbs: uint32 [k, n + 1, l], the lowest limb first.
        nearly: float64 [k, n + 1], times 2^-960 to stay in range, with a relative error below 2^-48.
        widths: limbs that the largest value of each i takes, with at least one bit to spare.
    """

    limbs: NDArray[np.uint32]
    nearly: NDArray[np.float64]
    widths: tuple[int, ...]


@lru_cache(maxsize=4)
def _binomials(n: int, k: int) -> Binomials:
    """Each row is the running sum of the one before: C(x, i + 1) = sum over y < x of C(y, i)."""
    widths = tuple(math.comb(n, i + 1).bit_length() // _LIMB_BITS + 1 for i in range(k))
    limbs = np.zeros((k, n + 1, max(widths)), np.uint32)
    nearly = np.empty((k, n + 1))
    row = np.zeros((max(widths), n + 1), np.int64)
    row[0] = 1
    for i in range(k):
        # Limbs below 2^32 cannot overflow 64 bits in a sum of at most 65536 terms.
        row[:, 1:] = row[:, :-1].cumsum(axis=1)
        row[:, 0] = 0
        _carry(row)
        limbs[i] = row.T
        nearly[i] = _nearly(row)
    return Binomials(limbs, nearly, widths)


@dataclass(frozen=True)
class Enumerative(IndexCode):
    """The rank of the indices x_0 < x_1 < ... among all choices: the sum of C(x_i, i + 1).

    Args:
        largest: size and k of the largest chunk of the spec, whose table serves all.
    """

    short = "en"
    largest: tuple[int, int]

    @classmethod
    def of_chunks(cls, size: int, k: int, largest: tuple[int, int]) -> Self:
        return cls(size, k, largest)

    @property
    def table(self) -> Binomials:
        return _binomials(*self.largest)

    @cached_property
    def bits(self) -> int:
        # Ranks are below C(size, k).
        return (math.comb(self.size, self.k) - 1).bit_length()

    @property
    def _limbs(self) -> int:
        """Limbs of a rank, with at least one bit to spare."""
        return self.bits // _LIMB_BITS + 1

    def _code_bits(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        ranks_cl, table = np.zeros((len(indices_ck), self._limbs), np.int64), self.table
        for i in range(self.k):
            # Carries wait until the end: k terms below 2^32 fit 64 bits.
            ranks_cl += table.limbs[i, indices_ck[:, i], : self._limbs]
        ranks_lc = np.ascontiguousarray(ranks_cl.T)
        _carry(ranks_lc)
        raw = np.ascontiguousarray(ranks_lc.T.astype("<u4")).view(np.uint8)
        return np.unpackbits(raw, axis=1, bitorder="little")[:, : self.bits]

    def _indices(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        """From the last index down: x_i is the largest x with C(x, i + 1) <= rank; this is then subtracted.

        The float table leaves at most two candidates; the larger one is tried with exact numbers.
        """
        count, table = len(bits), self.table
        padded = np.zeros((count, self._limbs * _LIMB_BITS), np.uint8)
        padded[:, : self.bits] = bits
        limbs_cl = np.packbits(padded, axis=1, bitorder="little").view("<u4")
        rank_lc = np.ascontiguousarray(limbs_cl.T.astype(np.int64))
        indices_ck = np.empty((count, self.k), np.int64)
        for i in reversed(range(self.k)):
            # The rest of the rank is below C(n, i + 1): its upper limbs are 0.
            rank_lc = rank_lc[: table.widths[i]]
            row = table.nearly[i, : self.size + 1]
            x_c = np.searchsorted(row, _nearly(rank_lc) * (1 + 2.0**-40), side="right") - 1
            rest_lc = self._minus(rank_lc, i, x_c)
            (too_large,) = np.nonzero(rest_lc[-1] < 0)
            if len(too_large):
                x_c[too_large] -= 1
                rest_lc[:, too_large] = self._minus(rank_lc[:, too_large], i, x_c[too_large])
            if i == self.k - 1 and (x_c == self.size).any():
                raise ValueError(f"a chunk's indices are beyond the last choice of {self.k} of {self.size}")
            indices_ck[:, i], rank_lc = x_c, rest_lc
        return indices_ck

    def _minus(self, rank_lc: NDArray[np.int64], i: int, x_c: NDArray[np.int64]) -> NDArray[np.int64]:
        """rank - C(x, i + 1). If the result is negative, its last limb is negative."""
        rest_lc = rank_lc - self.table.limbs[i, x_c, : len(rank_lc)].T
        _carry(rest_lc)
        return rest_lc


def _carry(limbs_lc: NDArray[np.int64]) -> None:
    """Bring all limbs but the last into 0..2^32-1, in place, and carry the rest to the next limb."""
    for limb in range(len(limbs_lc) - 1):
        limbs_lc[limb + 1] += limbs_lc[limb] >> _LIMB_BITS
        limbs_lc[limb] &= _LIMB_MASK


def _nearly(limbs_lc: NDArray[np.int64]) -> NDArray[np.float64]:
    weights_l = np.ldexp(1.0, np.arange(len(limbs_lc)) * _LIMB_BITS - 960)
    nearly_c: NDArray[np.float64] = weights_l @ limbs_lc.astype(np.float64)
    return nearly_c
