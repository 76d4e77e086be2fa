"""Codes of the positions of the values sent in every chunk: k strictly increasing indices below n.

Every chunk takes the same number of bits, so a reader finds any chunk without its neighbours. Every set of
indices has exactly one valid code.

- :class:`EliasFano`: low bits as they are, high parts in unary. A chunk takes whole bytes: 36 for 32 of 4096,
  within 8 % of the entropy.
- :class:`Enumerative`: the rank of the set among all C(n, k) of them (T. M. Cover, 1973), chunk after chunk
  without gaps: 267 bits for 32 of 4096, where the entropy is 266.2. It needs a table, and more time to
  decode.

Shapes: c chunks, k indices of each, l limbs of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.spec.sections import OuterSpec

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_BLOCK = 1 << 16
"""Indices coded at a time, about: bounds the memory of one pass."""


class IndexCode(Protocol):
    """A code of the indices of chunks of one size."""

    def nbytes(self, count: int) -> int:
        """Length of `count` coded chunks."""

    def encode(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The chunks [c, k], each strictly increasing and in range, as uint8 [nbytes(c)]."""

    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
        """The indices [count, k] of uint8 [nbytes(count)] from any peer.

        Raises:
            ValueError: these bytes are not what :meth:`encode` gives for any indices.
        """


def index_code(outer: OuterSpec, size: int, k: int) -> IndexCode:
    """The code that `outer` names, for `k` indices of a chunk of `size`, which is at most a full chunk."""
    if outer.indices == "enumerative":
        return Enumerative(size, k, (outer.chunk, outer.top_k))
    return EliasFano(size, k)


