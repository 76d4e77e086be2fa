"""Reduction of a stage in parts: what members send to reducers, and the result of a round, as bytes.

A part is a payload (protocol.codec.payload) whose tensors are the pieces of one run of chunks, so its
length and its only valid form follow from the spec and the run. Members cut their payloads
(:func:`cut_payload`); a reducer sums the parts of all (:class:`Reducer`) and sends its result to all, who
join the results (:func:`join_parts`). These bytes are the result of the round: equal on all members, with the
digest that the coordinator commits.

The result: magic, version, fingerprint of the stage and its codec, the number of parts and the last chunk of
each, then the parts. Empty parts are left out.

Shapes: R members, P parts, n elements of a part.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from protocol.codec.payload import decode, encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import factors_of
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor, sparsify
from protocol.reduction.partition import PartRange
from protocol.reduction.pieces import Piece, ReducedTensor, StageChunks, piece_of
from protocol.spec.outer import OuterSpec

_HEADER = struct.Struct("<4sI8sI")
_MAGIC = b"hnrr"
_VERSION = 1
_STOP = struct.Struct("<I")

CHECK_TOLERANCE = 1e-4
"""Of the squared norm of a sum: machines round norms differently, so values that are nearly equal may trade
places. A false result that passes differs by at most about 1 % of the norm."""


@dataclass(frozen=True)
class ReductionLayout:
    """The forms of the parts and of the result of one stage.

    Raises ValueError for a spec whose chunks are tiles.
    """

    shapes: Mapping[str, tuple[int, ...]]
    outer: OuterSpec

    @cached_property
    def payload(self) -> PayloadLayout:
        """Of a member's own payload."""
        return PayloadLayout(self.shapes, self.outer)

    @cached_property
    def result(self) -> PayloadLayout:
        """Of what would be the result of a single reducer."""
        return PayloadLayout(self.shapes, self.outer.of_result)

    @cached_property
    def chunks(self) -> StageChunks:
        return StageChunks(self.payload.tensors)

    def pieces(self, part: PartRange) -> list[Piece]:
        """The runs of elements of `part`; its values are those of a payload, not of a result."""
        return list(self.chunks.pieces(part))

    def part_sent(self, part: PartRange) -> PayloadLayout:
        """Of the part of a payload that goes to the reducer of `part`."""
        return PayloadLayout({each.name: (each.numel,) for each in self.pieces(part)}, self.outer)

    def part_reduced(self, part: PartRange) -> PayloadLayout:
        """Of what the reducer of `part` sends to all."""
        return PayloadLayout({each.name: (each.numel,) for each in self.pieces(part)}, self.outer.of_result)

    def result_nbytes(self, ranges: Sequence[PartRange]) -> int:
        """Length of the result of a round with these parts."""
        parts = [part for part in ranges if len(part)]
        own = _HEADER.size + _STOP.size * len(parts)
        return own + sum(self.part_reduced(part).nbytes for part in parts)


def cut_payload(layout: ReductionLayout, payload: bytes, ranges: Sequence[PartRange]) -> list[bytes]:
    """The parts of `payload`, one for each range; b"" for an empty one. Lossless.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT, as decode.
        ValueError: a range exceeds the stage.
    """
    sparse = decode(layout.payload, payload)
    return [_cut(layout, sparse, part) for part in ranges]


def decode_part(layout: ReductionLayout, part: PartRange, data: bytes) -> dict[str, SparseTensor]:
    """A member's part, by the names of its pieces. Raises HetnodeError PAYLOAD_CORRUPT for other bytes."""
    return decode(layout.part_sent(part), data)


def join_parts(layout: ReductionLayout, parts: Sequence[bytes], ranges: Sequence[PartRange]) -> bytes:
    """The result of a round, from what the reducers of `ranges` have sent, in the order of the ranges.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT, which names the part; that of an empty range must be b"".
        ValueError: the ranges do not cover the stage one after the other.
    """
    _require_cover(layout, ranges)
    found, stops = [], []
    for number, (data, part) in enumerate(zip(parts, ranges, strict=True)):
        if not len(part):
            if data:
                raise _corrupt(f"Part {number} has {len(data)} bytes, and its range is empty.")
            continue
        try:
            decode(layout.part_reduced(part), data)
        except HetnodeError as error:
            raise _corrupt(f"Part {number}: {error.cause}") from None
        found.append(data)
        stops.append(part.last_chunk)
    return b"".join((_header(layout, len(stops)), *map(_STOP.pack, stops), *found))


