"""Codes of the positions of the values sent in every chunk: k strictly increasing indices below n.

Every chunk takes the same number of bits, and every set of indices has exactly one valid code.

- :class:`EliasFano` takes whole bytes per chunk: 36 for 32 of 4096, within 8 % of the entropy.
- :class:`Enumerative` (T. M. Cover, 1973) leaves no gaps between chunks: 267 bits for 32 of 4096, where the
  entropy is 266.2. It needs a table, and more time to decode.

Shapes: c chunks, k indices of each, l limbs of 32 bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from protocol.spec.outer import OuterSpec

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
BLOCK = 1 << 16
"""Indices coded at a time, about: bounds the memory of one pass."""


@dataclass(frozen=True)
class IndexCode(ABC):
    """A code of `k` strictly increasing indices below `size`, in the same number of bits for every chunk."""

    size: int
    k: int

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a coded chunk."""

    def nbytes(self, count: int) -> int:
        """Length of `count` coded chunks."""
        return (count * self.bits + 7) // 8

    def encode(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The chunks [c, k], each strictly increasing and in range, as uint8 [nbytes(c)]."""
        coded = np.empty(self.nbytes(len(indices_ck)), np.uint8)
        for block in self._blocks(len(indices_ck)):
            bits = self._code_bits(indices_ck[block])
            coded[self._bytes(block)] = np.packbits(bits.ravel(), bitorder="little")
        return coded

    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
        """The indices [count, k] of uint8 [nbytes(count)] from any peer.

        Raises:
            ValueError: these bytes are not what :meth:`encode` gives for any indices.
        """
        indices_ck = np.empty((count, self.k), np.int64)
        for block in self._blocks(count):
            chunks = block.stop - block.start
            bits = np.unpackbits(coded[self._bytes(block)], bitorder="little")
            if bits[chunks * self.bits :].any():
                raise ValueError("unused bits of the indices are set")
            indices_ck[block] = self._indices(bits[: chunks * self.bits].reshape(chunks, self.bits))
        return indices_ck

    @abstractmethod
    def _code_bits(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Code bits [c, bits]."""

    @abstractmethod
    def _indices(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Indices [c, k] of code bits [c, bits] from any peer. Raises ValueError if they are not valid."""

    def _blocks(self, count: int) -> Iterator[slice]:
        # A multiple of 8 chunks precedes each block, so it begins at a whole byte.
        step = max(BLOCK // self.k // 8, 1) * 8
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _bytes(self, chunks: slice) -> slice:
        return slice(self.nbytes(chunks.start), self.nbytes(chunks.stop))


def index_code(outer: OuterSpec, size: int, k: int) -> IndexCode:
    """The code that `outer` names, for `k` indices of a chunk of `size`, which is at most a full chunk."""
    return _index_code(outer.indices, size, k, (outer.chunk, outer.top_k))


@lru_cache(maxsize=64)
def _index_code(name: str, size: int, k: int, table: tuple[int, int]) -> IndexCode:
    """One object for each code: it keeps what it has computed of its lengths."""
    return Enumerative(size, k, table) if name == "enumerative" else EliasFano(size, k)


@dataclass(frozen=True)
class EliasFano(IndexCode):
    """The low bits of every index as they are; the rest, high_i, is a one at high_i + i of a bit vector."""

    @cached_property
    def low_bits(self) -> int:
        """Low bits per index, chosen for the shortest code."""
        return min(range(self.size.bit_length()), key=lambda low: self.k * low + (self.size - 1 >> low))

    @cached_property
    def high_bits(self) -> int:
        """Length of the bit vector with the high parts."""
        return self.k + (self.size - 1 >> self.low_bits)

    @cached_property
    def bits(self) -> int:
        return (self.k * self.low_bits + self.high_bits + 7) // 8 * 8  # whole bytes

    def _code_bits(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        count, split = len(indices_ck), self.k * self.low_bits
        bits = np.zeros((count, self.bits), np.uint8)
        two_bytes = indices_ck.astype("<u2").view(np.uint8).reshape(count, self.k, 2)
        low_ckl = np.unpackbits(two_bytes, axis=2, bitorder="little")[:, :, : self.low_bits]
        bits[:, :split] = low_ckl.reshape(count, split)
        ones_ck = split + (indices_ck >> self.low_bits) + np.arange(self.k)
        bits[np.arange(count)[:, None], ones_ck] = 1
        return bits

    def _indices(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        count, split = len(bits), self.k * self.low_bits
        end = split + self.high_bits
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

    largest: tuple[int, int]

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
