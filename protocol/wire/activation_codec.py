"""Torch tensors on a link: tensor <-> (header, little-endian bytes).

A frame carries a few tensors, their bytes concatenated in the order of the headers. Packing gives the headers
and bytes of one tensor; unpacking finds it by name among those of a whole frame, checks names, element
types, shapes and length before it touches a byte. Values that are not finite pass: they make the gradient
norm not finite, and every member then skips the step alike.

Shapes: b micro-batch, L tokens, k whatever the link carries of an activation (d where uncompressed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.int4 import narrow, packed_width, widen
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import DType, TensorHeader

WireDType = Literal["bf16", "fp32", "int8", "int4"]
Packed = tuple[tuple[TensorHeader, ...], bytes]

_INT8_PEAK = 127.0


def pack_activation(name: str, tensor_blk: Tensor, dtype: WireDType) -> Packed:
    """Headers and bytes of an activation or a gradient, any float dtype and device.

    int8 rounds each token to 1/127 of its largest absolute value and adds that scale as a second tensor,
    ``{name}.scale`` [b, L] float32. int4 is packed by :mod:`protocol.algorithm.int4`, and its scale is a byte.
    Values that are not finite stay so.
    """
    x_blk = tensor_blk.detach()
    shape = tuple(x_blk.shape)
    if dtype == "bf16":
        return (TensorHeader(name, DType.BF16, shape),), _bytes(x_blk.to(torch.bfloat16).view(torch.int16))
    if dtype == "fp32":
        return (TensorHeader(name, DType.F32, shape),), _bytes(x_blk.to(torch.float32))
    x_blk = x_blk.to(torch.float32)
    if dtype == "int4":
        packed, code_bl = narrow(x_blk)
        return _int4_headers(name, shape), b"".join((_array(packed).data, _array(code_bl).data))
    scale_bl = x_blk.abs().amax(dim=-1) / _INT8_PEAK
    # A token of zeros has scale 0; any divisor keeps its zeros.
    divisor_bl = torch.where(scale_bl > 0, scale_bl, 1.0)
    steps_blk = (x_blk / divisor_bl.unsqueeze(-1)).round().clamp_(-_INT8_PEAK, _INT8_PEAK).to(torch.int8)
    return _int8_headers(name, shape), b"".join((_array(steps_blk).data, _array(scale_bl).data))


def unpack_activation(
    headers: Sequence[TensorHeader], payload: bytes, name: str, shape: tuple[int, ...], dtype: WireDType
) -> Tensor:
    """The activation `name` of a frame as float32 [b, L, k] on the CPU.

    Raises:
        HetnodeError: FRAME_CORRUPT where the frame is not what `shape` and `dtype` promise.
    """
    if dtype == "int8":
        steps_header, scale_header = _int8_headers(name, shape)
        steps_blk = _section(headers, payload, steps_header).view("i1")
        scale_bl = _section(headers, payload, scale_header).view("<f4")
        x_blk = torch.from_numpy(steps_blk.astype(np.float32)).view(shape)
        # torch multiplies rows by their scales thrice as fast as numpy.
        return x_blk.mul_(torch.from_numpy(scale_bl.astype(np.float32)).view(*shape[:-1], 1))
    if dtype == "int4":
        values_header, scale_header = _int4_headers(name, shape)
        # Copies, since torch warns of memory that it must not write to.
        packed = torch.from_numpy(_section(headers, payload, values_header).copy()).view(values_header.shape)
        code_bl = torch.from_numpy(_section(headers, payload, scale_header).copy()).view(scale_header.shape)
        return widen(packed, code_bl, shape[-1])
    if dtype == "bf16":
        raw = _section(headers, payload, TensorHeader(name, DType.BF16, shape)).view("<u2")
        # bf16 is the upper half of a float32.
        widened = raw.astype(np.uint32)
        widened <<= 16
        return torch.from_numpy(widened.view(np.float32)).view(shape)
    raw = _section(headers, payload, TensorHeader(name, DType.F32, shape)).view("<f4")
    return torch.from_numpy(raw.astype(np.float32)).view(shape)


def pack_ids(name: str, ids_bl: Tensor, vocabulary: int) -> Packed:
    """Header and bytes of token ids in the smallest of u8, u16, i32 that holds the vocabulary."""
    dtype = _ids_dtype(vocabulary)
    ids = np.ascontiguousarray(ids_bl.numpy(force=True), dtype=_NUMPY_IDS[dtype])
    return (TensorHeader(name, dtype, tuple(ids_bl.shape)),), ids.tobytes()


def unpack_ids(
    headers: Sequence[TensorHeader], payload: bytes, name: str, shape: tuple[int, ...], vocabulary: int
) -> Tensor:
    """The token ids `name` of a frame as int64 [b, L] on the CPU, all of them below `vocabulary`.

    Raises:
        HetnodeError: FRAME_CORRUPT where the frame is not what `shape` promises, or an id is out of range.
    """
    dtype = _ids_dtype(vocabulary)
    raw = _section(headers, payload, TensorHeader(name, dtype, shape)).view(_NUMPY_IDS[dtype])
    ids_bl = raw.astype(np.int64).reshape(shape)
    if ids_bl.size and (int(ids_bl.min()) < 0 or int(ids_bl.max()) >= vocabulary):
        raise _corrupt(f"Tensor '{name}' holds token ids outside the vocabulary of {vocabulary}.")
    return torch.from_numpy(ids_bl)


_NUMPY_IDS = {DType.U8: "u1", DType.U16: "<u2", DType.I32: "<i4"}


def _ids_dtype(vocabulary: int) -> DType:
    if vocabulary <= 2**8:
        return DType.U8
    return DType.U16 if vocabulary <= 2**16 else DType.I32


def _int8_headers(name: str, shape: tuple[int, ...]) -> tuple[TensorHeader, TensorHeader]:
    return TensorHeader(name, DType.I8, shape), TensorHeader(f"{name}.scale", DType.F32, shape[:-1])


def _int4_headers(name: str, shape: tuple[int, ...]) -> tuple[TensorHeader, TensorHeader]:
    packed = (*shape[:-1], packed_width(shape[-1]))
    return TensorHeader(name, DType.U8, packed), TensorHeader(f"{name}.scale", DType.U8, shape[:-1])


def _bytes(tensor: Tensor) -> bytes:
    return _array(tensor).tobytes()


def _array(tensor: Tensor) -> NDArray[Any]:
    """Little-endian and row-major; a view of `tensor` where it is that already."""
    array = np.ascontiguousarray(tensor.numpy(force=True))
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _section(headers: Sequence[TensorHeader], payload: bytes, expected: TensorHeader) -> NDArray[np.uint8]:
    """The raw bytes of the tensor that must look exactly like `expected`: a view, no copy."""
    is_sane = all(n >= 0 for header in headers for n in header.shape)
    if not is_sane or sum(header.nbytes for header in headers) != len(payload):
        raise _corrupt(f"The headers do not add up to the {len(payload)} bytes of the frame.")
    offset = 0
    for header in headers:
        if header.name == expected.name:
            break
        offset += header.nbytes
    else:
        raise _corrupt(f"Tensor '{expected.name}' is missing.")
    if header != expected:
        raise _corrupt(
            f"Tensor '{expected.name}' is {header.dtype.value} {list(header.shape)}, "
            f"not {expected.dtype.value} {list(expected.shape)}."
        )
    return np.frombuffer(payload, np.uint8, count=expected.nbytes, offset=offset)


def _corrupt(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.FRAME_CORRUPT,
        cause,
        "The stream is closed; the neighbour must run the same version and specification.",
    )