def decode_result(layout: ReductionLayout, data: bytes) -> dict[str, ReducedTensor]:
    """The content of a result from any peer, by tensor: the aggregated pseudo-gradient of the round.

    outer_step.apply_update takes it as the only payload, of weight 1: it is divided by its weights already.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT for any other bytes. The bytes never determine how much is allocated.
    """
    ranges = ranges_of(layout, data)
    found: dict[str, list[tuple[Piece, SparseTensor]]] = {name: [] for name in layout.shapes}
    start = _HEADER.size + _STOP.size * len(ranges)
    for part in ranges:
        of_part = layout.part_reduced(part)
        try:
            content = decode(of_part, data[start : start + of_part.nbytes])
        except HetnodeError as error:
            raise _corrupt(f"Chunks {part.first_chunk} to {part.last_chunk}: {error.cause}") from None
        for piece in layout.pieces(part):
            found[piece.tensor].append((piece, content[piece.name]))
        start += of_part.nbytes
    return {name: ReducedTensor(tuple(pieces)) for name, pieces in found.items()}


def ranges_of(layout: ReductionLayout, data: bytes) -> list[PartRange]:
    """The parts of a result, none of them empty; its length is right then. Raises as decode_result."""
    if len(data) < _HEADER.size:
        raise _corrupt(f"It has {len(data)} bytes, less than a header.")
    *_, count = _HEADER.unpack_from(data)
    if data[: _HEADER.size] != _header(layout, count):
        raise _corrupt(f"Its header is not that of a result of codec {layout.result.codec} for this stage.")
    # Every part has a header: a count that the bytes cannot hold is refused before it is used.
    least = _HEADER.size + count * (_STOP.size + len(layout.payload.header))
    if not 0 < count <= layout.chunks.total or len(data) < least:
        raise _corrupt(f"It has {len(data)} bytes for {count} parts of {layout.chunks.total} chunks.")
    stops = [stop for (stop,) in _STOP.iter_unpack(data[_HEADER.size : _HEADER.size + _STOP.size * count])]
    if stops[-1] != layout.chunks.total or any(first >= stop for first, stop in pairwise([0, *stops])):
        raise _corrupt("Its parts do not ascend to the last chunk.")
    ranges = [PartRange(first, stop) for first, stop in pairwise([0, *stops])]
    if len(data) != (nbytes := layout.result_nbytes(ranges)):
        raise _corrupt(f"It has {len(data)} bytes instead of {nbytes}.")
    return ranges


def split_result(layout: ReductionLayout, data: bytes) -> dict[PartRange, bytes]:
    """The parts of a result, as their reducers have sent them; not decoded. Raises as decode_result."""
    ranges, found = ranges_of(layout, data), {}
    start = _HEADER.size + _STOP.size * len(ranges)
    for part in ranges:
        nbytes = layout.part_reduced(part).nbytes
        found[part] = data[start : start + nbytes]
        start += nbytes
    return found


