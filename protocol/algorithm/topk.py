"""The values of a tensor that a replica sends: the largest of every chunk, in few bits each.

SparseLoCo (arXiv 2508.15706): a tensor is cut into chunks (:class:`TensorLayout`), from each the k values of
largest magnitude are kept (protocol.algorithm.largest) and quantized (protocol.algorithm.quantizers). With a
mask (protocol.algorithm.random_mask) these are the values at the positions of the mask instead.

The work proceeds in blocks of a few chunks, which stay in the processor's caches and need little memory.

Shapes: c chunks, n elements of a chunk, k of them sent, s = sum of all k of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.largest import top_k
from protocol.algorithm.quantizers.loading import payload_quantizer
from protocol.algorithm.quantizers.magnitudes import value_table
from protocol.algorithm.quantizers.quantizer import Floats, QuantizedValues
from protocol.algorithm.random_mask import TensorMask
from protocol.spec.outer import OuterSpec

BLOCK = 1 << 19
"""Elements of one block: 128 chunks of 4096."""


@dataclass(frozen=True)
class ChunkGroup:
    """`count` chunks of `size` elements; `k` elements of each are sent."""

    count: int
    size: int
    k: int


@dataclass(frozen=True)
class Block:
    """Chunks of one size that hold the elements start..stop in row-major order."""

    start: int
    chunks: ChunkGroup

    @property
    def stop(self) -> int:
        return self.start + self.chunks.count * self.chunks.size


@dataclass(frozen=True)
class SparseTensor:
    """The values that one replica sends of one tensor, on the CPU.

    Attributes:
        indices_s: int64, row-major element numbers; chunk after chunk, ascending within each. None if the
            exchange is dense: all elements in order. With a mask all payloads of a round share one tensor,
            which nobody changes.
        codes_s, magnitudes, scales_s: the values, as in QuantizedValues (protocol.algorithm.quantizers).
    """

    indices_s: Tensor | None
    codes_s: Tensor
    magnitudes: Tensor | None = None
    scales_s: Tensor | None = None

    @classmethod
    def of(cls, indices_s: Tensor | None, values: QuantizedValues) -> SparseTensor:
        """`values` at `indices_s`; shares their memory."""
        optional = (None if part is None else torch.from_numpy(part) for part in values[1:])
        return cls(indices_s, torch.from_numpy(values.codes_s), *optional)

    @property
    def quantized(self) -> QuantizedValues:
        """The values as the quantizers take them; shares their memory."""
        optional = (None if part is None else part.numpy() for part in (self.magnitudes, self.scales_s))
        return QuantizedValues(self.codes_s.numpy(), *optional)

    @property
    def values_s(self) -> Tensor:
        """The values as every receiver sees them."""
        return self._values(slice(None))

    def add_to(self, flat: Tensor, factor: float) -> None:
        """flat += factor * sent, in place on a flattened tensor of the full size.

        Product and sum are rounded separately, in the dtype of `flat`: a fused multiply-add would give other
        bits on some machines.
        """
        for at, values in self.blocks():
            addend = values.to(flat.device, flat.dtype) * factor
            if isinstance(at, slice):
                flat[at].add_(addend)
            else:
                flat.index_add_(0, at.to(flat.device), addend)

    def blocks(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """The values block by block, each with its place in the flattened tensor."""
        for start in range(0, len(self.codes_s), BLOCK):
            part = slice(start, start + BLOCK)
            yield part if self.indices_s is None else self.indices_s[part], self._values(part)

    def product(self, flat: Tensor) -> float:
        """<sent, flat>, with the same bits on every machine; not a number if `flat` is not finite there.

        `flat` is a flattened float32 tensor, so that each product is exact in float64.
        """
        sums = []
        for at, values in self.blocks():
            others = flat[at]
            if not others.isfinite().all():
                return math.nan
            sums.append(_sum((values.double() * others.double()).numpy()))
        return math.fsum(sums)

    @cached_property
    def squares(self) -> float:
        """The sum of the values' squares, with the same bits on every machine.

        Each square is exact in float64. Equal values are counted, then multiplied.
        """
        codes_s = self.codes_s.numpy()
        if self.magnitudes is None:
            squares_s = codes_s.astype(np.float64)
            return _sum(np.square(squares_s, out=squares_s))
        count = len(self.magnitudes)
        keys_s = codes_s % count
        if self.scales_s is not None:
            keys_s = self.scales_s.numpy().astype(np.int16) * count + keys_s
        values = value_table(self.magnitudes.numpy(), self.scales_s is not None)[..., :count].ravel()
        return _sum(np.bincount(keys_s, minlength=len(values)) * values.astype(np.float64) ** 2)

    @cached_property
    def _table(self) -> Tensor:
        """The value of every code, or of every scale and code."""
        assert self.magnitudes is not None
        return torch.from_numpy(value_table(self.magnitudes.numpy(), self.scales_s is not None)).ravel()

    def _values(self, part: slice) -> Tensor:
        if self.magnitudes is None:
            return self.codes_s[part]
        # Codes are uint8: a scale's number times the number of codes needs more bits.
        keys_s = self.codes_s[part].int()
        if self.scales_s is not None:
            keys_s += self.scales_s[part].int() * (2 * len(self.magnitudes))
        return self._table.index_select(0, keys_s)


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor of `shape` is cut into chunks.

    "flat": consecutive runs of ``outer.chunk`` in row-major order, the last one possibly shorter.
    "tiles": tiles of h x w, where h (w) is the largest divisor of the dimension up to sqrt(chunk), tiles
    and their elements in row-major order; a 1-D tensor counts as one row.

    `outer` is the codec of one round. `mask` tells the positions where it is masked, and is None elsewhere.
    """

    shape: tuple[int, ...]
    outer: OuterSpec
    mask: TensorMask | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def groups(self) -> tuple[ChunkGroup, ...]:
        """Chunks of equal size, in the order in which they are sent. A dense exchange sends all of each."""
        if self._has_tiles:
            h, w, _ = self._tile
            return (self._group(self.numel // (h * w), h * w),)
        full, rest = divmod(self.numel, self.outer.chunk)
        cut = ((full, self.outer.chunk), (1, rest))
        return tuple(self._group(count, size) for count, size in cut if count and size)

    @cached_property
    def sent(self) -> int:
        """s, the values sent of one tensor."""
        return sum(group.count * group.k for group in self.groups)

    @property
    def has_indices(self) -> bool:
        """Whether a payload tells the positions of its values."""
        return not self.outer.dense and self.mask is None

    @cached_property
    def masked_positions(self) -> NDArray[np.int64]:
        """[s]: the positions of the mask, counted chunk after chunk, ascending; no caller changes them."""
        assert self.mask is not None
        positions_s, rotations_c = np.empty(self.sent, np.int64), self.mask.rotations(len(self.lengths_c))
        first = 0
        for group, values, starts_c1 in self.sections():
            found_ck = self.mask.positions(group.size, group.k, rotations_c[first : first + group.count])
            positions_s[values] = (found_ck + starts_c1).ravel()
            first += group.count
        return positions_s

    @cached_property
    def masked_indices(self) -> Tensor:
        """The same positions as row-major element numbers."""
        return self.row_major(torch.from_numpy(self.masked_positions))

    def sections(self) -> Iterator[tuple[ChunkGroup, slice, NDArray[np.int64]]]:
        """Each group, the slice of its values, and the first elements [c, 1] of its chunks."""
        first, start = 0, 0
        for group in self.groups:
            stop = first + group.count * group.k
            yield group, slice(first, stop), start + np.arange(group.count)[:, None] * group.size
            first, start = stop, start + group.count * group.size

    def blocks(self) -> Iterator[Block]:
        """All elements in blocks, in the order in which they are sent."""
        start = 0
        for group in self.groups:
            at_once = self._chunks_at_once(group.size)
            for first in range(0, group.count, at_once):
                chunks = ChunkGroup(min(at_once, group.count - first), group.size, group.k)
                yield Block(start + first * group.size, chunks)
            start += group.count * group.size

    def chunks_of(self, block: Block, elements: Tensor) -> Tensor:
        """The chunks [c, n] of a block, from its elements in row-major order; a view if chunks are runs."""
        if not self._has_tiles or self._tile[0] == 1:
            return elements.view(block.chunks.count, block.chunks.size)
        h, w, columns = self._tile
        return elements.view(-1, h, columns // w, w).transpose(1, 2).reshape(-1, h * w)

    @cached_property
    def lengths_c(self) -> NDArray[np.int64]:
        """Values sent of each chunk; no caller changes it."""
        return np.concatenate([np.full(group.count, group.k) for group in self.groups])

    def _chunks_at_once(self, size: int) -> int:
        """Chunks of one block. Tiles of several rows form a run only with all tiles beside them."""
        h, w, columns = self._tile if self._has_tiles else (1, 1, 1)
        beside = columns // w if h > 1 else 1
        return max(BLOCK // (size * beside), 1) * beside

    def row_major(self, positions: Tensor) -> Tensor:
        """Row-major element numbers of `positions`, the element numbers counted chunk after chunk."""
        if not self._has_tiles:
            return positions
        h, w, columns = self._tile
        tile, inside = positions // (h * w), positions % (h * w)
        row = tile // (columns // w) * h + inside // w
        return row * columns + tile % (columns // w) * w + inside % w

    def positions(self, row_major: Tensor) -> Tensor:
        """The inverse of :meth:`row_major`."""
        if not self._has_tiles:
            return row_major
        h, w, columns = self._tile
        row, column = row_major // columns, row_major % columns
        tile = row // h * (columns // w) + column // w
        return tile * (h * w) + row % h * w + column % w

    @property
    def _has_tiles(self) -> bool:
        return self.outer.layout == "tiles" and not self.outer.dense

    @cached_property
    def _tile(self) -> tuple[int, int, int]:
        """Height and width of a tile, and columns of the matrix."""
        if len(self.shape) > 2:
            raise ValueError(f"layout 'tiles' is for vectors and matrices, not for shape {self.shape}")
        rows, columns = (1, *self.shape)[-2:]
        side = math.isqrt(self.outer.chunk)
        return _largest_divisor(rows, side), _largest_divisor(columns, side), columns

    def _group(self, count: int, size: int) -> ChunkGroup:
        k, chunk = self.outer.top_k, self.outer.chunk
        if self.outer.dense:
            return ChunkGroup(count, size, size)
        if self.outer.short_chunk == "clip":
            return ChunkGroup(count, size, min(k, size))
        # Round half up in integers: a float could round differently on another machine.
        return ChunkGroup(count, size, max(1, (2 * k * size + chunk) // (2 * chunk)))


def _sum(values: NDArray[np.float64]) -> float:
    """The sum by repeated halving, in place: numpy's own sum may use another order on another processor."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]
        count = half
    return float(values[0]) if count else 0.0


def _largest_divisor(n: int, limit: int) -> int:
    return next(divisor for divisor in range(min(n, limit), 0, -1) if n % divisor == 0)


def sparsify(tensor: Tensor, layout: TensorLayout) -> SparseTensor:
    """The values of `tensor` (finite, any float dtype, any device) that are sent, as the layout's spec says.

    Deterministic. But arithmetic that rounds differently decides near-ties differently, so no peer derives
    the indices of another: all use those that were sent. Raises FloatingPointError as the quantizer does.
    """
    flat = tensor.reshape(-1)
    return sparsify_blocks((flat[block.start : block.stop] for block in layout.blocks()), layout)


def sparsify_blocks(elements: Iterable[Tensor], layout: TensorLayout) -> SparseTensor:
    """As :func:`sparsify`, for a tensor that the caller gives block by block.

    The blocks are searched on their device; only the values sent, and few others, are copied to the host.
    """
    if layout.outer.dense:
        indices_s, values_s = None, torch.cat([run.to("cpu", copy=True) for run in elements]).numpy()
    elif layout.mask is not None:
        indices_s, values_s = layout.masked_indices, _masked(elements, layout)
    else:
        positions_s, values_s = _largest(elements, layout)
        indices_s = layout.row_major(torch.from_numpy(positions_s))
    return SparseTensor.of(indices_s, payload_quantizer(layout.outer).quantize(values_s, layout.lengths_c))


def _largest(elements: Iterable[Tensor], layout: TensorLayout) -> tuple[NDArray[np.int64], Floats]:
    """The largest values [s] of every chunk, and their positions [s], counted chunk after chunk."""
    values: list[Floats] = []
    positions_s, sent = np.empty(layout.sent, np.int64), 0
    for block, run in zip(layout.blocks(), elements, strict=True):
        chunks = block.chunks
        indices_ck, values_ck = top_k(layout.chunks_of(block, run), chunks.k)
        starts_c1 = block.start + np.arange(chunks.count)[:, None] * chunks.size
        positions_s[sent : sent + indices_ck.size] = (indices_ck + starts_c1).ravel()
        values.append(values_ck.ravel())
        sent += indices_ck.size
    return positions_s, np.concatenate(values)


def _masked(elements: Iterable[Tensor], layout: TensorLayout) -> Floats:
    """The values [s] at the positions of the mask."""
    values: list[Floats] = []
    sent = 0
    for block, run in zip(layout.blocks(), elements, strict=True):
        stop = sent + block.chunks.count * block.chunks.k
        inside = torch.from_numpy(layout.masked_positions[sent:stop] - block.start)
        chunks_cn = layout.chunks_of(block, run)
        values.append(chunks_cn.reshape(-1)[inside.to(run.device)].numpy(force=True))
        sent = stop
    return np.concatenate(values)
