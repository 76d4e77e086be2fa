"""How a group shares the reduction of a stage: every reducer sums a run of chunks for all members.

The unit is the chunk of the exchange (protocol.math.topk). The chunks of all tensors of a stage are
numbered in canonical order, and a part (:class:`PartRange`) is a run of these numbers. Chunks are runs of
elements in row-major order, so a part holds one run of elements (:class:`Piece`) of every tensor that it
touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from protocol.math.payload_layout import TensorLayout
from protocol.math.topk import SparseTensor
from protocol.reduction.partition import PartRange


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
    """The chunks of a stage, numbered in canonical order."""

    tensors: Mapping[str, TensorLayout]

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