class Reducer:
    """Reduces one run of chunks in every round, and keeps what its results leave out (error feedback).

    With the parts p_m of the members, weights w_m, clipping scales s_m and the residual r:

        r'   = beta r + (sum_m w_m s_m p_m) / (sum_m w_m)      beta: outer.error_decay
        sent = dequant(quant(top-k(r')))                      top-k: outer.reduced_top_k
        r''  = r' - sent

    **Clipping** is by the norms of the parts seen here, not of whole payloads (same rule:
    protocol.math.clipping). What is cut off is lost: its owner does not learn of it.

    **Transaction**: r becomes r'' by :meth:`commit`, when the round with this result is committed;
    otherwise r stays, and the next :meth:`reduce` begins from it.

    `pending_result` is the last result until then. The residual is lost when a reducer leaves without a
    hand-over.

    Only the reducer computes this sum, and the others take its bytes: they need not compute the same bits. A
    checker with the same residual gets the same positions, and magnitudes up to rounding.
    """

    def __init__(self, layout: ReductionLayout, part: PartRange) -> None:
        self._layout, self.part = layout, part
        self._residual = torch.zeros(sum(piece.numel for piece in layout.pieces(part)))
        self._pending: Tensor | None = None
        self.pending_result: bytes | None = None

    @property
    def residual(self) -> Tensor:
        """What this reducer has not sent yet, flat, float32 on the CPU; no later round changes it in place.

        To set it aborts a pending result. Raises ValueError for one that does not fit the range.
        """
        return self._residual

    @residual.setter
    def residual(self, residual: Tensor) -> None:
        if residual.shape != self._residual.shape or not residual.isfinite().all():
            shapes = tuple(residual.shape), tuple(self._residual.shape)
            raise ValueError(f"a residual of shape {shapes[0]} for {shapes[1]}, or one not finite")
        self._residual = residual.detach().to("cpu", torch.float32, copy=True)
        self.abort()

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual: lost if this reducer leaves now."""
        return float(self._residual.double().norm())

    @torch.no_grad()
    def reduce(self, parts: Sequence[bytes], weights: Sequence[float]) -> bytes:
        """The result for this range, pending until :meth:`commit` or :meth:`abort`; b"" for an empty range.

        Args:
            parts: of all members that contribute, in canonical order, by owner.
            weights: of the same members.

        Raises:
            ValueError: no contributor, or a weight that is not positive and finite.
            HetnodeError: PAYLOAD_CORRUPT for a part that cannot be decoded (:func:`decode_part` tells which),
                or where finite parts overflow in the sum. Nothing is pending then.
        """
        if not len(self.part):
            return b""
        kept, of_part, sent = self._sum(parts, weights), self._layout.part_reduced(self.part), {}
        for piece, run in self._runs(kept):
            try:
                sent[piece.name] = sparsify(run, of_part.tensors[piece.name])
            except FloatingPointError as error:
                raise _corrupt(f"The sum of all parts of '{piece.tensor}' has {error}.") from None
            sent[piece.name].add_to(run, -1.0)
        self._pending, self.pending_result = kept, encode(of_part, sent)
        return self.pending_result

    @torch.no_grad()
    def check(self, parts: Sequence[bytes], weights: Sequence[float], result: bytes) -> bool:
        """Whether `result` is what another reducer of this range, with the same residual, can have sent.

        It must be as near to the sum as the own result, up to CHECK_TOLERANCE of the squared norm of the sum.
        Then it is pending, in place of the own one. Otherwise nothing is.

        Args:
            parts, weights: as for :meth:`reduce`.

        Raises as :meth:`reduce`.
        """
        own = self.reduce(parts, weights)
        if not len(self.part):
            return not result
        assert self._pending is not None, "a range has elements"
        of_part = self._layout.part_reduced(self.part)
        try:
            theirs = decode(of_part, result)
        except HetnodeError:
            self.abort()
            return False
        left = self._pending
        least, squares, theirs_left = _squares(left), 0.0, left.clone()
        ours = decode(of_part, own)
        for piece, run in self._runs(theirs_left):
            ours[piece.name].add_to(run, 1.0)
            squares += _squares(run)
            theirs[piece.name].add_to(run, -1.0)
        if not _squares(theirs_left) <= least + CHECK_TOLERANCE * squares:
            self.abort()
            return False
        self._pending, self.pending_result = theirs_left, result
        return True

    def _sum(self, parts: Sequence[bytes], weights: Sequence[float]) -> Tensor:
        """beta r and the weighted mean of all parts. Raises as :meth:`reduce`."""
        self.abort()
        if not parts or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"a reduction needs positive finite weights, not {list(weights)}")
        decoded = [decode_part(self._layout, self.part, data) for data in parts]
        factors, total_weight = factors_of(decoded, weights, self._layout.outer.clip), math.fsum(weights)
        found = self._residual.mul(self._layout.outer.error_decay)
        for piece, run in self._runs(found):
            total = torch.zeros(piece.numel)
            for part, factor in zip(decoded, factors, strict=True):
                part[piece.name].add_to(total, factor)
            run.add_(total.div_(total_weight))
            if not run.isfinite().all():
                raise _corrupt(f"The sum of all parts of '{piece.tensor}' is not finite.")
        return found

    def _runs(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces of this range, each with its elements in `flat`."""
        start = 0
        for piece in self._layout.pieces(self.part):
            yield piece, flat[start : start + piece.numel]
            start += piece.numel

    def commit(self) -> None:
        """The round with the last result is committed: what it left out becomes the residual."""
        if self._pending is not None:
            self._residual = self._pending
        self.abort()

    def abort(self) -> None:
        """The last result is not committed: the residual stays."""
        self._pending = self.pending_result = None


def _cut(layout: ReductionLayout, sparse: Mapping[str, SparseTensor], part: PartRange) -> bytes:
    pieces = {each.name: piece_of(sparse[each.tensor], each) for each in layout.pieces(part)}
    return encode(layout.part_sent(part), pieces) if pieces else b""


def _squares(flat: Tensor) -> float:
    return float(flat.double().square().sum())


def _header(layout: ReductionLayout, count: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, layout.result.header[-8:], count)


def _require_cover(layout: ReductionLayout, ranges: Sequence[PartRange]) -> None:
    stops = [0, *(part.last_chunk for part in ranges)]
    if stops[-1] != layout.chunks.total or any(
        part.first_chunk != stop for part, stop in zip(ranges, stops[:-1], strict=True)
    ):
        raise ValueError(f"the parts do not cover the {layout.chunks.total} chunks of the stage in order")


def _corrupt(cause: str) -> HetnodeError:
    remedy = "It is not applied. The reducer has to update its program."
    return HetnodeError(ErrorCode.PAYLOAD_CORRUPT, f"A reduction cannot be used. {cause}", remedy)
