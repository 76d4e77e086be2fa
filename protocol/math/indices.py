"""Codes of the positions of the values sent in every chunk: k strictly increasing indices below n.

Every chunk takes the same number of bits, and every set of indices has exactly one valid code.

:class:`EliasFano` takes whole bytes per chunk: 36 for 32 of 4096, within 8 % of the entropy.

Shapes: c chunks, k indices of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pkgutil import resolve_name
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import INDEX_CODES

BLOCK = 1 << 16
"""Indices coded at a time, about: bounds the memory of one pass."""


@dataclass(frozen=True)
class IndexCode(ABC):
    """A code of `k` strictly increasing indices below `size`, in the same number of bits for every chunk.

    `short` is its name in the header of payloads.
    """

    short: ClassVar[str]
    size: int
    k: int

    @classmethod
    def of_chunks(cls, size: int, k: int, largest: tuple[int, int]) -> Self:
        """The code of these chunks in a run where `largest` is size and k of the largest one."""
        return cls(size, k)

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
def _index_code(name: str, size: int, k: int, largest: tuple[int, int]) -> IndexCode:
    """One object for each code: it keeps what it has computed of its lengths."""
    code: IndexCode = resolve_name(INDEX_CODES[name]).of_chunks(size, k, largest)
    return code


@dataclass(frozen=True)
class EliasFano(IndexCode):
    """The low bits of every index as they are; the rest, high_i, is a one at high_i + i of a bit vector."""

    short = "ef"

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
