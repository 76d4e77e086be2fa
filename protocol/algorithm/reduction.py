"""How a group shares the reduction of a stage: every reducer sums a run of chunks for all members.

The unit is the chunk of the exchange (protocol.algorithm.topk). The chunks of all tensors of a stage are
numbered in canonical order, and a part (:class:`PartRange`) is a run of these numbers. Chunks are runs of
elements in row-major order (layout "flat"), so a part holds one run of elements (:class:`Piece`) of every
tensor that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import Tensor

from protocol.algorithm.topk import SparseTensor, TensorLayout


@dataclass(frozen=True)
class PartRange:
    """The chunks first_chunk..last_chunk - 1 of a stage, in canonical order; none where both are equal."""

    first_chunk: int
    last_chunk: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_chunk <= self.last_chunk:
            raise ValueError(f"no range of chunks: {self.first_chunk} to {self.last_chunk}")

    def __len__(self) -> int:
        return self.last_chunk - self.first_chunk


def partition(chunks: int, fractions: Sequence[float]) -> list[PartRange]:
    """Cut `chunks` into one contiguous part for each reducer, in the order given.

    Exact arithmetic: the same fractions give the same parts on every machine. A fraction of 0 gives an empty
    part: such a member reduces nothing.

    Args:
        fractions: share of each reducer in any unit, such as the part sizes of hivemind's load balancing.

    Raises:
        ValueError: a fraction is negative or not finite, or none is positive.
    """
    if not all(math.isfinite(each) and each >= 0 for each in fractions) or not any(fractions):
        raise ValueError(f"a partition needs finite fractions, one of them positive, not {list(fractions)}")
    shares = [Fraction(each) for each in fractions]
    total, reached, stops = sum(shares), Fraction(0), [0]
    for share in shares:
        reached += share
        stops.append(math.floor(reached * chunks / total + Fraction(1, 2)))
    return [PartRange(first, stop) for first, stop in pairwise(stops)]


@dataclass(frozen=True)
class Piece:
    """What a part holds of one tensor: its elements start..stop - 1, and the values sent of these chunks."""

    tensor: str
    start: int
    stop: int
    values: slice

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.tensor}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class StageChunks:
    """The chunks of a stage, numbered in canonical order.

    Raises ValueError for layout "tiles", whose chunks are not runs of elements.
    """

    tensors: Mapping[str, TensorLayout]

    def __post_init__(self) -> None:
        for layout in self.tensors.values():
            if layout.outer.layout != "flat":
                raise ValueError("a reduction in parts needs layout 'flat'")

    @cached_property
    def counts(self) -> dict[str, int]:
        """Chunks of each tensor."""
        return {name: sum(group.count for group in each.groups) for name, each in self.tensors.items()}

    @cached_property
    def total(self) -> int:
        return sum(self.counts.values())

    def pieces(self, part: PartRange) -> Iterator[Piece]:
        """The runs of elements of `part`, in canonical order. Raises ValueError beyond the last chunk."""
        if part.last_chunk > self.total:
            raise ValueError(f"chunk {part.last_chunk} of a stage of {self.total}")
        before = 0
        for name, count in self.counts.items():
            first = max(part.first_chunk - before, 0)
            stop = min(part.last_chunk - before, count)
            before += count
            if first < stop:
                layout = self.tensors[name]
                size = layout.groups[0].size
                ends = np.concatenate(([0], layout.lengths_c.cumsum()))
                values = slice(int(ends[first]), int(ends[stop]))
                yield Piece(name, first * size, min(stop * size, layout.numel), values)

    def elements_before(self, chunk: int) -> int:
        """Elements of the stage before this chunk, in canonical order."""
        return sum(piece.numel for piece in self.pieces(PartRange(0, chunk)))


def piece_of(sparse: SparseTensor, piece: Piece) -> SparseTensor:
    """The values of `piece`, from those of the whole tensor; indices count from the piece's first element."""
    return SparseTensor(
        None if sparse.indices_s is None else sparse.indices_s[piece.values] - piece.start,
        sparse.codes_s[piece.values],
        sparse.magnitudes,
        None if sparse.scales_s is None else sparse.scales_s[piece.values],
    )


@dataclass(frozen=True)
class ReducedTensor:
    """One tensor of a round's result: pieces from several reducers, each with its own magnitudes."""

    pieces: tuple[tuple[Piece, SparseTensor], ...]

    def add_to(self, flat: Tensor, factor: float) -> None:
        """flat += factor * result, in place, as SparseTensor.add_to."""
        for piece, sparse in self.pieces:
            sparse.add_to(flat[piece.start : piece.stop], factor)

    @cached_property
    def squares(self) -> float:
        """As SparseTensor.squares."""
        return math.fsum(sparse.squares for _, sparse in self.pieces)
