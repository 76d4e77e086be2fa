"""The values of a tensor that a replica sends: the largest of every chunk, in few bits each.

SparseLoCo (arXiv 2508.15706): a tensor is cut into chunks (protocol.math.payload_layout), from each the k
values of largest magnitude are kept (protocol.math.largest) and quantized (protocol.math.quantizers).

The work proceeds in blocks of a few chunks, which stay in the processor's caches and need little memory.

Shapes: c chunks, n elements of a chunk, k of them sent, s = sum of all k of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.largest import top_k
from protocol.math.payload_layout import BLOCK, TensorLayout
from protocol.math.quantizers.loading import payload_quantizer
from protocol.math.quantizers.quantizer import Floats, QuantizedValues


@dataclass(frozen=True)
class SparseTensor:
    """The values that one replica sends of one tensor, on the CPU.

    Attributes:
        indices_s: int64, row-major element numbers, ascending. None if the exchange is dense: all elements
            in order.
        codes_s, magnitudes: the values, as in QuantizedValues (protocol.math.quantizers).
    """

    indices_s: Tensor | None
    codes_s: Tensor
    magnitudes: Tensor | None = None

    @classmethod
    def of(cls, indices_s: Tensor | None, values: QuantizedValues) -> SparseTensor:
        """`values` at `indices_s`; shares their memory."""
        magnitudes = None if values.magnitudes is None else torch.from_numpy(values.magnitudes)
        return cls(indices_s, torch.from_numpy(values.codes_s), magnitudes)

    @property
    def quantized(self) -> QuantizedValues:
        """The values as the quantizers take them; shares their memory."""
        magnitudes = None if self.magnitudes is None else self.magnitudes.numpy()
        return QuantizedValues(self.codes_s.numpy(), magnitudes)

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

    @cached_property
    def squares(self) -> float:
        """The sum of the values' squares, with the same bits on every machine.

        Each square is exact in float64. Equal values are counted, then multiplied.
        """
        codes_s = self.codes_s.numpy()
        if self.magnitudes is None:
            squares_s = codes_s.astype(np.float64)
            return folded_sum(np.square(squares_s, out=squares_s))
        count = len(self.magnitudes)
        counts = np.bincount(codes_s % count, minlength=count)
        return folded_sum(counts * self.magnitudes.numpy().astype(np.float64) ** 2)

    @cached_property
    def _table(self) -> Tensor:
        """The value of every code."""
        assert self.magnitudes is not None
        return torch.cat((self.magnitudes, -self.magnitudes))

    def _values(self, part: slice) -> Tensor:
        if self.magnitudes is None:
            return self.codes_s[part]
        return self._table.index_select(0, self.codes_s[part].int())


def folded_sum(values: NDArray[np.float64]) -> float:
    """The sum by repeated halving, in place: numpy's own sum may use another order on another processor."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]
        count = half
    return float(values[0]) if count else 0.0


def sparsify(tensor: Tensor, layout: TensorLayout) -> SparseTensor:
    """The values of `tensor` (finite, any float dtype, any device) that are sent, as the layout's spec says.

    Deterministic. But arithmetic that rounds differently decides near-ties differently, so no peer derives
    the indices of another: all use those that were sent.
    """
    flat = tensor.reshape(-1)
    return sparsify_blocks((flat[block.start : block.stop] for block in layout.blocks()), layout)


def sparsify_blocks(elements: Iterable[Tensor], layout: TensorLayout) -> SparseTensor:
    """As :func:`sparsify`, for a tensor that the caller gives block by block.

    The blocks are searched on their device; only the values sent, and few others, are copied to the host.
    """
    if layout.outer.dense:
        indices_s, values_s = None, torch.cat([run.to("cpu", copy=True) for run in elements]).numpy()
    else:
        positions_s, values_s = _largest(elements, layout)
        indices_s = torch.from_numpy(positions_s)
    return SparseTensor.of(indices_s, payload_quantizer(layout.outer).quantize(values_s))


def _largest(elements: Iterable[Tensor], layout: TensorLayout) -> tuple[NDArray[np.int64], Floats]:
    """The largest values [s] of every chunk, and their element numbers [s]."""
    values: list[Floats] = []
    positions_s, sent = np.empty(layout.sent, np.int64), 0
    for block, run in zip(layout.blocks(), elements, strict=True):
        chunks = block.chunks
        indices_ck, values_ck = top_k(run.view(chunks.count, chunks.size), chunks.k)
        starts_c1 = block.start + np.arange(chunks.count)[:, None] * chunks.size
        positions_s[sent : sent + indices_ck.size] = (indices_ck + starts_c1).ravel()
        values.append(values_ck.ravel())
        sent += indices_ck.size
    return positions_s, np.concatenate(values)
