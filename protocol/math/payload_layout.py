"""The form of a payload: chunks of each tensor, values sent of each, bytes of each part; without torch.

Shapes: c chunks, s values sent of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protocol.math.indices import index_code
from protocol.math.quantizers.loading import payload_quantizer
from protocol.spec.outer import OuterSpec

_HEADER = struct.Struct("<4sI8s")
_MAGIC = b"hnpg"
_VERSION = 1
BLOCK = 1 << 19
"""Elements of one block: 128 chunks of 4096."""


@dataclass(frozen=True)
class ChunkGroup:
    """`count` chunks of `size` elements; `k` elements of each are sent."""

    count: int
    size: int
    k: int


@dataclass(frozen=True)
class ChunkBlock:
    """Chunks of one size that hold the elements start..stop in row-major order."""

    start: int
    chunks: ChunkGroup

    @property
    def stop(self) -> int:
        return self.start + self.chunks.count * self.chunks.size


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor of `shape` is cut into chunks: runs of ``outer.chunk`` elements in row-major order.

    The last chunk may be shorter; of it a proportional number of values is sent.
    """

    shape: tuple[int, ...]
    outer: OuterSpec

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def groups(self) -> tuple[ChunkGroup, ...]:
        """Chunks of equal size, in the order in which they are sent. A dense exchange sends all of each."""
        full, rest = divmod(self.numel, self.outer.chunk)
        cut = ((full, self.outer.chunk), (1, rest))
        return tuple(self._group(count, size) for count, size in cut if count and size)

    @cached_property
    def sent(self) -> int:
        """s, the values sent of one tensor."""
        return sum(group.count * group.k for group in self.groups)

    def sections(self) -> Iterator[tuple[ChunkGroup, slice, NDArray[np.int64]]]:
        """Each group, the slice of its values, and the first elements [c, 1] of its chunks."""
        first, start = 0, 0
        for group in self.groups:
            stop = first + group.count * group.k
            yield group, slice(first, stop), start + np.arange(group.count)[:, None] * group.size
            first, start = stop, start + group.count * group.size

    def blocks(self) -> Iterator[ChunkBlock]:
        """All elements in blocks, in the order in which they are sent."""
        start = 0
        for group in self.groups:
            at_once = max(BLOCK // group.size, 1)
            for first in range(0, group.count, at_once):
                chunks = ChunkGroup(min(at_once, group.count - first), group.size, group.k)
                yield ChunkBlock(start + first * group.size, chunks)
            start += group.count * group.size

    @cached_property
    def lengths_c(self) -> NDArray[np.int64]:
        """Values sent of each chunk; no caller changes it."""
        return np.concatenate([np.full(group.count, group.k) for group in self.groups])

    def _group(self, count: int, size: int) -> ChunkGroup:
        k, chunk = self.outer.top_k, self.outer.chunk
        if self.outer.dense:
            return ChunkGroup(count, size, size)
        # Round half up in integers: a float could round differently on another machine.
        return ChunkGroup(count, size, max(1, (2 * k * size + chunk) // (2 * chunk)))


@dataclass(frozen=True)
class PayloadLayout:
    """The form of every payload of one stage.

    Attributes:
        shapes: of the parameters of the stage, in canonical order.
    """

    shapes: Mapping[str, tuple[int, ...]]
    outer: OuterSpec

    @cached_property
    def tensors(self) -> dict[str, TensorLayout]:
        return {name: TensorLayout(shape, self.outer) for name, shape in self.shapes.items()}

    @cached_property
    def nbytes(self) -> int:
        """Length of every payload of this stage."""
        return _HEADER.size + sum(self.lengths.values())

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Bytes of each tensor in every payload."""
        return {name: _tensor_nbytes(layout) for name, layout in self.tensors.items()}

    @property
    def codec(self) -> str:
        """Short name of codec and parameters, such as ``ef2bit-v1:4096/32``."""
        outer = self.outer
        values = "32" if outer.value_quantizer == "none" else outer.value_quantizer
        if outer.dense:
            return f"dense{values}-v{_VERSION}"
        indices = index_code(outer, outer.chunk, outer.top_k).short
        return f"{indices}{values}-v{_VERSION}:{outer.chunk}/{outer.top_k}"

    @cached_property
    def header(self) -> bytes:
        """The first bytes of every payload of this stage."""
        description = json.dumps([self.codec, list(self.shapes.items())]).encode()
        return _HEADER.pack(_MAGIC, _VERSION, hashlib.sha256(description).digest()[:8])


def _tensor_nbytes(layout: TensorLayout) -> int:
    values = sum(part.nbytes for part in payload_quantizer(layout.outer).parts(layout.sent))
    if layout.outer.dense:
        return values
    codes = ((index_code(layout.outer, group.size, group.k), group.count) for group in layout.groups)
    return values + sum(code.nbytes(count) for code, count in codes)
