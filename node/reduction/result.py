"""The result of the reducers of a round, as the outer step of a member applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.codec.payload import decode
from protocol.math.clipping import SentTensor
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor
from protocol.reduction.partition import PartRange
from protocol.reduction.parts import ReductionLayout, decode_result
from protocol.reduction.pieces import Piece, ReducedTensor, piece_of


@dataclass(frozen=True)
class ReducedResult:
    """The result of all reducers of a round (protocol.reduction.parts).

    Attributes:
        missing: parts of this replica's own payload that their reducers have not counted.
    """

    data: bytes
    missing: tuple[PartRange, ...] = ()

    def contents(self, layout: PayloadLayout) -> Mapping[str, SentTensor]:
        return decode_result(ReductionLayout(layout.shapes, layout.outer), self.data)

    def left_out(self, layout: PayloadLayout, own: bytes) -> Mapping[str, SentTensor]:
        """The missing parts. What a reducer clips is not known here."""
        if not self.missing:
            return {}
        sparse, chunks = decode(layout, own), ReductionLayout(layout.shapes, layout.outer).chunks
        found: dict[str, list[tuple[Piece, SparseTensor]]] = {name: [] for name in layout.shapes}
        for part in self.missing:
            for piece in chunks.pieces(part):
                found[piece.tensor].append((piece, piece_of(sparse[piece.tensor], piece)))
        return {name: ReducedTensor(tuple(pieces)) for name, pieces in found.items()}