def _blocks(count: int, k: int) -> Iterator[slice]:
    """`count` chunks in blocks. A multiple of 8 chunks precedes each block, so it begins at a whole byte."""
    step = max(_BLOCK // k // 8, 1) * 8
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True)
class EliasFano:
    """Code of `k` strictly increasing indices below `size`, in a fixed number of bytes per chunk.

    The low bits of every index are stored as they are. The rest, high_i, is a one at high_i + i of a bit
    vector.
    """

    size: int
    k: int

    @cached_property
    def low_bits(self) -> int:
        """Low bits per index, chosen for the shortest code."""
        return min(range(self.size.bit_length()), key=lambda low: self.k * low + (self.size - 1 >> low))

    @property
    def high_bits(self) -> int:
        """Length of the bit vector with the high parts."""
        return self.k + (self.size - 1 >> self.low_bits)

    @property
    def chunk_nbytes(self) -> int:
        return (self.k * self.low_bits + self.high_bits + 7) // 8

    def nbytes(self, count: int) -> int:
        return count * self.chunk_nbytes

    def encode(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        coded = np.empty((len(indices_ck), self.chunk_nbytes), np.uint8)
        for block in _blocks(len(indices_ck), self.k):
            coded[block] = np.packbits(self._bits(indices_ck[block]), axis=1, bitorder="little")
        return coded.ravel()

    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
        rows = coded.reshape(count, self.chunk_nbytes)
        indices_ck = np.empty((count, self.k), np.int64)
        for block in _blocks(count, self.k):
            indices_ck[block] = self._indices(np.unpackbits(rows[block], axis=1, bitorder="little"))
        return indices_ck

    def _bits(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Code bits [c, 8 * chunk_nbytes]."""
        count, split = len(indices_ck), self.k * self.low_bits
        bits = np.zeros((count, 8 * self.chunk_nbytes), np.uint8)
        low_ckl = _low_bits(indices_ck, self.low_bits)
        bits[:, :split] = low_ckl.reshape(count, split)
        ones_ck = split + (indices_ck >> self.low_bits) + np.arange(self.k)
        bits.ravel()[(ones_ck + np.arange(count)[:, None] * bits.shape[1]).ravel()] = 1
        return bits

    def _indices(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Indices [c, k] of code bits from any peer. Raises ValueError if they are not valid."""
        count, split, end = len(bits), self.k * self.low_bits, self.k * self.low_bits + self.high_bits
        # Every check here keeps one set of indices from having two codes.
        if bits[:, end:].any():
            raise ValueError("unused bits of a chunk's indices are set")
        high = np.ascontiguousarray(bits[:, split:end]).view(np.bool_)
        if (np.count_nonzero(high, axis=1) != self.k).any():
            raise ValueError(f"a chunk does not hold {self.k} indices")
        starts_c1 = np.arange(count)[:, None] * self.high_bits
        ones_ck = np.flatnonzero(high).reshape(count, self.k) - starts_c1
        low_ck = np.zeros((count, self.k), np.int64)
        for bit in range(self.low_bits):
            low_ck |= bits[:, bit : split : self.low_bits].astype(np.int64) << bit
        indices_ck: NDArray[np.int64] = (ones_ck - np.arange(self.k) << self.low_bits) | low_ck
        if (indices_ck[:, 1:] <= indices_ck[:, :-1]).any():
            raise ValueError("a chunk's indices are not strictly increasing")
        if (indices_ck[:, -1] >= self.size).any():
            raise ValueError(f"a chunk's indices exceed its {self.size} elements")
        return indices_ck


def _low_bits(indices_ck: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The lowest `width` bits [c, k, width], lowest first."""
    two_bytes = indices_ck.astype("<u2").view(np.uint8).reshape(*indices_ck.shape, 2)
    return np.unpackbits(two_bytes, axis=2, bitorder="little")[:, :, :width]


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
class Enumerative:
    """Code of `k` strictly increasing indices below `size`: x_0 < x_1 < ... have the rank sum C(x_i, i + 1).

    Args:
        largest: size and k of the largest chunk of the spec, whose table serves all.
    """

    size: int
    k: int
    largest: tuple[int, int]

    @property
    def table(self) -> Binomials:
        return _binomials(*self.largest)

    @cached_property
    def bits(self) -> int:
        """Bits per chunk: ranks are below C(size, k)."""
        return (math.comb(self.size, self.k) - 1).bit_length()

    @property
    def _limbs(self) -> int:
        """Limbs of a rank, with at least one bit to spare."""
        return self.bits // _LIMB_BITS + 1

    def nbytes(self, count: int) -> int:
        return (count * self.bits + 7) // 8

    def encode(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        coded = np.empty(self.nbytes(len(indices_ck)), np.uint8)
        for block in _blocks(len(indices_ck), self.k):
            bits = self._bits(indices_ck[block])
            coded[self._bytes(block)] = np.packbits(bits.ravel(), bitorder="little")
        return coded

    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
        indices_ck = np.empty((count, self.k), np.int64)
        for block in _blocks(count, self.k):
            chunks = block.stop - block.start
            bits = np.unpackbits(coded[self._bytes(block)], bitorder="little")
            if bits[chunks * self.bits :].any():
                raise ValueError("unused bits of the indices are set")
            indices_ck[block] = self._indices(bits[: chunks * self.bits].reshape(chunks, self.bits))
        return indices_ck

    def _bytes(self, chunks: slice) -> slice:
        return slice(self.nbytes(chunks.start), self.nbytes(chunks.stop))

    def _bits(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Code bits [c, bits]."""
        ranks_cl, table = np.zeros((len(indices_ck), self._limbs), np.int64), self.table
        for i in range(self.k):
            # Carries wait until the end: k terms below 2^32 fit 64 bits.
            ranks_cl += table.limbs[i, indices_ck[:, i], : self._limbs]
        ranks_lc = np.ascontiguousarray(ranks_cl.T)
        _carry(ranks_lc)
        return np.unpackbits(_as_bytes(ranks_lc), axis=1, bitorder="little")[:, : self.bits]

    def _indices(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Indices [c, k] of code bits from any peer. Raises ValueError if a rank is too large.

        From the last index down: x_i is the largest x with C(x, i + 1) <= rank; this is then subtracted from
        rank. The float table leaves at most two candidates; the larger one is tried with exact numbers.
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


def _as_bytes(limbs_lc: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Bytes [c, 4 l], the lowest first, of numbers whose limbs are all below 2^32."""
    return np.ascontiguousarray(limbs_lc.T.astype("<u4")).view(np.uint8)
