"""What a replica sends of a tensor: the largest values of every chunk, with few bits each.

SparseLoCo (arXiv 2508.15706): a tensor is cut into chunks, from each the k values of largest magnitude are
kept, and their values are quantized. Here are the cut (:class:`TensorLayout`), the choice (:func:`top_k`)
and the quantizer (:func:`fit_magnitudes`); :mod:`protocol.tensorpack` turns the result into bytes.

Shapes: c chunks, n elements of a chunk, k of them sent, s = sum of all k of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from protocol.spec import OuterSpec


@dataclass(frozen=True)
class ChunkGroup:
    """`count` chunks of `size` elements, of each of which `k` are sent."""

    count: int
    size: int
    k: int


@dataclass(frozen=True)
class SparseTensor:
    """What one replica sends of one tensor.

    Attributes:
        indices_s: int64, row-major element numbers; chunk after chunk, ascending within each. None where
            the exchange is dense: all elements in order.
        codes_s: the values themselves; or, with a codebook, uint8: bit 0 picks the magnitude, bit 1 is set
            for negative values.
        magnitudes: None, or float32 [2]: the smaller and the larger magnitude.
    """

    indices_s: Tensor | None
    codes_s: Tensor
    magnitudes: Tensor | None = None

    @cached_property
    def values_s(self) -> Tensor:
        """The values as every receiver sees them."""
        if self.magnitudes is None:
            return self.codes_s
        return torch.cat((self.magnitudes, -self.magnitudes))[self.codes_s.long()]

    def add_to(self, flat: Tensor, factor: float) -> None:
        """flat += factor * sent, in place on a flattened tensor of the full size.

        Product and sum are rounded separately, in the dtype of `flat`, so that every machine gets the same
        bits: no fused multiply-add.
        """
        addend_s = self.values_s.to(flat.dtype) * factor
        if self.indices_s is None:
            flat.add_(addend_s)
        else:
            flat.index_add_(0, self.indices_s, addend_s)


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor of `shape` is cut into chunks.

    "flat": consecutive runs of ``outer.chunk`` in row-major order, the last one possibly shorter.
    "tiles": tiles of h x w, where h (w) is the largest divisor of the dimension up to sqrt(chunk), tiles
    and their elements in row-major order; a 1-D tensor counts as one row.
    """

    shape: tuple[int, ...]
    outer: OuterSpec

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def groups(self) -> tuple[ChunkGroup, ...]:
        """Chunks of equal size, in the order in which they are sent. One group with k = n where dense."""
        if self.outer.dense:
            return (ChunkGroup(1, self.numel, self.numel),)
        if self.outer.layout == "tiles":
            h, w = self._tile
            return (self._group(self.numel // (h * w), h * w),)
        full, rest = divmod(self.numel, self.outer.chunk)
        cut = ((full, self.outer.chunk), (1, rest))
        return tuple(self._group(count, size) for count, size in cut if count and size)

    @property
    def sent(self) -> int:
        """s, the values sent of one tensor."""
        return sum(group.count * group.k for group in self.groups)

    def chunks(self, tensor: Tensor) -> Iterator[Tensor]:
        """The chunks [c, n] of `tensor`, group by group; views of it where the layout is flat."""
        if self.outer.layout == "tiles":
            h, w = self._tile
            rows, columns = self._matrix
            tiles = tensor.reshape(rows // h, h, columns // w, w).transpose(1, 2)
            yield tiles.reshape(-1, h * w)
            return
        flat, start = tensor.reshape(-1), 0
        for group in self.groups:
            stop = start + group.count * group.size
            yield flat[start:stop].view(group.count, group.size)
            start = stop

    def row_major(self, positions: Tensor) -> Tensor:
        """Row-major element numbers of `positions`, the element numbers counted chunk after chunk."""
        if self.outer.layout == "flat":
            return positions
        h, w = self._tile
        columns = self._matrix[1]
        tile, inside = positions // (h * w), positions % (h * w)
        row = tile // (columns // w) * h + inside // w
        return row * columns + tile % (columns // w) * w + inside % w

    def positions(self, row_major: Tensor) -> Tensor:
        """The inverse of :meth:`row_major`."""
        if self.outer.layout == "flat":
            return row_major
        h, w = self._tile
        columns = self._matrix[1]
        row, column = row_major // columns, row_major % columns
        tile = row // h * (columns // w) + column // w
        return tile * (h * w) + row % h * w + column % w

    @property
    def _matrix(self) -> tuple[int, int]:
        if len(self.shape) > 2:
            raise ValueError(f"layout 'tiles' is for vectors and matrices, not for shape {self.shape}")
        rows, columns = (1, *self.shape)[-2:]
        return rows, columns

    @cached_property
    def _tile(self) -> tuple[int, int]:
        side = math.isqrt(self.outer.chunk)
        rows, columns = self._matrix
        return _largest_divisor(rows, side), _largest_divisor(columns, side)

    def _group(self, count: int, size: int) -> ChunkGroup:
        k, chunk = self.outer.top_k, self.outer.chunk
        if self.outer.short_chunk == "clip":
            return ChunkGroup(count, size, min(k, size))
        # Round half up, in integers.
        return ChunkGroup(count, size, max(1, (2 * k * size + chunk) // (2 * chunk)))


def _largest_divisor(n: int, limit: int) -> int:
    return next(divisor for divisor in range(min(n, limit), 0, -1) if n % divisor == 0)


def sparsify(tensor: Tensor, layout: TensorLayout) -> SparseTensor:
    """The values of `tensor` (finite, any float dtype) that are sent, quantized as the layout's spec says.

    Deterministic; but near-ties fall differently after differently rounded arithmetic, so indices are
    never derived twice: what a replica sent is the truth.
    """
    flat = tensor.reshape(-1)
    if layout.outer.dense:
        return SparseTensor(None, flat.clone())
    chosen, start = [], 0
    for group, chunks_cn in zip(layout.groups, layout.chunks(tensor), strict=True):
        first_c = torch.arange(group.count).unsqueeze(1) * group.size + start
        chosen.append((top_k(chunks_cn, group.k) + first_c).flatten())
        start += group.count * group.size
    indices_s = layout.row_major(torch.cat(chosen))
    values_s = flat[indices_s]
    if layout.outer.quantizer == "none":
        return SparseTensor(indices_s, values_s)
    magnitudes = fit_magnitudes(values_s)
    is_larger_s = values_s.abs() > float(magnitudes.double().mean())
    codes_s = is_larger_s.to(torch.uint8) | (values_s < 0).to(torch.uint8) << 1
    return SparseTensor(indices_s, codes_s, magnitudes)


def top_k(chunks_cn: Tensor, k: int) -> Tensor:
    """Ascending indices [c, k] of the k largest magnitudes of every row; of equal ones the lowest index."""
    count = chunks_cn.shape[0]
    magnitude_cn = chunks_cn.abs()
    cut_c1 = magnitude_cn.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_chosen_cn = magnitude_cn >= cut_c1
    # topk breaks ties as it likes. Rows where several elements equal the cut keep the first of them.
    (crowded,) = torch.nonzero(is_chosen_cn.sum(dim=1) > k, as_tuple=True)
    if len(crowded):
        above = magnitude_cn[crowded] > cut_c1[crowded]
        at_cut = magnitude_cn[crowded] == cut_c1[crowded]
        room = k - above.sum(dim=1, keepdim=True)
        is_chosen_cn[crowded] = above | (at_cut & (at_cut.cumsum(dim=1) <= room))
    return is_chosen_cn.nonzero()[:, 1].view(count, k)


def fit_magnitudes(values_s: Tensor) -> Tensor:
    """The two magnitudes, float32 [2] ascending, nearest to \\|values\\| in the sum of squares.

    On a line the best two clusters are a cut of the sorted values, so the optimum, where Lloyd's iteration
    might stop short of it, follows from prefix sums: maximize S_low^2 / n_low + S_high^2 / n_high.
    """
    sorted_s = values_s.abs().double().sort().values
    n = len(sorted_s)
    if n == 1:
        return sorted_s.float().repeat(2)
    sums = sorted_s.cumsum(0)
    n_low = torch.arange(1, n, dtype=torch.float64)
    s_low = sums[:-1]
    s_high = sums[-1] - s_low
    cut = int((s_low**2 / n_low + s_high**2 / (n - n_low)).argmax())
    return torch.stack((s_low[cut] / n_low[cut], s_high[cut] / (n - n_low[cut]))).float()
