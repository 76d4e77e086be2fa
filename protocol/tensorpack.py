"""One stage's pseudo-gradient as bytes: a payload whose length is known before the first byte arrives.

Layout: a header (magic, version, fingerprint of names, shapes and codec), then tensor after tensor in
canonical order, each as [magnitudes, 2 float32] [indices, chunk after chunk] [codes]. Parts in brackets are
left out where the codec has no use for them. All sizes follow from the spec, none is read from the bytes.

Indices are coded with Elias-Fano at a fixed size per chunk: 36 bytes for 32 of 4096, within 8 % of the
entropy; with 2-bit codes a chunk takes 44 bytes. The code has exactly one valid form for every content.

Shapes: c chunks of equal size n, k indices of each, s values of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import OuterSpec
from protocol.topk import SparseTensor, TensorLayout

_HEADER = struct.Struct("<4sI8s")
_MAGIC = b"hnpg"
_VERSION = 1
_MAGNITUDES_NBYTES = 8
_CODE_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclass(frozen=True)
class PayloadLayout:
    """The form of every payload of one stage.

    Args:
        shapes: the stage's parameters in canonical order.
        outer: the codec's parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    outer: OuterSpec

    @cached_property
    def tensors(self) -> dict[str, TensorLayout]:
        return {name: TensorLayout(shape, self.outer) for name, shape in self.shapes.items()}

    @cached_property
    def nbytes(self) -> int:
        """Length of every payload of this stage."""
        return _HEADER.size + sum(_tensor_nbytes(layout) for layout in self.tensors.values())

    @property
    def codec(self) -> str:
        """Short name of codec and parameters, such as ``ef2bit-v1:4096/32``."""
        outer = self.outer
        if outer.dense:
            return f"dense32-v{_VERSION}"
        values = "2bit" if outer.quantizer == "2bit" else "32"
        options = "/tiles" * (outer.layout == "tiles") + "/clip" * (outer.short_chunk == "clip")
        return f"ef{values}-v{_VERSION}:{outer.chunk}/{outer.top_k}{options}"

    @cached_property
    def header(self) -> bytes:
        """The first bytes of every payload of this stage."""
        description = json.dumps([self.codec, list(self.shapes.items())]).encode()
        return _HEADER.pack(_MAGIC, _VERSION, hashlib.sha256(description).digest()[:8])


def encode(layout: PayloadLayout, sparse: Mapping[str, SparseTensor]) -> bytes:
    """The payload with `sparse`, one entry per tensor of `layout`; values are rounded to float32."""
    parts = [layout.header]
    for name, tensor_layout in layout.tensors.items():
        parts += _encode_tensor(tensor_layout, sparse[name])
    data = b"".join(parts)
    assert len(data) == layout.nbytes, "a payload's length follows from its layout"
    return data


def decode(layout: PayloadLayout, data: bytes) -> dict[str, SparseTensor]:
    """The content of a payload from anyone; on success it is finite and inside the tensors of `layout`.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT for any other bytes. Nothing is allocated by what the bytes say.
    """
    if len(data) != layout.nbytes:
        raise _corrupt(f"It has {len(data)} bytes instead of {layout.nbytes}.")
    if data[: _HEADER.size] != layout.header:
        raise _corrupt(f"Its header is not that of codec {layout.codec} for this stage.")
    raw = np.frombuffer(data, np.uint8)
    sparse, start = {}, _HEADER.size
    for name, tensor_layout in layout.tensors.items():
        stop = start + _tensor_nbytes(tensor_layout)
        try:
            sparse[name] = _decode_tensor(tensor_layout, raw[start:stop])
        except ValueError as error:
            raise _corrupt(f"Tensor '{name}': {error}.") from None
        start = stop
    return sparse


def _tensor_nbytes(layout: TensorLayout) -> int:
    if layout.outer.dense:
        return 4 * layout.numel
    indices = sum(group.count * EliasFano(group.size, group.k).nbytes for group in layout.groups)
    if layout.outer.quantizer == "none":
        return indices + 4 * layout.sent
    return _MAGNITUDES_NBYTES + indices + (layout.sent + 3) // 4


def _encode_tensor(layout: TensorLayout, sparse: SparseTensor) -> list[bytes]:
    codes_s = sparse.codes_s.numpy()
    if sparse.indices_s is None:
        return [codes_s.astype("<f4", copy=False).tobytes()]
    positions_s = layout.positions(sparse.indices_s).numpy()
    parts, first, element = [], 0, 0
    for group in layout.groups:
        stop = first + group.count * group.k
        starts_c = element + np.arange(group.count)[:, None] * group.size
        indices_ck = positions_s[first:stop].reshape(group.count, group.k) - starts_c
        parts.append(EliasFano(group.size, group.k).encode(indices_ck).tobytes())
        first, element = stop, element + group.count * group.size
    if sparse.magnitudes is None:
        return [*parts, codes_s.astype("<f4", copy=False).tobytes()]
    return [sparse.magnitudes.numpy().astype("<f4").tobytes(), *parts, _pack_codes(codes_s).tobytes()]


