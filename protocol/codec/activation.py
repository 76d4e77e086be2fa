"""Torch tensors on a link: tensor <-> (header, little-endian bytes).

A frame carries a few tensors; their bytes follow one another in the order of the headers. Unpacking finds a
tensor by its name, and checks names, element types, shapes and length before it reads a byte. Values that are
not finite pass: who computes with them refuses them (node.core.worker.hosted_stages).

Shapes: b micro-batch, L tokens, k values of a token that cross the link (d if it is uncompressed).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.quantizers.loading import link_quantizer
from protocol.spec.quantizers import LINK_QUANTIZERS
from protocol.types import DType, TensorHeader

Packed = tuple[tuple[TensorHeader, ...], bytes]

# All of them now, and not when one is first used: the others of a round wait for the first step.
for _dtype in LINK_QUANTIZERS:
    link_quantizer(_dtype)


def pack_activation(name: str, tensor_blk: Tensor, dtype: str, shift: int = 0) -> Packed:
    """Headers and bytes of an activation or a gradient, any float dtype and device.

    `dtype` names a quantizer of protocol.spec.quantizers; its arrays become `name` and ``{name}.{part}``.
    `shift` is that of the frame (protocol.math.frame_shift).
    """
    x_blk, quantizer = tensor_blk.detach(), link_quantizer(dtype)
    shape = tuple(x_blk.shape)
    return _headers(name, shape, dtype), b"".join(array.data for array in quantizer.pack(x_blk, shape, shift))


def unpack_activation(
    headers: Sequence[TensorHeader],
    payload: bytes,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    shift: int = 0,
) -> Tensor:
    """The activation `name` of a frame as float32 [b, L, k] on the CPU.

    Raises FRAME_CORRUPT if the frame does not match `shape` and `dtype`.
    """
    parts = [_section(headers, payload, expected) for expected in _headers(name, shape, dtype)]
    return link_quantizer(dtype).unpack(parts, shape, shift)


def pack_ids(name: str, ids_bl: Tensor, vocabulary: int) -> Packed:
    """Header and bytes of token ids in the smallest of u8, u16, i32 that holds the vocabulary."""
    dtype = _ids_dtype(vocabulary)
    ids = np.ascontiguousarray(ids_bl.numpy(force=True), dtype=_NUMPY_IDS[dtype])
    return (TensorHeader(name, dtype, tuple(ids_bl.shape)),), ids.tobytes()


def unpack_ids(
    headers: Sequence[TensorHeader], payload: bytes, name: str, shape: tuple[int, ...], vocabulary: int
) -> Tensor:
    """The token ids `name` of a frame as int64 [b, L] on the CPU.

    Raises FRAME_CORRUPT if the frame does not match `shape`, or an id is not below `vocabulary`.
    """
    dtype = _ids_dtype(vocabulary)
    raw = _section(headers, payload, TensorHeader(name, dtype, shape)).view(_NUMPY_IDS[dtype])
    ids_bl = raw.astype(np.int64).reshape(shape)
    if ids_bl.size and (int(ids_bl.min()) < 0 or int(ids_bl.max()) >= vocabulary):
        raise corrupt(f"Tensor '{name}' holds token ids outside the vocabulary of {vocabulary}.")
    return torch.from_numpy(ids_bl)


_NUMPY_IDS = {DType.U8: "u1", DType.U16: "<u2", DType.I32: "<i4"}


def _ids_dtype(vocabulary: int) -> DType:
    if vocabulary <= 2**8:
        return DType.U8
    return DType.U16 if vocabulary <= 2**16 else DType.I32


def _headers(name: str, shape: tuple[int, ...], dtype: str) -> tuple[TensorHeader, ...]:
    return tuple(
        TensorHeader(f"{name}.{part.name}" if part.name else name, part.dtype, part.shape)
        for part in link_quantizer(dtype).parts(shape)
    )


def _section(headers: Sequence[TensorHeader], payload: bytes, expected: TensorHeader) -> NDArray[np.uint8]:
    """The raw bytes of the tensor that must look exactly like `expected`: a view, no copy."""
    # A negative dimension could make the sum of wrong sizes right.
    is_sane = all(n >= 0 for header in headers for n in header.shape)
    if not is_sane or sum(header.nbytes for header in headers) != len(payload):
        raise corrupt(f"The headers do not add up to the {len(payload)} bytes of the frame.")
    offset = 0
    for header in headers:
        if header.name == expected.name:
            break
        offset += header.nbytes
    else:
        raise corrupt(f"Tensor '{expected.name}' is missing.")
    if header != expected:
        raise corrupt(
            f"Tensor '{expected.name}' is {header.dtype.value} {list(header.shape)}, "
            f"not {expected.dtype.value} {list(expected.shape)}."
        )
    return np.frombuffer(payload, np.uint8, count=expected.nbytes, offset=offset)


def corrupt(cause: str) -> HetnodeError:
    """The error for a frame that cannot be used."""
    remedy = "The stream is closed. The neighbour has to update its program."
    return HetnodeError(ErrorCode.FRAME_CORRUPT, cause, remedy)