def _decode_tensor(layout: TensorLayout, raw: NDArray[np.uint8]) -> SparseTensor:
    """ValueError says what is wrong with `raw`, whose length is right."""
    if layout.outer.dense:
        return SparseTensor(None, torch.from_numpy(_finite(raw)))
    magnitudes = None
    if layout.outer.quantizer == "2bit":
        low_high = _finite(raw[:_MAGNITUDES_NBYTES])
        if np.signbit(low_high).any() or low_high[0] > low_high[1]:
            raise ValueError("the magnitudes are not two ascending positive numbers")
        magnitudes, raw = torch.from_numpy(low_high), raw[_MAGNITUDES_NBYTES:]
    positions, element = [], 0
    for group in layout.groups:
        code = EliasFano(group.size, group.k)
        coded, raw = np.split(raw, [group.count * code.nbytes])
        starts_c = element + np.arange(group.count)[:, None] * group.size
        positions.append((code.decode(coded.reshape(group.count, code.nbytes)) + starts_c).ravel())
        element += group.count * group.size
    indices_s = layout.row_major(torch.from_numpy(np.concatenate(positions)))
    codes = _finite(raw) if magnitudes is None else _unpack_codes(raw, layout.sent)
    return SparseTensor(indices_s, torch.from_numpy(codes), magnitudes)


@dataclass(frozen=True)
class EliasFano:
    """Code of `k` strictly increasing indices below `size`, in a fixed number of bytes.

    The low bits of every index stand as they are; the rest, high_i, as ones at high_i + i of a bit vector.
    """

    size: int
    k: int

    @cached_property
    def low_bits(self) -> int:
        """Low bits per index, chosen for the shortest code."""
        return min(range(self.size.bit_length()), key=lambda low: self.k * low + (self.size - 1 >> low))

    @property
    def high_bits(self) -> int:
        """Length of the bit vector with the high parts."""
        return self.k + (self.size - 1 >> self.low_bits)

    @property
    def nbytes(self) -> int:
        return (self.k * self.low_bits + self.high_bits + 7) // 8

    def encode(self, indices_ck: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Coded rows [c, nbytes] of strictly increasing rows of indices [c, k]."""
        count = len(indices_ck)
        bits = np.zeros((count, self.nbytes * 8), np.uint8)
        split = self.k * self.low_bits
        low_ckl = indices_ck[:, :, None] >> np.arange(self.low_bits) & 1
        bits[:, :split] = low_ckl.reshape(count, split)
        ones_ck = split + (indices_ck >> self.low_bits) + np.arange(self.k)
        np.put_along_axis(bits, ones_ck, 1, axis=1)
        return np.packbits(bits, axis=1, bitorder="little")

    def decode(self, coded: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Rows of indices [c, k] of coded rows [c, nbytes]. ValueError where a row is not a valid code."""
        count = len(coded)
        bits = np.unpackbits(coded, axis=1, bitorder="little")
        split, end = self.k * self.low_bits, self.k * self.low_bits + self.high_bits
        if bits[:, end:].any():
            raise ValueError("unused bits of a chunk's indices are set")
        high = bits[:, split:end]
        if (high.sum(axis=1, dtype=np.int64) != self.k).any():
            raise ValueError(f"a chunk does not hold {self.k} indices")
        ones_ck = high.nonzero()[1].reshape(count, self.k)
        low_ckl = bits[:, :split].reshape(count, self.k, self.low_bits).astype(np.int64)
        low_ck = (low_ckl << np.arange(self.low_bits)).sum(axis=2)
        indices_ck: NDArray[np.int64] = (ones_ck - np.arange(self.k) << self.low_bits) + low_ck
        if (indices_ck[:, 1:] <= indices_ck[:, :-1]).any():
            raise ValueError("a chunk's indices are not strictly increasing")
        if (indices_ck[:, -1] >= self.size).any():
            raise ValueError(f"a chunk's indices exceed its {self.size} elements")
        return indices_ck


def _pack_codes(codes_s: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four 2-bit codes a byte, the first in the lowest bits."""
    padded = np.pad(codes_s, (0, -len(codes_s) % 4)).reshape(-1, 4)
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(padded << _CODE_SHIFTS, axis=1)
    return packed


def _unpack_codes(raw: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = (raw[:, None] >> _CODE_SHIFTS & np.uint8(3)).ravel()
    if codes[count:].any():
        raise ValueError("unused bits of the codes are set")
    return codes[:count]


def _finite(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = raw.view("<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    return values


def _corrupt(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PAYLOAD_CORRUPT,
        f"A payload cannot be used. {cause}",
        "It is left out of the round; its owner must run the same version and specification.",
    )
